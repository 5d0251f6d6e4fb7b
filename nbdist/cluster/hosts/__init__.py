"""Workers on other hosts: invitations, the process that starts the workers there, and its talk with the notebook.

=============  =================================================================================
`invitations`  the connection file that invites a host, and the tokens that the notebook accepts
`admission`    the request of a process that wants to join, and the check of its versions
`hub`          the notebook's side: lets keepers in, hands workers to them
`group_board`  the store at which workers of several hosts form their process group
`losses`       tells all members at once that one is lost
`code_copy`    copies the Python files of the notebook's folder to other hosts
`interfaces`   the name of the network interface that has an address
`trials`       asks whether a worker of this host could join, and tests the connection
`keeper`       the process that starts the workers of one host, and ends them
`joining`      ``python -m nbdist worker``
`launchers`    start workers on other hosts
=============  =================================================================================

::

    the notebook's host                                     another host
    notebook ── hub ── entrance <─── knock, with a token ─── keeper
                 │ <───────── RPC, a world of its own ──────> │ starts, signals, ends
                 │            start, signal, probe, end       v
    kernel sockets ── relay <────── frames of Jupyter ─────> relay ── kernel of a worker
    agent <───────────────── RPC, the cluster's world ──────────────> agent of the worker

A keeper starts the workers of its host with a `LocalLauncher`, as the notebook does for workers of its own host.
nbdist's connections between hosts use ZeroMQ over TCP with CURVE. RPC agents make all of them but the knock, so lost
messages are sent again, silence is noticed, and calls time out.
"""
