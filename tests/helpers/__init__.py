"""What several tests share, by what it is for. Tests and the processes that they start import it by these names.

===========  =======================================================================================
`waiting`    waits until something is so, and fails where it does not come about
`suite`      the suite's own rules: what a test needs, how many examples it tries, where modules are
`models`     models, programs and functions for workers to run
`simulated`  stands in for what is slow or not there: a network, a GPU, a swarm, a recorded graph
`processes`  starts processes, and tells what a process does: its stacks, its sockets, its files
`hosts`      hosts of a cluster, made on this machine, and lines between them that fail
`abuse`      disturbs: Ctrl-C at any moment, strangers, members that send nonsense, hostile objects
`notebook`   kernels, Jupyter servers and pages, driven as people drive them
===========  =======================================================================================

Three programs, which a person runs, lie in the folder above: `beside_torch`, `planted` and `public_notebooks`. Scripts
that the tests of one folder start lie in that folder.
"""
