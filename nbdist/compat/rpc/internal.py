"""Stands for torch.distributed.rpc.internal: a pickler that sets tensors aside, and names for profiles."""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from nbdist.compat.references import Serialized, in_a_message
from nbdist.rpc.rref import RRef
from nbdist.wire.registered import register_reducer

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


class RPCExecMode(Enum):
    """The ways to call."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and what to call it with."""

    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """An error as torch sends it; nbdist sends the error itself."""

    msg: str
    exception_type: type[BaseException]


Reducer = Callable[[Any], Any]
_TENSOR, _RREF, _SCRIPT, _BESIDE = "tensor", "rref", "script", "beside"


class _PerThread(threading.local):
    beside: list[RRef[Any]] | None = None


_thread = _PerThread()


@contextlib.contextmanager
def beside(rrefs: list[RRef[Any]]) -> Iterator[None]:
    """Keep references out of the bytes that this thread serializes in the block: they are appended to ``rrefs``.

    A call carries ``rrefs`` beside the bytes, so that the codec forks them for the callee. Deserializing such bytes
    takes a block with the same references.
    """
    before, _thread.beside = _thread.beside, rrefs
    try:
        yield
    finally:
        _thread.beside = before


class _InternalRPCPickler:
    """Serializes a value to bytes and a list of tensors, and back."""

    def __init__(self) -> None:
        self._reducers: dict[type, Reducer] = {}

    def _register_reducer(self, obj_class: type, reducer: Reducer) -> None:
        """Have instances of a class serialized by ``reducer``, in calls too; the first one registered stays."""
        self._reducers.setdefault(obj_class, reducer)
        register_reducer(obj_class, self._reducers[obj_class])  # torch's RemoteModule travels in this way

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """``obj`` without its tensors, and they."""
        file, tensors = io.BytesIO(), list[torch.Tensor]()
        _Pickler(file, tensors, self._reducers).dump(obj)
        return file.getvalue(), tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
        """What was serialized; an AttributeError is returned where a function or class is missing here."""
        try:
            return _Unpickler(io.BytesIO(binary_data), tensor_table).load()
        except AttributeError as error:
            missing = AttributeError(
                f"{error}. The RPC pickler does not serialize the code of functions and classes: they must "
                "be defined on both sides"
            )
            missing.__cause__ = error
            return missing


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor], reducers: dict[type, Reducer]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._reducers = reducers

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            self._tensors.append(obj)
            return _TENSOR, len(self._tensors) - 1
        if isinstance(obj, RRef):
            if _thread.beside is not None:
                _thread.beside.append(obj)
                return _BESIDE, len(_thread.beside) - 1
            return _RREF, obj._serialize()  # type: ignore[attr-defined]  # see nbdist.compat.references
        if isinstance(obj, torch.jit.ScriptModule) and type(obj) not in self._reducers:
            saved = io.BytesIO()
            torch.jit.save(obj, saved)
            return _SCRIPT, saved.getvalue()
        return None

    def reducer_override(self, obj: Any) -> Any:
        reducer = self._reducers.get(type(obj))
        if reducer is None and type(obj) is Serialized and _thread.beside is not None:
            reducer = in_a_message
        return NotImplemented if reducer is None else reducer(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        kind, what = pid
        if kind == _TENSOR:
            return self._tensors[what]
        if kind == _RREF:
            return RRef._deserialize(what)  # type: ignore[attr-defined]  # see nbdist.compat.references
        if kind == _BESIDE:
            if _thread.beside is None:
                raise pickle.UnpicklingError("these bytes belong to a call, which carried their references beside them")
            return _thread.beside[what]
        return torch.jit.load(io.BytesIO(what))


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """A value without its tensors, and they."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """What `serialize` was given."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name under which a call appears in a profile."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
