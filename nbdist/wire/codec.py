"""Values to frames and back.

The body is pickle 5. What plain pickle does badly or wrongly is taken out of its hands: tensors
(`nbdist.wire.tensors`), remote references (registered from above), exceptions whose ``__init__``
does not take their ``args``, TorchScript, and the functions and classes of ``__main__`` and of
notebook cells, which go by name where the receiver has the same and else by value
(`nbdist.wire.definitions`; cloudpickle does the by-value part).

Decoding runs code, as unpickling does; callers authenticate the sender first (G6).
"""

from __future__ import annotations

import builtins
import io
import pickle
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import cloudpickle.cloudpickle as cloudpickle
import torch

from nbdist import torch_private
from nbdist.errors import DecodeError, EncodeError, MissingDefinition, NbdistError
from nbdist.wire import definitions, names, quick
from nbdist.wire.messages import Fork, Hole, Payload, Place
from nbdist.wire.quick import ATOMS
from nbdist.wire.tensors import (
    LARGE,
    Buffer,
    Slot,
    Space,
    TensorPacker,
    is_packable,
    pack_alone,
    refuse_uncarried,
    unpack_alone,
    unpack_tensors,
)

__all__ = [
    "ATOMS",
    "NOT_DECODED",
    "Encoded",
    "Forker",
    "decode",
    "decode_early",
    "decodes_quickly",
    "encode",
    "encode_usual_call",
    "encode_usual_result",
    "register_reducer",
    "register_reference",
]


torch_private.load_layouts()

_BIG_GLOBAL = 1 << 20
_QUICK = 1 << 16


Attach = Callable[[list[torch.Tensor]], list[torch.Tensor]] | None
"""Gives tensors that were recorded their history; without one they begin one of their own."""


class Forker(Protocol):
    """Hands a reference over: what the layer above does when one is met inside a message."""

    def fork(self, reference: Any) -> Fork:
        """Describe a new fork of ``reference`` for the receiver."""
        ...

    def take_back(self) -> None:
        """Forget the forks described so far: the receiver will not see them."""
        ...


class Encoded(NamedTuple):
    """A value as it travels: the header's part, and the frames behind it."""

    payload: Payload
    frames: list[Buffer]
    recorded: Sequence[torch.Tensor] = ()
    """The tensors, in order, whose gradients are to come back."""
    requires_grad: bool = False
    """Whether there are tensors that require grad, and are not recorded."""
    slots: Sequence[Slot] = ()
    """What lies in shared memory: to be kept until it is sent."""
    named: Sequence[tuple[str, str]] = ()
    """The definitions of ``__main__`` that the receiver has to have; others have been put in."""


_reference_types: set[type] = set()


def register_reference(cls: type) -> None:
    """Make instances of ``cls`` travel as forks; they are handed to the encoder's `Forker`."""
    _reference_types.add(cls)


_reducers: dict[type, Callable[[Any], Any]] = {}


def register_reducer(cls: type, reducer: Callable[[Any], Any]) -> None:
    """Have instances of ``cls`` pickled as ``reducer`` says; the first one registered stays."""
    _reducers.setdefault(cls, reducer)


class _ByValue:
    """Stands for a definition in the place where its value is wanted rather than its name."""

    def __init__(self, definition: Any) -> None:
        self.definition = definition


class _ValueWanted(Exception):
    """The receiver is known to lack a definition: start again, by value."""


# Names that the pickled body refers to; the decoder binds them to methods of its own.
def _tensor(index: int) -> Any:
    raise DecodeError("only nbdist.wire.codec.decode can read this")


def _recorded(index: int) -> Any:
    return _tensor(index)


def _reference(index: int) -> Any:
    return _tensor(index)


def _own(qualname: str, digest: str) -> Any:
    return _tensor(0)


def _choose(qualname: str, digest: str, value: Any) -> Any:
    return _tensor(0)


