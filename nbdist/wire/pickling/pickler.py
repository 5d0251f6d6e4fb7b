"""Pickles any value, with special treatment of the objects that pickle handles badly or wrongly.

These are: tensors, remote references, exceptions whose ``__init__`` does not take their ``args``, TorchScript, and the
functions and classes of ``__main__`` (see `nbdist.wire.pickling.definitions`; cloudpickle pickles them by value).
"""

from __future__ import annotations

import builtins
import functools
import io
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import cloudpickle.cloudpickle as cloudpickle
import torch

from nbdist.code_places import CELLS
from nbdist.errors import EncodeError
from nbdist.wire.messages import Fork
from nbdist.wire.pickling import classes, definitions, names, stand_ins
from nbdist.wire.pickling.large_values import warn_of_large_values
from nbdist.wire.pickling.registered import Forker, reducers, reference_types
from nbdist.wire.pickling.scripts import is_script_function, is_script_module
from nbdist.wire.tensors import OWN_FRAME_BYTES, Buffer, TensorPacker, is_packable, refuse_uncarried


class _ByValue:
    """Wraps a definition where a pickle must contain its value rather than its name."""

    def __init__(self, definition: Any) -> None:
        self.definition = definition


class ValueWanted(Exception):
    """Raised if the receiver is known to lack a definition: the message must be encoded again, by value."""


def _take_buffer(frames: list[Buffer], buffer: pickle.PickleBuffer) -> bool:
    """Copy a large buffer, such as numpy's, into a frame of its own; return True if it must go into the body."""
    try:
        raw = buffer.raw()
    except BufferError:  # the memory is not contiguous
        return True
    if raw.nbytes < OWN_FRAME_BYTES:
        return True
    frames.append(bytes(raw))
    return False


