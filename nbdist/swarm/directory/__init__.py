"""Which servers a swarm has, and who gives them blocks: one directory and one placer, for all clients of the swarm.

============  ================================================================================
`routing`     chooses routes and servers; pure
`entry`       one server, as all clients know it
`directory`   the entries, which clients read again after changes
`placing`     what a client asks of the placer, and the placer in another process
============  ================================================================================

Both live in the process that has called `nbdist.swarm.serve`; `nbdist.swarm.placer` is the placer itself.
"""
