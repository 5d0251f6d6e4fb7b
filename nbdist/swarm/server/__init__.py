"""The server's side of a swarm, on a worker: the blocks that it has loaded, and the caches of its sessions.

============================  ====================================================
`server`                      the calls that clients make
`session_caches`              one session: caches, steps asked for, inputs arrived
`queues`, `computing`         requests in order, and the one thread that computes
`cache_budget`, `cache_room`  who gets memory for caches; decides, and waits
`neighbours`                  calls to other servers
`sources`                     where the weights come from
============================  ====================================================
"""
