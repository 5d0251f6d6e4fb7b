"""The memory through which agents of one host pass large tensors, without sending their bytes through a socket.

=============  =======================================================
`mapping`      makes shared memory and maps it
`blocks`       decides which block of an arena is free, taken or lent
`arena`        the memory in which one agent lends blocks to others
`descriptors`  passes the descriptors with which such memory is mapped
`quiet`        waits for GPUs in a thread of its own
`gpu_memory`   makes memory of a GPU that processes share
`gpu_arena`    an arena in such memory
`leases`       the blocks that others have lent to this agent
=============  =======================================================
"""
