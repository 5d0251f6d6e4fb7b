"""The workers that one notebook drives: real kernels, started, watched, interrupted and restarted from here.

========================= =======================================================================================
in the notebook
cluster                   `Cluster`: what users call
spec targets              the checked description of a cluster; which workers a text such as ``0,2`` names       (pure)
lifecycle workers         bring workers up, restart and end them; the state of one worker
launchers                 the contract of a class that starts processes, and `local`, which starts them on this host
processes zygote          the process that local workers are forked from, seen from the notebook and from inside
folder                    the run directory
kernels                   the thread that talks to the kernels; `jupyter_wire`: their messages as bytes          (pure)
cells errors              a cell on its workers and its handle; the error with which it fails
notices standing          what a cell says of workers that failed; what it says of workers that wait for long
executor                  calls functions on the first free worker, as an executor of `concurrent.futures`
asking                    completion and inspection by a worker's kernel
interrupting              every interrupt, whatever caused it
where status              the line of code at which a worker is; what each worker does
labels page_lines         tracebacks: ``In[3] on worker1``; lines counted from the top of the page's cell
comms                     widgets of workers
output, on its way to a place below a cell or on a terminal
routing origins           find the cell to which a message belongs; show the output of calls below their cell
arrange                   the output of several workers in one place: the contract                               (pure)
live grouped              arrange it as it comes; arrange it at the end, by worker                               (pure)
screen items lines        what has been shown, in which pieces, and how text is cut into these                   (pure)
cutting tail terminal     leave out the middle of long output; keep the last lines; apply carriage returns       (pure)
sinks outlet in_place     the place for output; what shows messages there in time; a text that can be replaced
print_log                 everything that a worker has printed, on disk
memory and values
process_memory            the memory of a process, as Linux counts it
holdings variables        what lives on each worker; a worker's own variables
census pins roots         count what objects hold; find the names that hold them
freeing comparing         free what only the shell keeps; compare a value across workers
in a worker
worker setup              the extension of a stock ipykernel; what it must know when it starts
worker_output             sends output to its cell, and keeps values
worker_values             puts pushed values into the namespace
worker_tasks              runs the tasks of `executor`
worker_imports            what the zygote imports for all workers
shell_channel             keeps one version of ipykernel from losing requests
last_words                saves what a worker writes just before a crash
collectives               the process group, and how its collectives end when a member dies or the user interrupts
gloo gloo_waits           shut the connections of gloo; end the waits that gloo forgets then
group_store               the files by which the workers form their process group
translating               turns torch's error of a collective into WorkerLost or GroupError
========================= =======================================================================================

A cell takes this way: `cluster.execute` → `kernels` → the worker's ipykernel; its output comes back by `kernels` →
`routing` → `cells` → `arrange` → `sinks`, in the kernel thread, while the thread that waits for the cell sleeps.
"""
