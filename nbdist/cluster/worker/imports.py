"""Imports the modules that every worker needs, in the zygote, so that forked workers share their memory.

The list has the modules that a worker would import itself, sooner or later: for its start, its first call, its first
completion, its first error. A module that is missing here costs time in each worker. A module that no worker needs
costs time at the start.
"""

import contextlib
import importlib

# nbdist; then ipykernel and what it loads when it starts; then what IPython loads when it is first needed. Each imports
# more: a module is listed only if no other one here imports it.
MODULES = (
    "numpy.random",
    "nbdist.autograd.recorder",
    "nbdist.cluster.jupyter.labels",
    "nbdist.cluster.worker.kernel",
    "nbdist.cluster.worker.output",
    "nbdist.cluster.inspection.status_report",
    "nbdist.cluster.worker.tasks",
    "nbdist.cluster.worker.values",
    "ipykernel.debugger",
    "ipykernel.kernelapp",
    "jedi",
    "pygments.formatters.terminal256",
    "pygments.lexers.python",
    "stack_data",
    "tornado.platform.asyncio",
    "IPython.core.completerlib",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
)

for _module in MODULES:
    with contextlib.suppress(ImportError):  # no worker depends on these imports: numpy, for one, may not be installed
        importlib.import_module(_module)
