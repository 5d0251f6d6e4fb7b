"""Calls, futures and remote references between workers, with the names and the semantics of torch.distributed.rpc.

>>> rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
tensor([4., 4.])
>>> rref = rpc.remote("worker1", torch.zeros, args=(3,))
>>> rref.to_here()
tensor([0., 0., 0.])
"""

# Inside: `core` decides, and knows no socket, thread or clock; `calls`, `references` and `world` encode, run and settle
# what it has decided; `links` and `pool` move messages and run them; `agent` makes and joins the parts; `start` brings
# it into a world; `api` is torch's face. `docs/a_call.md` goes through them.

from nbdist.rpc import functions
from nbdist.rpc.api import get_worker_info, init_rpc, is_available, remote, rpc_async, rpc_sync, shutdown
from nbdist.rpc.calls.collecting import wait_all
from nbdist.rpc.core.members import WorkerInfo
from nbdist.rpc.futures import Future
from nbdist.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from nbdist.rpc.references.rref import RRef

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
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_all",
]
