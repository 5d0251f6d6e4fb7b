"""The client's side of a swarm: models whose blocks are on servers, routes through these, and sessions.

==========================  ==========================================================
`model`, `sequential`       a model, and blocks of it, as torch modules
`session`                   one inference, with caches on the servers of its route
`sessions`                  all sessions of a swarm; closes those whose cache is gone
`stateless`                 blocks without caches, as for training
`servers`, `server_record`  all servers, and what is known of one
`routing`                   chooses routes and servers; decides, and does nothing else
`merging`                   steps of a session joined or split
`journal`                   the log that a map shows
==========================  ==========================================================
"""
