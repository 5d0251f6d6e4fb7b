"""Pickles any value; takes out of pickle's hands what it does badly or wrongly.

That is: tensors, remote references, exceptions whose ``__init__`` does not take their ``args``, TorchScript, and the
functions and classes of ``__main__`` (see `nbdist.wire.definitions`; cloudpickle pickles them by value).
"""

from __future__ import annotations

import builtins
import io
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import cloudpickle.cloudpickle as cloudpickle
import torch

from nbdist.errors import EncodeError
from nbdist.wire import definitions, names, stand_ins
from nbdist.wire.large_globals import warn_of_large_globals
from nbdist.wire.messages import Fork
from nbdist.wire.registered import Forker, reducers, reference_types
from nbdist.wire.tensors import LARGE, Buffer, TensorPacker, is_packable, refuse_uncarried

__all__ = ["Pickler", "ValueWanted"]


class _ByValue:
    """Stands for a definition in the place where its value is wanted rather than its name."""

    def __init__(self, definition: Any) -> None:
        self.definition = definition


class ValueWanted(Exception):
    """The receiver is known to lack a definition: start again, by value."""


class _TakeBuffers:
    """Puts large buffers, such as numpy's, in frames of their own."""

    def __init__(self, frames: list[Buffer]) -> None:
        self._frames = frames

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous
            return True
        if raw.nbytes < LARGE:
            return True
        self._frames.append(bytes(raw))
        return False


