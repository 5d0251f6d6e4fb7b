"""The client's side of a swarm: models whose blocks are on servers, routes through the servers, and sessions.

==========================  ==========================================================
`model`, `sequential`       a model, and blocks of it, as torch modules
`session`                   one inference, with caches on the servers of its route
`sessions`                  all sessions of a swarm; closes those whose cache is gone
`stateless`                 blocks without caches, as for training
`servers`, `server_record`  all servers, and what the client knows of one server
`routing`                   chooses routes and servers; pure
`merging`                   merges or splits steps of a session
`journal`                   the log that a map shows
==========================  ==========================================================
"""
