"""Replaces torch.distributed.rpc: its public names, and the private ones that programs use.

===================  ============================================================
`constants`          torch's constants
`backend_registry`   the names of backends
`functions`          torch's decorators
`internal`           torch's pickler, with which classes register their reducers
`api`                the calls
`options`            the options of the backend
`rref_proxy`         the proxies of references
===================  ============================================================
"""
# ruff: noqa: F401 - torch's package has many names that its __all__ does not list

from __future__ import annotations

from typing import Any

from nbdist.compat.agents import RpcAgent, TensorPipeAgent
from nbdist.compat.rpc import api, backend_registry, constants, functions, internal, options, rref_proxy
from nbdist.compat.rpc.api import (
    RRef,
    _delete_all_user_and_unforked_owner_rrefs,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _wait_all,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from nbdist.compat.rpc.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from nbdist.compat.rpc.options import TensorPipeRpcBackendOptions
from nbdist.errors import UsageError
from nbdist.rpc.api import current_agent
from nbdist.rpc.core.members import WorkerInfo
from nbdist.rpc.hosted import take_on
from nbdist.rpc.options import RpcBackendOptions, time_limit

__all__ = ["TensorPipeRpcBackendOptions", "init_rpc", "is_available"]
__all__ += api.__all__
__all__ += backend_registry.__all__

PyRRef = RRef
_DEFAULT_INIT_METHOD = constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = constants.DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = constants.DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT
_is_tensorpipe_available = True


def is_available() -> bool:
    """Return True, because nbdist has RPC."""
    return True


# -- life ---------------------------------------------------------------------------------------


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Make this process a worker of an RPC world, as `nbdist.rpc.init_rpc`; return when the world has formed.

    With ``world_size``, all workers have met when this returns. Without it, workers may join and leave at any time. For
    a backend that the program has registered itself, this opens a store by torch's rendezvous. Raises TypeError for a
    backend or options of a wrong class, UsageError if RPC runs already, RendezvousError if some workers do not arrive
    in time.
    """
    if backend is not None and not backend_registry.is_backend(backend):
        raise TypeError("Argument backend must be a member of BackendType")
    is_ours = backend is None or backend_registry.is_ours(backend)
    if is_ours and rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    chosen = backend or backend_registry.backend_of(rpc_backend_options)
    settings = rpc_backend_options or construct_rpc_backend_options(chosen)
    # An agent of nbdist opens its own store if it gets none.
    store = None if is_ours else backend_registry.open_store(settings, rank, world_size)
    _init_rpc_backend(chosen, store, name, rank, world_size, settings)


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Start an agent of a backend, and make it the current one. On a worker of a cluster, use the running agent.

    Raises UsageError if the program's own agent runs in this process already, if a cluster's agent cannot do what the
    arguments ask, such as take another name, or if ``name`` is no str.
    """
    if not isinstance(name, str):
        raise UsageError(f"Argument name must be a str, not {name!r}")
    if _is_current_rpc_agent_set():
        if current_agent().hosted:
            take_on(current_agent(), name, rank, world_size, rpc_backend_options)
            return
        raise UsageError("RPC is already initialized: call shutdown() first")
    chosen = backend or backend_registry.backend_of(rpc_backend_options)
    agent = init_backend(
        chosen,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options or construct_rpc_backend_options(chosen),
    )
    if not _is_current_rpc_agent_set():  # a registered backend's function has made an agent of another kind
        api._set_and_start_rpc_agent(agent)


# -- the current agent --------------------------------------------------------------------------


def get_rpc_timeout() -> float:
    """Return the default time limit of this worker's calls, in seconds."""
    return current_agent().rpc_timeout


def _set_rpc_timeout(seconds: float) -> None:
    """Set the default time limit of this worker's calls, in seconds; 0 for no limit. Earlier calls keep theirs."""
    current_agent().rpc_timeout = time_limit(seconds)


def enable_gil_profiling(enabled: bool) -> None:
    """Raise UsageError if ``enabled``: Python code cannot measure how long calls wait for the GIL.

    With False, do nothing.
    """
    if enabled:
        raise UsageError(
            "nbdist does not measure how long calls wait for the interpreter's lock: leave out "
            "enable_gil_profiling(True)"
        )
