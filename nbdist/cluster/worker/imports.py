"""Imports the modules that every worker needs, in the zygote, so that forked workers share their memory.

The list has the modules that a worker would import itself, sooner or later: for its start, its first call, its first
completion, its first error. A module that is missing here costs time in each worker. A module that no worker needs
costs time at the start.
"""

from __future__ import annotations

import contextlib
import importlib

# torch and nbdist; then ipykernel and what it loads when it starts; then what IPython loads when it is first needed.
MODULES = (
    "torch.distributed",
    "numpy.random",
    "nbdist.autograd.recorder",
    "nbdist.cluster.worker.collectives",
    "nbdist.cluster.processes.process_memory",
    "nbdist.cluster.jupyter.labels",
    "nbdist.cluster.worker.kernel",
    "nbdist.cluster.worker.output",
    "nbdist.cluster.inspection.status_report",
    "nbdist.cluster.worker.tasks",
    "nbdist.cluster.worker.values",
    "nbdist.rpc.calls.caller",
    "nbdist.rpc.world.shutdown",
    "nbdist.rpc.calls.executor",
    "nbdist.rpc.world.handshake",
    "nbdist.rpc.calls.outcomes",
    "nbdist.rpc.calls.sender",
    "nbdist.rpc.calls.stopping",
    "nbdist.rpc.start",
    "ipykernel.debugger",
    "ipykernel.ipkernel",
    "ipykernel.kernelapp",
    "ipykernel.zmqshell",
    "jedi",
    "pygments.formatters.terminal256",
    "pygments.lexers.python",
    "stack_data",
    "tornado.platform.asyncio",
    "IPython.core.completer",
    "IPython.core.completerlib",
    "IPython.core.logger",
    "IPython.core.magics",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
)

for _module in MODULES:
    with contextlib.suppress(ImportError):  # no worker depends on these imports: numpy, for one, may not be installed
        importlib.import_module(_module)
