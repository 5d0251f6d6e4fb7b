"""nbdist: a notebook drives a small distributed PyTorch system, and shows how it works.

This is the map of the package. A lower layer never imports a higher one; a higher layer registers its functions with a
lower one, or `registry` names them. `tests/test_layers.py` checks every import against the tables below.

====== ============================ ==========================================================================
layer  modules                      contents
====== ============================ ==========================================================================
0      errors ids trace             errors, ids, events that views and tests can see
       durations registry           checks of times that users give; objects of higher layers, by name
       signals holds                delay of signal handlers, such as Ctrl-C's, while code updates something;
                                    a queue of objects that were garbage-collected
       finalisers                   calls that a user's ``__del__`` or signal handler makes
       large_memory                 memory for large data, in large pages
       torch_private                the private names of torch that nbdist uses, in one table
       code_places                  whose code a file holds: the user's, nbdist's, torch's, Python's
       code_lines                   a line at which a thread stands, in words
       thread_frames                the frames and lines of this process's threads
       amounts columns              bytes, seconds and counts in words; aligned rows of text
       gpus                         copies between GPUs and the host's memory; times on GPUs
1      wire                         messages, their encoding, the protocol between two agents: all pure
2      channel                      moves frames: in-process, unix sockets, ZeroMQ, and with faults for tests;
                                    wakes readers (gate, spinning); memory that agents of one host share;
                                    how much of the machine this process may use
3      rpc                          agents, calls, remote references, membership
4      autograd optim nn            backward passes over workers; optimizers, modules and pipelines on
       swarm                        workers; language models served by workers that may die
5      cluster                      worker kernels: launching, cells, output, interrupts, restarts
6      views                        what a notebook shows: progress, status, timelines
7      magics                       each reads a line, makes one call, shows one view
8      compat doctor testing        tools on top, which no other layer imports
       __main__
====== ============================ ==========================================================================

The path of a call: `rpc.api` → `rpc.calls.caller` → `rpc.calls.sender` (encodes with `wire.codec`, notes the call in
`rpc.core.pending`) → `rpc.links.post` → `wire.peer` (numbers the message and keeps a copy) → `channel.local` → a thread
of the other agent's `rpc.pool`, in `Agent.read` → `rpc.calls.executor` → `rpc.calls.answers`, and back to
`rpc.calls.outcomes`, which ends the caller's wait in `rpc.latch`. Pages of ``docs`` follow a call, a cell, a gradient
and a token of a swarm step by step: ``a_call.md``, ``a_cell.md``, ``a_gradient.md``, ``a_token.md``. Besides:

- `rpc.core.exchange` decides what a call or a reference waits for, and what happens next; it draws the states.
- `rpc.calls.waiting_reader` lets the waiting thread, a *guest*, read its answer itself, where this is faster.
- `rpc.shared_tensors` passes large tensors to an agent of the same host through shared memory.
- `rpc.recording` asks `autograd.recorder` to record a call for a backward pass.

Inside of a package, doors open one way, too: `ROOMS` orders the rooms of each package, and the head of a room lists its
modules, both from the lowest up, so that a path's first file stands last. `tests/test_layers.py` holds both.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from nbdist.errors import (
    DebuggerQuit,
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
    "DebuggerQuit",
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

if sys.platform != "linux":
    raise ImportError(f"nbdist runs on Linux, and this is {sys.platform}: WSL2 and Docker work")
# Threads share tables that are safe only under the GIL, also where the GIL of a free-threaded build can be switched on.
if "t" in sys.abiflags:
    raise ImportError(
        "nbdist needs a Python with a GIL, and this one is free-threaded: use python3.13, not python3.13t"
    )

_LAYERS = (
    "amounts code_lines code_places columns durations errors finalisers gpus holds ids large_memory registry signals "
    "thread_frames torch_private trace",
    "wire",
    "channel",
    "rpc",
    "autograd optim nn swarm",
    "cluster",
    "views",
    "magics",
    "compat doctor testing __main__",
)
LAYERS: dict[str, int] = {module: layer for layer, modules in enumerate(_LAYERS) for module in modules.split()}
"""The layer of each module, by the first part of its name."""

ROOMS: dict[str, str] = {
    "gpus": "order pinned side_streams spans staging support",
    "wire": "devices history messages plain tensors encoded peer pickling quick encoding decoding codec",
    "channel": (
        "after_fork contract faulty gate inprocess machine assembly framing local_link locked_file resources "
        "process_watch secret locked_directory shared_memory spinning zeromq_links large_inbox zeromq door entrance "
        "local"
    ),
    "rpc": (
        "devices failures here options recording shared_tensors streams waits latch promise futures named core pool "
        "links references calls functions thread_switching world agent asking hosted start api"
    ),
    "autograd": "graph watching passes memory_use recorder handle api inspection",
    "optim": "parameters local owners clipping saving optimizer scheduler",
    "nn": (
        "batches cutting shared_inputs losses placement randomness remote_module schedules inbox stage reference "
        "timeline watched pipeline_part pipeline_parts pipeline"
    ),
    "swarm": (
        "weakly carriage history policy stacking weight_file adapter model_cache named_models server directory deputy "
        "client doors placer http swarm serving connecting"
    ),
    "cluster": (
        "group_history undoing spec jupyter targets spawning processes output errors kernels examination lifecycle "
        "team stands whereabouts held_locks partings hosts deaths launching worker_changes mending "
        "worker stops collation lookout executor interrupting cell_sender cell_values page_debugger cluster inspection"
    ),
    "views": "drawing shown tables cards map passes references timeline workers values widgets displays",
    "magics": "checking reader lines overview place completion inspection reruns session dist_magics",
    "compat": ("autograd echo gathering ipyparallel optimizer options run words agents references rpc substitution"),
    "testing": "launchers world",
}
"""The rooms of each package, modules and folders, from the lowest: each imports only from those before it.

