"""The server's side of a swarm, on a worker: the blocks that it has loaded, and the caches of its sessions.

================  =====================================================
`neighbours`      calls to other servers
`session_caches`  one session: its caches, steps called for, and inputs
`sources`         where the weights come from
`cache_budget`    grants memory for caches; pure
`cache_room`      waits for such memory
`queues`          the requests in order
`runtime`         the one thread that computes
`server`          the calls that clients make
================  =====================================================
"""
