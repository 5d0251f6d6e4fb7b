"""The server's side of a swarm, on a worker: the blocks that it has loaded, and the caches of its sessions.

============================  ====================================================
`server`                      the calls that clients make
`session_caches`              one session: its caches, steps called for, and inputs
`queues`, `computing`         requests in order, and the one thread that computes
`cache_budget`, `cache_room`  grants memory for caches (pure); waits for it
`neighbours`                  calls to other servers
`sources`                     where the weights come from
============================  ====================================================
"""