Inside of a room, the head of its ``__init__`` lists the modules in the same way.
"""

THIRD_PARTY: dict[str, tuple[str, ...]] = {
    "zmq": ("channel", "cluster.jupyter"),
    "cloudpickle": ("wire",),
    "jupyter_client": ("cluster",),
    "ipykernel": ("cluster",),
    "IPython": ("cluster", "magics", "compat.ipyparallel"),
    "anywidget": ("views.widgets",),
    "ipywidgets": ("views.widgets", "cluster.jupyter.versions"),
    "ray": ("cluster.hosts.launchers",),
    "transformers": ("swarm.adapter", "swarm.model_cache"),
    "safetensors": ("swarm.weight_file",),
    "starlette": ("swarm.http.app",),
    "uvicorn": ("swarm.http.endpoint",),
}
"""The third-party packages that only some modules may import."""


# The subpackages that a program can use without importing them.
_NAMESPACES = ("autograd", "nn", "optim", "rpc", "swarm", "testing")


def __getattr__(name: str) -> Any:
    """Import and return the class `Cluster` or a subpackage when a program first asks for it."""
    # Not at import: `Cluster` needs Jupyter's packages, and `swarm` transformers, which not every program has.
    if name == "Cluster":
        from nbdist.cluster.cluster import Cluster

        return Cluster
    if name in _NAMESPACES:
        return importlib.import_module(f"nbdist.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    # For Tab: without the modules of the package that happen to be imported.
    return [*__all__, *_NAMESPACES]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add nbdist's magics to a notebook; ``%load_ext nbdist`` calls this, as in ``notebooks/00_tour.ipynb``."""
    from nbdist.magics import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """End the notebook's cluster, if it has one, and show objects as before; ``%unload_ext nbdist`` calls this.

    The magics stay registered.
    """
    from nbdist.magics import unload

    unload(shell)