_NO_FILE = "<dynamic-code>"
"""What cloudpickle 3.1.3 writes in place of the name of a function's file."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
    def __init__(
        self,
        file: io.BytesIO,
        buffers: list[Buffer],
        packer: TensorPacker,
        forker: Forker | None,
        by_value: bool,
        record: bool = False,
    ) -> None:
        # cloudpickle's own is a chain of tables, which takes long to find that there is nothing for an object.
        self.dispatch_table = {}
        for table in reversed([reducers, *cloudpickle.Pickler.dispatch_table.maps]):
            self.dispatch_table.update(table)
        self.dispatch_table[types.CodeType] = _reduce_code
        # A method of this pickler as its callback would be a circle, and keep what was pickled until a collection.
        super().__init__(file, protocol=5, buffer_callback=_TakeBuffers(buffers))
        self.packer = packer
        self.forks: list[Fork] = []
        self.references: dict[int, int] = {}
        self.kept: list[Any] = []
        self.definitions: list[tuple[str, str]] = []
        self.named: list[tuple[str, str]] = []
        self.lacking: Collection[str] = ()
        self.known: Collection[str] = ()
        self.plain = True
        self.recorded: list[torch.Tensor] = []
        self._recorded_at: dict[int, int] = {}
        self.requires_grad = False
        self._record = record
        self._modules: set[int] = set()
        self._of_modules: set[int] = set()
        self._ordinary: set[type] = set()
        self._forker = forker
        self._by_value = by_value
        self._wrappers: dict[int, _ByValue] = {}
        self._inner: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if obj.requires_grad and id(obj) not in self._of_modules:
                self.requires_grad = True
                if self._record:
                    return stand_ins.recorded, (self._add_recorded(obj),)
            if is_packable(obj):
                return stand_ins.tensor, (self.packer.add(obj),)
            refuse_uncarried(obj)
            return NotImplemented
        if obj is stand_ins.tensor or obj is stand_ins.recorded:
            return NotImplemented
        self.plain = False
        if kind in self._ordinary:
            return NotImplemented
        if kind is OrderedDict and kind not in self.dispatch_table:
            # As it would be, but for a search for slots: modules have nine of them each.
            return OrderedDict, (), vars(obj) or None, None, iter(obj.items())
        if kind in reference_types:
            return stand_ins.reference, (self._refer(obj),)
        if kind is types.FunctionType or issubclass(kind, type):
            return self._definition(obj)
        if kind is _ByValue:
            return self._value(obj.definition)
        if isinstance(obj, BaseException):
            return _reduce_exception(obj)
        if isinstance(obj, torch.nn.Module):
            if id(obj) not in self._modules:
                self._look_into(obj)
            if isinstance(obj, torch.jit.ScriptModule):
                saved = io.BytesIO()
                torch.jit.save(obj, saved)
                return stand_ins.script, (saved.getvalue(),)
            return NotImplemented
        if isinstance(obj, torch.jit.ScriptFunction):
            return self._script_function(obj)
        if obj.__class__ is kind:  # a proxy is what it says it is, each of them
            self._ordinary.add(kind)
            return NotImplemented
        return super().reducer_override(obj)

    def _look_into(self, module: torch.nn.Module) -> None:
        """Note what is in it: a module travels as a copy, with parameters of its own."""
        stack: list[Any] = [module]
        # Not by the methods of modules, which some of them have to refuse.
        while stack:
            inner = stack.pop()
            if id(inner) not in self._modules:
                self._modules.add(id(inner))
                self._of_modules.update(map(id, inner.__dict__.get("_parameters", {}).values()))
                stack += [child for child in inner.__dict__.get("_modules", {}).values() if child is not None]

    def _add_recorded(self, tensor: torch.Tensor) -> int:
        index = self._recorded_at.get(id(tensor))
        if index is None:
            index = self._recorded_at[id(tensor)] = len(self.recorded)
            self.recorded.append(tensor)
        return index

    def _refer(self, reference: Any) -> int:
        if self._forker is None:
            raise EncodeError("cannot be sent: a remote reference can only travel in a call")
        index = self.references.get(id(reference))
        if index is None:
            self.kept.append(reference)
            index = self.references[id(reference)] = len(self.forks)
            self.forks.append(self._forker.fork(reference))
        return index

    def _definition(self, obj: Any) -> Any:
        if getattr(obj, "__module__", None) not in names.MAIN_NAMES or id(obj) in self._inner:
            return super().reducer_override(obj)
        qualname = definitions.own_name(obj)
        if qualname is None:
            return self._value(obj)
        outer, _, attribute = qualname.rpartition(".")
        if outer and isinstance(obj, types.FunctionType):
            return getattr, (definitions.find_named(outer), attribute)
        digest = definitions.digest(obj)
        self.definitions.append((qualname, digest))
        if not self._by_value or digest in self.known:
            if digest in self.lacking:
                raise ValueWanted
            self.named.append((qualname, digest))
            return definitions.get_own, (qualname, digest)
        wrapper = self._wrappers.setdefault(id(obj), _ByValue(obj))
        return definitions.choose, (qualname, digest, wrapper)

    def _value(self, definition: Any) -> Any:
        if isinstance(definition, types.FunctionType):
            warn_of_large_globals(definition)
            return self._dynamic_function_reduce(definition)
        for member in vars(definition).values():
            inner = getattr(member, "__func__", member)
            parts = (inner.fget, inner.fset, inner.fdel) if isinstance(inner, property) else (inner,)
            self._inner.update(id(part) for part in parts if isinstance(part, types.FunctionType))
        return cloudpickle._class_reduce(definition)

    @staticmethod
    def _script_function(function: Any) -> Any:
        module, _, name = function.qualified_name.removeprefix("__torch__.").rpartition(".")
        if module not in names.MAIN_NAMES and getattr(sys.modules.get(module), name, None) is function:
            return getattr, (sys.modules[module], name)
        saved = io.BytesIO()
        torch.jit.save(function, saved)
        return stand_ins.script_function, (saved.getvalue(),)


def _reduce_exception(error: BaseException) -> Any:
    cls = type(error)
    if cls.__module__ == builtins.__name__ or cls.__reduce__ is not BaseException.__reduce__:
        return NotImplemented
    state = {key: value for key, value in error.__dict__.items() if not key.startswith("__nbdist")}
    return stand_ins.exception, (cls, error.args, state)


def _reduce_code(code: types.CodeType) -> Any:
    """Reduce a function's code with the name of its file, by which errors and `inspect` find its lines."""
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if argument == _NO_FILE else argument for argument in arguments)
