"""Replaces torch.distributed.rpc.internal: a pickler that keeps tensors out of the bytes, and names for profiles."""

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
from nbdist.rpc.references.rref import RRef
from nbdist.wire.pickling.registered import register_reducer
from nbdist.wire.pickling.scripts import is_script_module

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


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


class RemoteException(NamedTuple):
    """An error in the form in which torch sends it. nbdist never makes one, because it sends the error itself."""

    msg: str
    exception_type: type[BaseException]


Reducer = Callable[[Any], Any]
_TENSOR, _RREF, _SCRIPT, _BESIDE = "tensor", "rref", "script", "beside"


class _PerThread(threading.local):
    """The state of a thread inside of a `beside` block."""

    beside: list[RRef[Any]] | None = None
    """The list of the block; None outside of a block."""


_thread = _PerThread()


@contextlib.contextmanager
def beside(rrefs: list[RRef[Any]]) -> Iterator[None]:
    """Keep references out of the bytes that this thread serializes in the block: append them to ``rrefs`` instead.

    A call carries ``rrefs`` next to the bytes, so that the codec forks them for the callee. The callee deserializes the
    bytes in a block with the list that it has received.
    """
    before, _thread.beside = _thread.beside, rrefs
    try:
        yield
    finally:
        _thread.beside = before


class _InternalRPCPickler:
    """Serializes a value to bytes and a list of its tensors, and back."""

    def __init__(self) -> None:
        self._reducers: dict[type, Reducer] = {}

    def _register_reducer(self, obj_class: type, reducer: Reducer) -> None:
        """Serialize instances of a class with ``reducer``, also in calls. If the class has a reducer, do nothing."""
        self._reducers.setdefault(obj_class, reducer)
        register_reducer(obj_class, self._reducers[obj_class])  # torch sends its RemoteModule in this way

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Return the bytes of ``obj``, without its tensors, and the list of the tensors."""
        file, tensors = io.BytesIO(), list[torch.Tensor]()
        _Pickler(file, tensors, self._reducers).dump(obj)
        return file.getvalue(), tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
        """Return the value that was serialized; if a function or class is missing here, return an AttributeError.

        As in torch, the error is returned, not raised.
        """
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
    """Pickles a value, and appends its tensors to a list."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor], reducers: dict[type, Reducer]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._reducers = reducers

    def persistent_id(self, obj: Any) -> Any:
        """Return the id of a tensor, a reference or a script module, for `_Unpickler.persistent_load`; else None."""
        if type(obj) is torch.Tensor:
            self._tensors.append(obj)
            return _TENSOR, len(self._tensors) - 1
        if isinstance(obj, RRef):
            if _thread.beside is not None:
                _thread.beside.append(obj)
                return _BESIDE, len(_thread.beside) - 1
            return _RREF, obj._serialize()  # type: ignore[attr-defined]  # see nbdist.compat.references
        if is_script_module(obj) and type(obj) not in self._reducers:
            saved = io.BytesIO()
            torch.jit.save(obj, saved)
            return _SCRIPT, saved.getvalue()
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object with the reducer of its class; return NotImplemented, as pickle expects, without one."""
        reducer = self._reducers.get(type(obj))
        if reducer is None and type(obj) is Serialized and _thread.beside is not None:
            reducer = in_a_message
        return NotImplemented if reducer is None else reducer(obj)


class _Unpickler(pickle.Unpickler):
    """Unpickles a value with its tensors."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        """Return the tensor, reference or script module with an id of `_Pickler.persistent_id`.

        Raises UnpicklingError for references outside of the call that sent them.
        """
        kind, what = pid
        if kind == _TENSOR:
            return self._tensors[what]
        if kind == _RREF:
            return RRef._deserialize(what)  # type: ignore[attr-defined]  # see nbdist.compat.references
        if kind == _BESIDE:
            if _thread.beside is None:
                raise pickle.UnpicklingError(
                    "these bytes lack the RRefs in them, which travel beside them in the call that sends them: "
                    "only that call can read them. Pass the object to a call instead of its bytes"
                )
            return _thread.beside[what]
        return torch.jit.load(io.BytesIO(what))


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return the bytes of a value, without its tensors, and the list of the tensors.

    Raises pickle's error for a value that cannot be pickled.
    """
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """Return the value that was serialized; an AttributeError if a function or class is missing here."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Return the name under which a call appears in a profile: ``rpc_sync#function(worker0 -> worker1)``."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
