"""Replaces torch.distributed.rpc.backend_registry: the names of backends.

A backend is a pair of functions: one makes options, one starts an agent. ``TENSORPIPE`` starts nbdist's agent. A
program may register other backends, but nbdist makes calls only through its own agents.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from torch.distributed.rendezvous import rendezvous

from nbdist.compat.agents import RpcAgent, TensorPipeAgent
from nbdist.compat.options import TensorPipeRpcBackendOptions
from nbdist.compat.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC
from nbdist.errors import UsageError
from nbdist.rpc.options import RpcBackendOptions

__all__ = ["BackendType", "BackendValue"]
__all__ += ["backend_registered", "construct_rpc_backend_options", "init_backend", "register_backend"]


class BackendValue(NamedTuple):
    """The two functions of a backend: one makes its options, one starts an agent."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


class _Backend:
    """Gives the members of `BackendType` torch's representation."""

    name: str

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


def _options(rpc_timeout: float, init_method: str, **kwargs: Any) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _start(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> RpcAgent:
    if not _suits_tensorpipe(rpc_backend_options):
        wanted = TensorPipeRpcBackendOptions.__name__
        raise TypeError(f"`rpc_backend_options` must be a `{wanted}`, not {rpc_backend_options!r}")
    return TensorPipeAgent(store, name, rank, world_size, rpc_backend_options)


BackendType: Any = Enum("BackendType", {"TENSORPIPE": BackendValue(_options, _start)}, type=_Backend)
"""The registered backends, by name. As in torch, every registration makes a new class, since enums are closed."""


def backend_registered(backend_name: str) -> bool:
    """Return whether a backend of this name is registered."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Register a backend; return its member of the new `BackendType`. Raises UsageError if the name is taken.

    ``construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)`` returns options.
    ``init_backend_handler(store=, name=, rank=, world_size=, rpc_backend_options=)`` starts and returns an agent, which
    must be one of nbdist's. Each registration makes a new enum, but members of earlier ones stay valid (`is_backend`).
    """
    global BackendType
    if backend_registered(backend_name):
        raise UsageError(f"RPC backend {backend_name}: already registered")
    members = {member.name: member.value for member in BackendType}
    members[backend_name] = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = Enum("BackendType", members, type=_Backend)  # type: ignore[misc]  # made while running
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD, **kwargs: Any
) -> Any:
    """Return options for a backend."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Start an agent of a backend with the backend's own function, whose errors are raised; return the agent."""
    return backend.value.init_backend_handler(*args, **kwargs)


# -- nbdist's own -------------------------------------------------------------------------------


def is_backend(backend: object) -> bool:
    """Return whether an object is a member of `BackendType`, or of the class that it was before a registration."""
    return isinstance(backend, Enum) and isinstance(backend.value, BackendValue)


def is_ours(backend: Any) -> bool:
    """Return whether a backend starts agents of nbdist, which open their own store."""
    return backend.value.init_backend_handler is _start


def backend_of(options: RpcBackendOptions | None) -> Any:
    """Return the backend to which options belong; TENSORPIPE for None. Raises TypeError for any other options."""
    if options is None or _suits_tensorpipe(options):
        return BackendType["TENSORPIPE"]
    raise TypeError(f"Could not infer backend for options {options!r}")


def _suits_tensorpipe(options: object) -> bool:
    # A program's own subclass of nbdist's options belongs to the backend that it has registered.
    return isinstance(options, TensorPipeRpcBackendOptions) or type(options) is RpcBackendOptions


def open_store(options: Any, rank: int, world_size: int | None) -> Any:
    """Open a store by torch's rendezvous, for a backend that the program has registered.

    The store waits ``options.rpc_timeout`` seconds for a key. If ``rank`` is -1 and ``world_size`` None, both come from
    the URL ``options.init_method``, or from the environment for ``env://``. Raises torch's errors.
    """
    store, _, _ = next(rendezvous(options.init_method, rank=rank, world_size=world_size or -1))
    store.set_timeout(datetime.timedelta(seconds=options.rpc_timeout))
    return store
