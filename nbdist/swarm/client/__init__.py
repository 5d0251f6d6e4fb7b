"""The client's side of a swarm: models whose blocks are on servers, routes through the servers, and sessions.

===============  =========================================================
`routing`        chooses routes and servers; pure
`merging`        merges or splits steps of a session
`journal`        the log that a map shows
`server_record`  the client's record of one server
`servers`        all servers
`session`        one inference, with caches on the servers of its route
`sessions`       all sessions of a swarm; closes those whose cache is gone
`stateless`      blocks without caches, as for training
`model`          a model without blocks
`sequential`     blocks of a model as a torch module
===============  =========================================================
"""
