"""What every worker imports: the zygote imports it once, and its workers share the pages."""

from __future__ import annotations

import contextlib
import importlib

__all__ = ["MODULES"]

MODULES = (
    "torch.distributed",
    "numpy.random",
    "nbdist.autograd.recorder",
    "nbdist.cluster.collectives",
    "nbdist.cluster.labels",
    "nbdist.cluster.status",
    "nbdist.cluster.worker",
    "nbdist.cluster.worker_output",
    "nbdist.cluster.worker_tasks",
    "nbdist.cluster.worker_values",
    "nbdist.rpc.caller",
    "nbdist.rpc.ending",
    "nbdist.rpc.executor",
    "nbdist.rpc.handshake",
    "nbdist.rpc.outcomes",
    "nbdist.rpc.sender",
    "nbdist.rpc.stopping",
    "nbdist.rpc.world",
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
    with contextlib.suppress(ImportError):  # not all of it is needed, and numpy need not be there
        importlib.import_module(_module)
