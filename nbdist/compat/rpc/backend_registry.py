"""Stands for torch.distributed.rpc.backend_registry: names of backends, all of which are nbdist.

A backend is a pair of functions: one makes its options, one starts an agent. ``TENSORPIPE`` is nbdist's
agent, ``FAULTY_TENSORPIPE`` the same with faults injected. Others may be registered, but nbdist makes calls
through its own agents only.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from torch.distributed.rendezvous import rendezvous

from nbdist.compat.agents import FaultyTensorPipeAgent, RpcAgent, TensorPipeAgent
from nbdist.compat.options import FaultyTensorPipeRpcBackendOptions, TensorPipeRpcBackendOptions
from nbdist.compat.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC
from nbdist.errors import UsageError
from nbdist.rpc.options import RpcBackendOptions

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """What a backend is."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


class _Backend:
    name: str

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


def _options(rpc_timeout: float, init_method: str, **kwargs: Any) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _faulty_options(rpc_timeout: float, init_method: str, **kwargs: Any) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _start(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> RpcAgent:
    if not _suits_tensorpipe(rpc_backend_options):
        wanted = TensorPipeRpcBackendOptions.__name__
        raise TypeError(f"`rpc_backend_options` must be a `{wanted}`, not {rpc_backend_options!r}")
    return TensorPipeAgent(store, name, rank, world_size, rpc_backend_options)


def _start_faulty(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> RpcAgent:
    return FaultyTensorPipeAgent(store, name, rank, world_size, rpc_backend_options)


BackendType: Any = Enum(
    "BackendType",
    {
        "TENSORPIPE": BackendValue(_options, _start),
        "FAULTY_TENSORPIPE": BackendValue(_faulty_options, _start_faulty),
    },
    type=_Backend,
)
"""The backends that are registered, by name; a new class with every registration, as in torch."""


def backend_registered(backend_name: str) -> bool:
    """Whether there is a backend of that name."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend, and return its member of the new `BackendType`."""
    global BackendType
    if backend_registered(backend_name):
        raise UsageError(f"RPC backend {backend_name}: already registered")
    members = {member.name: member.value for member in BackendType}
    members[backend_name] = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = Enum("BackendType", members, type=_Backend)  # type: ignore[misc]  # made while running
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Options for a backend."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Start an agent of a backend."""
    return backend.value.init_backend_handler(*args, **kwargs)


# -- nbdist's own -------------------------------------------------------------------------------


def is_backend(backend: object) -> bool:
    """Whether this is a member of `BackendType`, of today's or of one before a registration."""
    return isinstance(backend, Enum) and isinstance(backend.value, BackendValue)


def is_ours(backend: Any) -> bool:
    """Whether a backend's agents are nbdist's, which meet at a store of their own choice."""
    return backend.value.init_backend_handler in (_start, _start_faulty)


def backend_of(options: RpcBackendOptions | None) -> Any:
    """The backend that options are meant for; without options, the default."""
    if isinstance(options, FaultyTensorPipeRpcBackendOptions):
        return BackendType["FAULTY_TENSORPIPE"]
    if options is None or _suits_tensorpipe(options):
        return BackendType["TENSORPIPE"]
    raise TypeError(f"Could not infer backend for options {options!r}")


def _suits_tensorpipe(options: object) -> bool:
    return isinstance(options, TensorPipeRpcBackendOptions) or type(options) is RpcBackendOptions


def open_store(options: Any, rank: int, world_size: int | None) -> Any:
    """The store that a backend of somebody else's is started with."""
    store, _, _ = next(rendezvous(options.init_method, rank=rank, world_size=world_size or -1))
    store.set_timeout(datetime.timedelta(seconds=options.rpc_timeout))
    return store
