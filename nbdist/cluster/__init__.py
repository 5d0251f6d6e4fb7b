"""The workers that one notebook drives: real kernels, started here, watched, interrupted, restarted.

================== ==============================================================================================
in the notebook
cluster            `Cluster`: what a notebook or a script asks for
spec targets       what it is asked to be; which workers a line means                                      (pure)
lifecycle workers  how workers come up and go; one worker as it is seen here
launchers          what makes processes: the contract, and `local`
processes zygote   the local one's mechanism: the process that workers are forked from, and its owner's side
folder             the run directory
kernels            the thread that talks to the kernels; `jupyter_wire`, what is said as bytes              (pure)
cells errors       one cell on its workers: its handle; how it fails
executor           functions called on workers, one at a time on each: an executor of `concurrent.futures`
asking             what a worker's kernel says of a name, and how it would complete one
routing origins    to which cell a message belongs, of a cell or of a call
arrange            the output of several workers in one place: the contract                                 (pure)
live grouped       as it comes; or held back to the end, by worker                                          (pure)
screen items lines what of it has been shown, in which pieces, and how they are cut from what a worker says (pure)
terminal           how a line looks after its carriage returns, and in its colours                          (pure)
sinks outlet       the place, below a cell or a terminal; what shows messages there in time
interrupting       the one way of every interrupt
comms              widgets of workers
labels             ``In[3] on worker1``
status             what each worker does
in a worker
worker             what is added to a stock ipykernel; `setup`, what it is told
worker_output      where output goes; ``worker_values``, how values come; ``worker_tasks``, how tasks run
collectives        the process group, and how its collectives end when a member dies or the user interrupts
gloo               gloo's connections, which are shut for that; `group_store`, where the group's members meet
translating        torch's error of a collective becomes WorkerLost, where it leaves the user's code
last_words         what is written just before a crash
worker_imports     what the zygote imports for all of them
================== ==============================================================================================

The way of a cell: `cluster.execute` → `kernels` → the worker's ipykernel, and what comes of it: `kernels` → `routing`
→ `cells` → `arrange` → `sinks`, in the kernel thread, while whoever waits for the cell sleeps.
"""
