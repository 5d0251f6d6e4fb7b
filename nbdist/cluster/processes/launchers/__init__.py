"""The launchers of this host, which start the worker processes of a cluster.

==========  ============================================
`contract`  `Launcher`: the contract of all launchers
`local`     processes of this host, forked from a zygote
==========  ============================================
"""
