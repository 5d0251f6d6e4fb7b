"""The workers that one notebook drives: real kernels, started, watched, interrupted and restarted from here.

============== ================================================================================================
modules
cluster        `Cluster`: what users call. It makes the parts, and passes calls on to them
group_history  the collectives of a process group, as one member has called them
team           the workers, by rank, name and target
cell_sender    sends cells to workers, and sees them to their end
cell_values    moves values between the notebook and the workers' variables
interrupting   every interrupt, whatever caused it
worker_changes restarts workers, lets others join, forms their process group anew
lifecycle      starts, restarts and ends the workers, and forms their process group
deaths         brings together what the launcher and the agent know of a worker's end
spec           the description of a cluster and its options, which checks itself; `targets` parses ``0,2``
launching      finds the launcher of a cluster
mending        requests of workers that concern their process group
undoing        undoes what was begun if the code that follows fails
spawning       says what to write in place of ``torch.multiprocessing.spawn``
executor       calls functions on the first free worker, as an executor of `concurrent.futures` does
stands         where the workers of a cell stand, in words
whereabouts    where a thread is in the user's code
held_locks     which lock a thread waits for, and who holds it
partings       where the members of a group part, found from their histories
collation      asks the workers for these histories
page_debugger  lets JupyterLab's debugger debug a worker
stops          asks the user what the debuggers on the workers want to know
lookout        the line below a cell that says what its workers wait for
errors         the errors with which cells fail
subpackages
jupyter        Jupyter's messages and kernels, and the differences between its versions
processes      the processes of this host, the meeting of the process group
hosts          workers on other hosts
kernels        the workers as the notebook sees them, and the cells that run there
output         brings the workers' output to a place below a cell or on a terminal
worker         the code that runs inside of a worker process
inspection     looks into workers: their work, their objects and their memory
examination    finds faults of the machines and of the links between them, and says what to do
============== ================================================================================================

``docs/a_cell.md`` follows a cell through the modules, to a worker and back, step by step.
"""
