"""The workers that one notebook drives: real kernels, started, watched, interrupted and restarted from here.

============ ==================================================================================================
here
cluster      `Cluster`: what users call
spec         the description of a cluster, which checks itself; `targets` parses texts such as ``0,2``
workers      one worker as the notebook sees it, through all its restarts
interrupting every interrupt, whatever caused it
mending      what workers ask for after they have aborted collectives of NCCL
executor     calls functions on the first free worker, as an executor of `concurrent.futures` does
standing     the line below a cell that says what its workers wait for
errors       the errors with which cells fail
rooms
processes    starts the worker processes, forms their process group, restarts and ends them
kernels      talks to the workers' kernels; the cells that run there
output       what workers print, on its way to a place below a cell or on a terminal
worker       what runs inside of a worker process
inspection   what workers do and hold, and what memory that takes
examination  what is wrong with the machines and the links between them, and what to do about it
============ ==================================================================================================

A cell takes this way: `cluster.execute` → `kernels.connection` → the worker's ipykernel. Its output comes back by
`kernels.connection` → `kernels.routing` → `kernels.cells` → `output.arranger` → `output.sinks`, in the kernel thread,
while the thread that waits for the cell sleeps.
"""
