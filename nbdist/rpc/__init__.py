"""Calls, futures and remote references between workers: torch.distributed.rpc's names and semantics.

>>> from nbdist import rpc
>>> rpc.init_rpc("worker0", rank=0, world_size=2)            # doctest: +SKIP
>>> rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))  # doctest: +SKIP
"""

from __future__ import annotations

from nbdist.rpc import functions
from nbdist.rpc.api import (
    BackendType,
    get_worker_info,
    init_rpc,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from nbdist.rpc.collecting import wait_all
from nbdist.rpc.futures import Future
from nbdist.rpc.membership import WorkerInfo
from nbdist.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from nbdist.rpc.rref import RRef

__all__ = [
    "BackendType",
    "Future",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "functions",
    "get_worker_info",
    "init_rpc",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_all",
]
