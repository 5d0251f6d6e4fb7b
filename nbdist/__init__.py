"""nbdist: a notebook drives a small distributed PyTorch system, and shows what it does.

The map of the package. A lower layer never imports a higher one; higher layers make themselves known by
registering. `tests/test_layers.py` holds every import against the tables below.

====== ============================ ====================================================================
layer  modules                      what is there
====== ============================ ====================================================================
0      errors ids trace pictures    words that all layers share; drawings as images
       durations registry           lengths of time that users give, checked; what higher layers make
       signals holds                what must not be cut short by Ctrl-C; what has died
       finalisers                   calls that are made where Python collects garbage in the midst of the package
       torch_private                the private names of torch that are used, in one table
1      wire                         messages, the codec, the protocol of one peer: all pure
2      channel                      moving frames: the contract, in-process, unix sockets, ZeroMQ, faulty; who is
                                    woken for them: gate, spinning; memory that agents of one host share: blocks,
                                    arena, leases
3      rpc                          agents, calls, remote references, membership
4      autograd optim nn            backward passes over workers; optimizers, modules, pipelines elsewhere;
       swarm                        language models served by workers that may die
5      cluster                      worker kernels: launching, cells, output, interrupts, restarts
6      views                        what is drawn: progress, status, timelines
7      magics                       read a line, make one call, show one view
8      compat doctor testing        tools on top, which nothing imports
       __main__
====== ============================ ====================================================================

What a call or reference waits for, and what comes next: `rpc.exchange` decides, and draws it.
The way of a call: `rpc.api` → `rpc.caller` → `rpc.sender` (encodes with `wire.codec`, awaits in `rpc.calls`) →
`rpc.links.post` → `wire.peer` (numbers and keeps it) → a `channel` → the other agent's `read` → `rpc.executor` →
`rpc.answers`, and back to `rpc.outcomes`; who waits for the answer reads it itself where that pays: `rpc.guest`. Large
tensors for an agent of the same host go beside it, through shared memory: `rpc.sharing`. What is recorded of it for a
backward pass: `rpc.recording` asks `autograd.recorder`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nbdist import registry
from nbdist.errors import (
    DecodeError,
    EncodeError,
    ForwardNaN,
    GroupError,
    Interrupted,
    MissingDefinition,
    NbdistError,
    NotInitialized,
    NotUnique,
    ProtocolError,
    RemoteError,
    RendezvousError,
    ResourceError,
    RpcTimeout,
    RRefError,
    SecurityError,
    UnknownWorker,
    UsageError,
    VersionMismatch,
    WorkerLost,
)

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.cluster.cluster import Cluster

__all__ = [
    "Cluster",
    "DecodeError",
    "EncodeError",
    "ForwardNaN",
    "GroupError",
    "Interrupted",
    "MissingDefinition",
    "NbdistError",
    "NotInitialized",
    "NotUnique",
    "ProtocolError",
    "RRefError",
    "RemoteError",
    "RendezvousError",
    "ResourceError",
    "RpcTimeout",
    "SecurityError",
    "UnknownWorker",
    "UsageError",
    "VersionMismatch",
    "WorkerLost",
    "__version__",
]

__version__ = "0.1.0"

LAYERS: dict[str, int] = {
    "durations": 0,
    "errors": 0,
    "finalisers": 0,
    "holds": 0,
    "ids": 0,
    "pictures": 0,
    "registry": 0,
    "signals": 0,
    "torch_private": 0,
    "trace": 0,
    "wire": 1,
    "channel": 2,
    "rpc": 3,
    "autograd": 4,
    "optim": 4,
    "nn": 4,
    "swarm": 4,
    "cluster": 5,
    "views": 6,
    "magics": 7,
    "compat": 8,
    "doctor": 8,
    "testing": 8,
    "__main__": 8,
}
"""Which layer a module is in, by the start of its name."""

THIRD_PARTY: dict[str, tuple[str, ...]] = {
    "zmq": ("channel",),
    "cloudpickle": ("wire",),
    "jupyter_client": ("cluster",),
    "ipykernel": ("cluster",),
    "IPython": ("cluster", "magics", "compat.ipyparallel"),
    "anywidget": ("views.widgets",),
    "ipywidgets": ("views.widgets",),
    "ray": ("cluster.launchers",),
    "transformers": ("swarm.adapter",),
    "safetensors": ("swarm.adapter",),
}
"""Which packages of others only some modules may import."""


_NAMESPACES = ("autograd", "nn", "optim", "rpc", "swarm", "testing")


def __getattr__(name: str) -> Any:
    """Import what a program asks for: `Cluster` needs Jupyter's packages, and `swarm` needs transformers."""
    if name == "Cluster":
        from nbdist.compat.ipyparallel.client import view_of
        from nbdist.views import clusters

        clusters.Cluster.add_view("view", view_of)
        return clusters.Cluster
    if name in _NAMESPACES:
        return importlib.import_module(f"nbdist.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _make_recorder(agent: Any) -> Any:
    from nbdist.autograd.recorder import Recorder

    return Recorder(agent)


registry.make_recorder = _make_recorder


def load_ipython_extension(shell: InteractiveShell) -> None:
    """``%load_ext nbdist``: add the magics."""
    from nbdist.magics import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """``%unload_ext nbdist``: end the cluster."""
    from nbdist.magics import unload

    unload(shell)
