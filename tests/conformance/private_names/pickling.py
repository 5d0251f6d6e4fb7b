"""The pickler of ``torch.distributed.rpc.internal``, which keeps tensors beside the bytes; and the names of profiles.

The suites pickle by it themselves. Calls do not use it: nbdist has a codec of its own.
"""

import contextlib
import io
import pickle
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc

from nbdist.rpc.references.rref import RRef


class RPCExecMode(Enum):
    """The kinds of calls, in the names of profiles."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and its arguments."""

    func: Any
    args: Any
    kwargs: Any


def _build_rpc_profiling_key(exec_type, func_name, current_worker_name, dst_worker_name):
    """Return the name under which a call appears in a profile: ``rpc_sync#function(worker0 -> worker1)``."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


class Pickler(pickle.Pickler):
    """Pickles a value, and keeps its tensors in a list."""

    def __init__(self, file):
        super().__init__(file)
        self.tensors = []

    def persistent_id(self, obj):
        if type(obj) is not torch.Tensor:
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1

    def reducer_override(self, obj):
        return (RRef._deserialize, (obj._serialize(),)) if isinstance(obj, RRef) else NotImplemented


class Unpickler(pickle.Unpickler):
    """Unpickles a value with its tensors."""

    def __init__(self, file, tensors):
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid):
        return self.tensors[pid]


def serialize(obj):
    """Return the bytes of ``obj``, without its tensors, and the list of the tensors.

    Raises torch's error if an RRef in it cannot be used any more.
    """
    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.dump(obj)
    return file.getvalue(), pickler.tensors


def deserialize(binary_data, tensor_table):
    """Return the value that was serialized."""
    return Unpickler(io.BytesIO(binary_data), tensor_table).load()


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler):
    """Name ``rpc_pickler`` as the default in the block. The suite looks only at the name."""
    api = torch.distributed.rpc.api
    before, api._default_pickler = api._default_pickler, rpc_pickler
    try:
        yield
    finally:
        api._default_pickler = before


def install():
    api, internal = torch.distributed.rpc.api, torch.distributed.rpc.internal
    for name in (RPCExecMode, PythonUDF, _build_rpc_profiling_key):
        setattr(internal, name.__name__, name)
    pickler = internal._internal_rpc_pickler
    pickler.serialize, pickler.deserialize = serialize, deserialize
    internal.serialize, internal.deserialize = serialize, deserialize
    api._default_pickler, api._use_rpc_pickler = pickler, _use_rpc_pickler