def _exception(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _script(data: bytes) -> Any:
    return torch.jit.load(io.BytesIO(data))


def _script_function(data: bytes) -> Any:
    return torch.jit.load(io.BytesIO(data)).forward


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


_FEW = 64
_COMPLEX, _TENSORS, _PLAIN = range(3)


def _simplicity(value: Any, record: bool, depth: int = 4) -> int:
    """What must be done to pickle ``value``: nothing special, only its tensors, or all that `_Pickler` does."""
    kind = type(value)
    if kind in ATOMS:
        return _PLAIN
    if kind is torch.Tensor:
        return _TENSORS if is_packable(value) and (record or not value.requires_grad) else _COMPLEX
    if kind is dict:
        value = [*value, *value.values()]
    elif kind is not tuple and kind is not list:
        return _COMPLEX
    if not depth or len(value) > _FEW:
        return _COMPLEX
    simplest = _PLAIN
    for item in value:
        if type(item) not in ATOMS:
            simplest = min(simplest, _simplicity(item, record, depth - 1))
    return simplest


class _TensorPickler(pickle.Pickler):
    """For the usual arguments and results: a few tensors, and atoms."""

    def __init__(self, file: io.BytesIO, packer: TensorPacker, record: bool) -> None:
        super().__init__(file, protocol=5)
        self.recorded: list[torch.Tensor] = []
        self.places: list[int] = []
        self._recorded_at: dict[int, int] = {}
        self._packer = packer
        self._record = record

    def persistent_id(self, obj: Any) -> int | None:
        """Where a tensor is in the message: among its tensors, or, counted downwards from -1, the recorded ones."""
        if type(obj) is not torch.Tensor:
            return None
        if not self._record or not obj.requires_grad:
            return self._packer.add(obj)
        index = self._recorded_at.get(id(obj))
        if index is None:
            index = self._recorded_at[id(obj)] = len(self.recorded)
            self.recorded.append(obj)
            self.places.append(self._packer.add(obj.detach()))
        return -1 - index


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
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
        for table in reversed([_reducers, *cloudpickle.Pickler.dispatch_table.maps]):
            self.dispatch_table.update(table)
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
                    return _recorded, (self._add_recorded(obj),)
            if is_packable(obj):
                return _tensor, (self.packer.add(obj),)
            refuse_uncarried(obj)
            return NotImplemented
        if obj is _tensor or obj is _recorded:
            return NotImplemented
        self.plain = False
        if kind in self._ordinary:
            return NotImplemented
        if kind is OrderedDict and kind not in self.dispatch_table:
            # As it would be, but for a search for slots: modules have nine of them each.
            return OrderedDict, (), vars(obj) or None, None, iter(obj.items())
        if kind in _reference_types:
            return _reference, (self._refer(obj),)
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
                return _script, (saved.getvalue(),)
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
                raise _ValueWanted
            self.named.append((qualname, digest))
            return _own, (qualname, digest)
        wrapper = self._wrappers.setdefault(id(obj), _ByValue(obj))
        return _choose, (qualname, digest, wrapper)

    def _value(self, definition: Any) -> Any:
        if isinstance(definition, types.FunctionType):
            _warn_of_big_globals(definition)
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
        return _script_function, (saved.getvalue(),)


def _reduce_exception(error: BaseException) -> Any:
    cls = type(error)
    if cls.__module__ == builtins.__name__ or cls.__reduce__ is not BaseException.__reduce__:
        return NotImplemented
    state = {key: value for key, value in error.__dict__.items() if not key.startswith("__nbdist")}
    return _exception, (cls, error.args, state)


_warned: set[tuple[str, int]] = set()


def _warn_of_big_globals(function: types.FunctionType) -> None:
    for name in cloudpickle._extract_code_globals(function.__code__):
        value = function.__globals__.get(name)
        size = _size(value)
        if size > _BIG_GLOBAL and (name, id(value)) not in _warned:
            _warned.add((name, id(value)))
            warnings.warn(
                f"{names.display_name(function)} uses the global {name!r} of {size / 1e6:.1f} MB, which is sent "
                f"along with every call; pass an RRef to it, or let the worker define its own",
                stacklevel=2,
            )


def _size(value: Any, depth: int = 2) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.layout is torch.strided else 0
    if isinstance(value, torch.nn.Module):
        return sum(parameter.nbytes for parameter in value.parameters())
    if isinstance(value, list | tuple | set | frozenset) and depth:
        return sys.getsizeof(value) + sum(_size(item, depth - 1) for item in value)
    if isinstance(value, dict) and depth:
        return sys.getsizeof(value) + sum(_size(item, depth - 1) for item in value.values())
    if isinstance(value, types.ModuleType | types.FunctionType | type):
        return 0
    nbytes = getattr(value, "nbytes", None)
    return nbytes if isinstance(nbytes, int) else sys.getsizeof(value, 0)


_NO_TENSORS = Payload()


def encode_usual_call(
    name: Any, args: tuple[Any, ...], kwargs: dict[str, Any], space: Space | None
) -> tuple[Payload, list[Buffer]] | None:
    """Return the payload and frames of a call as most are, by the function's name, with atoms and one small tensor.

    Returns None where the call needs `encode`. What comes out is what `encode` would make of the call.
    """
    if type(name) is not str:
        return None
    tensor, place = None, 0
    for at, value in enumerate(args):
        if type(value) not in ATOMS:
            if tensor is not None or type(value) is not torch.Tensor:
                return None
            tensor, place = value, at
    for value in kwargs.values():
        if type(value) not in ATOMS:
            return None
    if tensor is None:
        return _NO_TENSORS, [pickle.dumps((name, args, kwargs), 5)]
    if tensor.requires_grad or not is_packable(tensor) or (alone := pack_alone(tensor, False, space)) is None:
        return None
    meta, data = alone
    rest = [*args, *kwargs.values()]
    rest[place] = None
    payload = Payload([(0, 0, len(data))], [meta], form=quick.CALL, holes=[(place, quick.TENSOR, 0)])
    return payload, [pickle.dumps((name, rest, tuple(kwargs)), 5), data]


def encode_usual_result(value: Any, space: Space | None) -> tuple[Payload, list[Buffer]] | None:
    """Return the payload and frames of a result as most are, an atom or one small tensor, else None.

    What comes out is what `encode` would make of the value.
    """
    if type(value) in ATOMS:
        return _NO_TENSORS, [pickle.dumps(value, 5)]
    if type(value) is not torch.Tensor or value.requires_grad or not is_packable(value):
        return None
    alone = pack_alone(value, False, space)
    if alone is None:
        return None
    meta, data = alone
    return Payload([(0, 0, len(data))], [meta], form=quick.WHOLE, holes=[_WHOLE]), [b"", data]


_WHOLE: Hole = (0, quick.TENSOR, 0)


def encode(
    value: Any,
    *,
    by_value: bool = False,
    lacking: Collection[str] = (),
    known: Collection[str] = (),
    forker: Forker | None = None,
    devices: Mapping[str, str] | None = None,
    receiver: str = "",
    record: bool = False,
    space: Space | None = None,
) -> Encoded:
    """Frames for ``value``, but for what goes into ``space``, shared memory that the receiver can read.

    ``by_value`` sends the definitions of ``__main__`` along with their names, but for those whose digests are
    ``known`` to the receiver; one that is ``lacking`` there makes it so for the whole message. With ``record``,
    tensors that require grad are marked, for `decode` to have them attached to the receiver's graph.
    """
    form = quick.form_of(value, _reference_types)
    simplicity = _simplicity(value, record) if form == quick.OTHER else _TENSORS
    if form == quick.PLAIN or simplicity == _PLAIN:
        return Encoded(_NO_TENSORS, [pickle.dumps(value, 5)])
    body, out_of_band = io.BytesIO(), list[Buffer]()
    places: list[int] = []
    odd: list[Buffer] = []
    try:
        if form != quick.OTHER:
            return _encode_quickly(value, form, forker, record, devices, receiver, space)
        packer = TensorPacker(devices, receiver, space)
        if simplicity == _TENSORS:
            few = _TensorPickler(body, packer, record)
            few.dump(value)
            tensors, where, frames = packer.pack()
            payload = Payload(where, tensors, recorded=few.places, places=_places(packer))
            return Encoded(payload, [body.getvalue(), *frames], few.recorded, slots=packer.slots)
        pickler = _Pickler(body, out_of_band, packer, forker, by_value, record)
        pickler.lacking, pickler.known = lacking, known
        pickler.dump(value)
        if pickler.recorded:
            places = _pack_recorded(pickler.recorded, packer, odd)
        tensors, where, frames = packer.pack()
    except _ValueWanted:
        if forker is not None:
            forker.take_back()  # a second attempt may meet other references, where reducers make them
        return encode(
            value, by_value=True, forker=forker, devices=devices, receiver=receiver, record=record, space=space
        )
    except NbdistError:
        raise
    except Exception as error:
        raise EncodeError(f"cannot be sent: {error}") from error
    payload = Payload(where, tensors, pickler.forks, pickler.plain, pickler.definitions, places, _places(packer))
    all_frames = [body.getvalue(), *frames, *odd, *out_of_band]
    warn = pickler.requires_grad and not record
    return Encoded(payload, all_frames, pickler.recorded, warn, packer.slots, pickler.named)


def _encode_quickly(
    value: Any,
    form: int,
    forker: Forker | None,
    record: bool,
    devices: Mapping[str, str] | None,
    receiver: str,
    space: Space | None,
) -> Encoded:
    holes: list[Hole] = []
    taken: list[torch.Tensor] = []
    index_of: dict[int, int] = {}
    recorded: list[torch.Tensor] = []
    recorded_at: list[int] = []
    forks: list[Fork] = []
    requires_grad = False
    for at, item in enumerate(quick.items_of(value, form)):
        kind = type(item)
        if kind in ATOMS:
            continue
        if kind in _reference_types:
            if forker is None:
                raise EncodeError("cannot be sent: a remote reference can only travel in a call")
            index = index_of.get(id(item))
            if index is None:
                index = index_of[id(item)] = len(forks)
                forks.append(forker.fork(item))
            holes.append((at, quick.REFERENCE, index))
            continue
        index = index_of.get(id(item))
        if index is None:
            index = index_of[id(item)] = len(taken)
            taken.append(item)
            if item.requires_grad:
                if record:
                    recorded.append(item)
                    recorded_at.append(index)
                else:
                    requires_grad = True
        if recorded and index in recorded_at:
            holes.append((at, quick.RECORDED, recorded_at.index(index)))
        else:
            holes.append((at, quick.TENSOR, index))
    body = quick.leave_holes(value, form, holes)
    if len(taken) == 1 and (alone := pack_alone(taken[0], bool(recorded), space)) is not None:
        meta, data = alone
        payload = Payload([(0, 0, len(data))], [meta], forks, recorded=recorded_at, form=form, holes=holes)
        return Encoded(payload, [body, data], recorded, requires_grad)
    packer = TensorPacker(devices, receiver, space)
    for index, tensor in enumerate(taken):
        packer.add(tensor.detach() if index in recorded_at else tensor)
    metas, where, frames = packer.pack()
    places = _places(packer) if packer.slots else []
    payload = Payload(where, metas, forks, recorded=recorded_at, places=places, form=form, holes=holes)
    return Encoded(payload, [body, *frames], recorded, requires_grad, packer.slots)


def _places(packer: TensorPacker) -> list[Place]:
    return [slot.place for slot in packer.slots]


def _pack_recorded(tensors: Sequence[torch.Tensor], packer: TensorPacker, frames: list[Buffer]) -> list[int]:
    """Have the data of recorded tensors packed; where it will be found."""
    places: list[int] = []
    odd: list[torch.Tensor] = []
    for tensor in tensors:
        data = tensor.detach()
        if is_packable(data):
            places.append(packer.add(data))
        else:
            odd.append(data)
            places.append(-len(odd))
    if odd:
        body = io.BytesIO()
        _Pickler(body, [], packer, None, False).dump(odd)
        frames.append(body.getvalue())
    return places


class _Globals(dict[str, Any]):
    """The globals of a by-value function: what the sender lacked is the receiver's own, at run time."""

    def __missing__(self, name: str) -> Any:
        for module in names.MAIN_NAMES:
            namespace = getattr(sys.modules.get(module), "__dict__", {})
            if name in namespace:
                return namespace[name]
        raise KeyError(name)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        body: bytes,
        buffers: Sequence[Buffer],
        tensors: Sequence[torch.Tensor],
        references: Sequence[Any],
        recorded: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__(io.BytesIO(body), buffers=[bytearray(buffer) for buffer in buffers])
        self._tensors = tensors
        self._references = references
        self._recorded = recorded
        self._globals: dict[int, tuple[Any, _Globals]] = {}
        self.missing: list[tuple[str, str]] = []

    def persistent_load(self, index: int) -> torch.Tensor:
        """What a `_TensorPickler` put in the place of a tensor."""
        return self._tensors[index] if index >= 0 else self._recorded[-1 - index]

    def read(self) -> Any:
        """The value, and nothing that keeps it."""
        try:
            return self.load()
        finally:
            self.memo = {}  # it holds methods of this very object: a circle, and with it all values
            torch_private.validate_sparse()

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__:
            if name == "_tensor":
                return self._tensors.__getitem__
            bound: dict[str, Callable[..., Any]] = {
                "_recorded": self._recorded.__getitem__,
                "_reference": self._references.__getitem__,
                "_own": self._own,
                "_choose": self._choose,
            }
            if name in bound:
                return bound[name]
        elif name == "_make_function" and module == cloudpickle.__name__:
            return self._make_function
        try:
            return super().find_class(module, name)
        except (AttributeError, ImportError) as error:
            failed = DecodeError(
                f"this worker has no {name!r} in module {module!r}, which the value needs: it must be defined on "
                f"both sides ({error})"
            )
            failed.lacks = f"{type(error).__name__}: {error}"
            raise failed from error

    def _own(self, qualname: str, digest: str) -> Any:
        found = definitions.find_own(qualname, digest)
        if found is None:
            self.missing.append((qualname, digest))
            raise MissingDefinition(f"__main__ here has no {qualname!r} with the sender's code")
        return found

    @staticmethod
    def _choose(qualname: str, digest: str, value: Any) -> Any:
        return definitions.find_own(qualname, digest) or value

    def _make_function(self, code: Any, namespace: dict[str, Any], *rest: Any) -> Any:
        # The namespace is one object for all functions that shared theirs; so is what replaces it.
        known = self._globals.get(id(namespace))
        if known is None:
            known = self._globals[id(namespace)] = (namespace, _Globals(namespace))
        return cloudpickle._make_function(code, known[1], *rest)


def decodes_quickly(payload: Payload, frames: Sequence[bytes]) -> bool:
    """Whether the thread that reads may decode this: it is small, and runs nobody's code."""
    if not payload.plain:
        return False
    # What lies in shared memory is not copied: be it ever so large, it is quick.
    if payload.places:
        frames = frames[: len(frames) - len(payload.places)]
    return sum(map(len, frames)) < _QUICK


NOT_DECODED = object()
"""The result of `decode_early` for a value that a job has to decode."""


def decode_early(payload: Payload, frames: Sequence[bytes], references: Sequence[Any] = ()) -> Any:
    """Return the value in ``frames`` if the thread that reads may decode it, as `decodes_quickly` says.

    The value is `NOT_DECODED` where that is not so, and where it cannot be decoded: `decode` raises the error then.
    """
    if not payload.plain:
        return NOT_DECODED
    try:
        if not payload.places and sum(map(len, frames)) < _QUICK:
            if len(frames) == 1 and not payload.form and not payload.tensors:
                return pickle.loads(frames[0])
            if payload.form and not payload.recorded:
                return _decode_quickly(payload, frames, (), references, None)
        return decode(payload, frames, references) if decodes_quickly(payload, frames) else NOT_DECODED
    except Exception:
        return NOT_DECODED


def decode(
    payload: Payload,
    frames: Sequence[bytes],
    references: Sequence[Any] = (),
    attach: Attach = None,
) -> Any:
    """The value in ``frames``, the last of which are its places in shared memory; ``references`` are its forks here."""
    if not frames:
        raise DecodeError("the message has no body")
    try:
        if payload.plain and not payload.form and not payload.tensors and len(frames) == 1:
            return pickle.loads(frames[0])
        leased = frames[len(frames) - len(payload.places) :]
        frames = frames[: len(frames) - len(payload.places)]
        if payload.form:
            return _decode_quickly(payload, frames, leased, references, attach)
        behind = 1 + max((-1, *(frame for frame, _, _ in payload.buffers))) + 1
        tensors = unpack_tensors(payload.tensors, payload.buffers, frames[1:behind], leased)
        recorded: list[torch.Tensor] = []
        if payload.recorded:
            odd: list[torch.Tensor] = []
            if min(payload.recorded) < 0:
                odd = _Unpickler(frames[behind], (), tensors, ()).read()
                behind += 1
            recorded = [tensors[place] if place >= 0 else odd[-1 - place] for place in payload.recorded]
            recorded = _with_history(recorded, attach)
        return _Unpickler(frames[0], frames[behind:], tensors, references, recorded).read()
    except NbdistError:
        raise
    except Exception as error:
        raise DecodeError(f"the value cannot be rebuilt here: {type(error).__name__}: {error}") from error


def _decode_quickly(
    payload: Payload, frames: Sequence[bytes], leased: Sequence[Buffer], references: Sequence[Any], attach: Attach
) -> Any:
    metas, where, data = payload.tensors, payload.buffers, frames[1:]
    alone = unpack_alone(metas[0], where, data) if len(metas) == 1 else None
    tensors = [alone] if alone is not None else unpack_tensors(metas, where, data, leased)
    recorded = _with_history([tensors[place] for place in payload.recorded], attach) if payload.recorded else ()
    return quick.fill(frames[0], payload.form, payload.holes, (tensors, recorded, references))


def _with_history(tensors: list[torch.Tensor], attach: Attach) -> list[torch.Tensor]:
    return attach(tensors) if attach is not None else [tensor.requires_grad_() for tensor in tensors]
