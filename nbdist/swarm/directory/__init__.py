"""Which servers a swarm has, and who gives them blocks: one directory and one placer, for all clients of the swarm.

============  ================================================================================
`routing`     chooses routes and servers; pure
`entry`       one server, as all clients know it
`directory`   the entries, and what clients have, which clients read again after changes
`succession`  chooses the next placer when the placer is lost; pure
`placing`     what a client asks of the placer, and the placer in another process
============  ================================================================================

Both live in the process that has called `nbdist.swarm.serve`, until it is lost; then in that of a server, whose
`nbdist.swarm.deputy` has kept a copy of the directory. `nbdist.swarm.placer` is the placer itself.
"""
