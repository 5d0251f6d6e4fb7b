"""The client's side of a swarm: models whose blocks are on servers, and sessions.

===============  =========================================================
`merging`        merges or splits steps of a session
`journal`        the log that a map shows
`server_record`  the client's record of one server
`crew`           all servers, as this client knows them: routes, and calls
`session`        one inference, with caches on the servers of its route
`sessions`       all sessions of a swarm; closes those whose cache is gone
`stateless`      blocks without caches, as for training
`model`          a model without blocks
`sequential`     blocks of a model as a torch module
===============  =========================================================
"""