_NO_FILE = "<dynamic-code>"  # the text that cloudpickle 3.1.3 writes in place of the file name of a function's code


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
    """Pickles one value into a body, and collects what travels beside it: tensors, buffers, forks."""

    def __init__(
        self,
        file: io.BytesIO,
        buffers: list[Buffer],
        packer: TensorPacker,
        forker: Forker | None,
        by_value: bool,
        record: bool = False,
    ) -> None:
        """Pickle into ``file``. Large buffers are added to ``buffers``, and tensors to ``packer``.

        Without a ``forker``, references cannot be sent. ``by_value`` puts definitions of ``__main__`` into the body.
        ``record`` puts tensors that require grad into `recorded`, so that the receiver joins them to its graph.
        """
        # One dict: cloudpickle's own table is a chain of tables, in which a search without success is slow.
        self.dispatch_table = {}
        for table in reversed([reducers, *cloudpickle.Pickler.dispatch_table.maps]):
            self.dispatch_table.update(table)
        self.dispatch_table[types.CodeType] = _reduce_code
        self.dispatch_table[functools.cached_property] = _reduce_cached_property
        self.dispatch_table[functools.partialmethod] = _reduce_partialmethod
        # The callback is no method of this pickler: a reference cycle would keep the value until a garbage collection.
        super().__init__(file, protocol=5, buffer_callback=functools.partial(_take_buffer, buffers))
        self.packer = packer
        self.forks: list[Fork] = []
        self.references: dict[int, int] = {}  # the index in `forks` of each reference, by the object's id
        # The references met so far. They must stay alive, so that no other object gets one of their ids.
        self.kept: list[Any] = []
        # The definitions of ``__main__`` that the value refers to, by name and digest.
        self.definitions: list[tuple[str, str]] = []
        # The definitions of ``__main__`` that are in the body by name only, by name and digest.
        self.named: list[tuple[str, str]] = []
        self.lacking: Collection[str] = ()  # the digests of definitions that the receiver is known to lack
        self.known: Collection[str] = ()  # the digests of definitions that the receiver is known to have
        self.plain = True  # True while only tensors and pickle's own types were met: then decoding runs no user code
        self.recorded: list[torch.Tensor] = []
        self._recorded_at: dict[int, int] = {}
        self.requires_grad = False
        self._record = record
        self._modules: set[int] = set()  # the ids of modules that `_look_into` has handled
        self._of_modules: set[int] = set()  # the ids of the parameters of these modules, which are not recorded
        self._ordinary: set[type] = set()  # the types of the objects met so far that need no special treatment
        self._forker = forker
        self._by_value = by_value
        self._wrappers: dict[int, _ByValue] = {}
        self._inner: set[int] = set()  # the ids of functions inside classes that travel by value

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle ``obj``, as ``__reduce__`` does; NotImplemented to leave it to pickle's own rules.

        Pickle calls this for every object that is no atom and no built-in container, unless it has pickled the object
        before. Raises EncodeError for a tensor or reference that cannot be sent.
        """
        kind = type(obj)
        # Tensors first: they are the most frequent, and decode without user code.
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
        self.plain = False  # decoding anything but a tensor may run the user's code
        # An object of this type was met before, and needed no special treatment.
        if kind in self._ordinary:
            return NotImplemented
        if kind is OrderedDict and kind not in self.dispatch_table:
            # As pickle does it, but without a search for slots: each module has about ten of these dicts.
            return OrderedDict, (), vars(obj) or None, None, iter(obj.items())
        if kind in reference_types:
            return stand_ins.reference, (self._refer(obj),)
        if kind is types.FunctionType or issubclass(kind, type) or definitions.is_cached(obj):
            return self._definition(obj)
        if kind is _ByValue:
            return self._value(obj.definition)
        if kind is functools.partial:
            warn_of_large_values(obj)
        if isinstance(obj, BaseException):
            return _reduce_exception(obj)
        if isinstance(obj, torch.nn.Module):
            if id(obj) not in self._modules:
                self._look_into(obj)
            if is_script_module(obj):
                saved = io.BytesIO()
                torch.jit.save(obj, saved)
                return stand_ins.script, (saved.getvalue(),)
            return NotImplemented
        if is_script_function(obj):
            return self._script_function(obj)
        if obj.__class__ is kind:  # a proxy has another ``__class__``, and each proxy needs a check of its own
            self._ordinary.add(kind)
            return NotImplemented
        return super().reducer_override(obj)

    def _look_into(self, module: torch.nn.Module) -> None:
        """Remember the parameters of a module and of the modules in it, so that they do not go into `recorded`."""
        # The receiver gets parameters of its own, and gradients do not flow back to a copied module.
        stack: list[Any] = [module]
        # Without calling methods of the modules, since some modules refuse that.
        while stack:
            inner = stack.pop()
            if id(inner) not in self._modules:
                self._modules.add(id(inner))
                self._of_modules.update(map(id, inner.__dict__.get("_parameters", {}).values()))
                stack += [child for child in inner.__dict__.get("_modules", {}).values() if child is not None]

    def _add_recorded(self, tensor: torch.Tensor) -> int:
        """Return the index of a tensor in `recorded`; add it if it is new."""
        if (index := self._recorded_at.get(id(tensor))) is None:
            index = self._recorded_at[id(tensor)] = len(self.recorded)
            self.recorded.append(tensor)
        return index

    def _refer(self, reference: Any) -> int:
        """Return the index of a reference's fork in the message; make the fork if there is none."""
        # Only calls and results can carry references.
        if self._forker is None:
            raise EncodeError("cannot be sent: an RRef can only be sent in a call or its result")
        if (index := self.references.get(id(reference))) is None:
            self.kept.append(reference)
            index = self.references[id(reference)] = len(self.forks)
            self.forks.append(self._forker.fork(reference))
        return index

    def _definition(self, obj: Any) -> Any:
        """Return how to pickle a function or class: by its name, by its value, or as cloudpickle does.

        A definition that ``__main__`` has under its own name is sent as that name and the digest. With ``by_value``,
        its value is sent as well, unless the receiver is known to have it; the receiver then chooses its own definition
        if the digest is the same. Any other definition of ``__main__``, such as a lambda, always goes by value. Raises
        ValueWanted if a definition that the receiver is known to lack would go by name only.
        """
        if getattr(obj, "__module__", None) not in names.MAIN_NAMES:
            return super().reducer_override(obj)
        if id(obj) in self._inner:
            return self._value(obj) if definitions.is_cached(obj) else super().reducer_override(obj)
        if (qualname := definitions.own_name(obj)) is None:
            if (origin := definitions.origin(obj)) is None:
                return self._value(obj)
            # It came from another process: with its name and digest there, it is the original again where it came from.
            return definitions.choose, (*origin, self._wrappers.setdefault(id(obj), _ByValue(obj)))
        outer, _, attribute = qualname.rpartition(".")
        # A method: an attribute of its class.
        if outer and not isinstance(obj, type):
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
        """Return how to pickle a function or class of ``__main__`` by value."""
        if isinstance(definition, types.FunctionType):
            warn_of_large_values(definition)
            return self._dynamic_function_reduce(definition)
        if definitions.is_cached(definition):
            return stand_ins.cached, (definition.cache_parameters(), definition.__wrapped__)
        # The functions in a class travel inside of it, and not by names of their own.
        for member in vars(definition).values():
            inner = getattr(member, "__func__", member)
            parts = (inner.fget, inner.fset, inner.fdel) if isinstance(inner, property) else (inner,)
            self._inner.update(
                id(part) for part in parts if isinstance(part, types.FunctionType) or definitions.is_cached(part)
            )
        return classes.reduced(definition)

    @staticmethod
    def _script_function(function: Any) -> Any:
        """Return how to pickle a function of TorchScript: by its name if a module has it, else as torch saves it."""
        module, _, name = function.qualified_name.removeprefix("__torch__.").rpartition(".")
        if module not in names.MAIN_NAMES and getattr(sys.modules.get(module), name, None) is function:
            return getattr, (sys.modules[module], name)
        saved = io.BytesIO()
        torch.jit.save(function, saved)
        return stand_ins.script_function, (saved.getvalue(),)


def _reduce_exception(error: BaseException) -> Any:
    """Return how to pickle an error without calling its ``__init__``; NotImplemented if pickle can do it."""
    cls = type(error)
    # A built-in error, or one with a ``__reduce__`` of its own.
    if cls.__module__ == builtins.__name__ or cls.__reduce__ is not BaseException.__reduce__:
        return NotImplemented
    # nbdist's own attributes on the error stay here.
    state = {key: value for key, value in error.__dict__.items() if not key.startswith("__nbdist")}
    return stand_ins.exception, (cls, error.args, state)


def _reduce_cached_property(found: functools.cached_property[Any]) -> Any:
    """Return how to pickle a cached property without the lock that Python 3.11 puts into it."""
    return stand_ins.cached_property, (found.func, found.attrname)


def _reduce_partialmethod(found: functools.partialmethod[Any]) -> Any:
    """Return how to pickle a `functools.partialmethod`, which Python 3.14 itself cannot rebuild."""
    return stand_ins.partialmethod, (found.func, found.args, found.keywords)


def _reduce_code(code: types.CodeType) -> Any:
    """Return how to pickle a function's code with its file name, with which errors and `inspect` find its lines."""
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    arguments = tuple(code.co_filename if argument == _NO_FILE else argument for argument in arguments)
    number = CELLS.get(code.co_filename)
    return (stand_ins.cell_code, (number, code.co_filename, make, arguments)) if number else (make, arguments)
