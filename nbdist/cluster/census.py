"""Counts what objects hold: every buffer and every object once, whoever refers to it, and without any code of theirs.

A `Census` is one look at one process. A `Walk` goes through what one value holds, a bounded number of objects at a
time, so that a look ends soon however much there is::

    value ── children ──> containers, fields, closures ──> ...     by iterators of the base classes and by
                │                                                  what Python's garbage collector knows
                ├──> tensors: storage, gradient, graph ──> saved tensors
                └──> arrays: buffer, base

Nothing is copied: a walk keeps iterators over what is there, and the ``id`` of each object that it has met.
"""

from __future__ import annotations

import collections
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import msgspec
import torch

from nbdist.autograd.kept import Place, storage_of
from nbdist.autograd.saved import saved_by
from nbdist.cluster.process_memory import Regions, resident_bytes
from nbdist.rpc import inert
from nbdist.rpc.agent import Agent
from nbdist.rpc.futures import Promise
from nbdist.torch_private import no_torch_function

__all__ = ["Amount", "Census", "Walk"]

_MACHINERY = ("IPython", "ipykernel", "traitlets", "zmq", "jupyter_client", "asyncio", "_asyncio", "logging")
"""Packages whose objects are not walked through: they lead to all that the kernel has."""
_OURS = ("nbdist.rpc", "nbdist.channel", "nbdist.cluster", "nbdist.autograd", "nbdist.views", "nbdist.magics")
_FEW = 10_000
"""A subclass of a container with more entries is not searched for attributes of its own."""


_tensor: Any = torch.Tensor
_grad: Callable[[torch.Tensor], torch.Tensor | None] = _tensor.grad.__get__
_grad_fn: Callable[[torch.Tensor], Any] = _tensor.grad_fn.__get__
_retains_grad: Callable[[torch.Tensor], bool] = _tensor.retains_grad.__get__
_CONTAINERS: tuple[Any, ...] = (list, tuple, dict, set, frozenset, collections.deque)


class Amount(msgspec.Struct):
    """Bytes that one kind of holder accounts for."""

    private: int = 0
    """In this process's own memory."""
    shared: int = 0
    """In shared memory that it has mapped."""
    absent: int = 0
    """In no memory: never written to, or swapped out."""
    gpu: int = 0
    """On other devices than the CPU."""


class _Buffer(NamedTuple):
    nbytes: int
    category: str


class _Kind(NamedTuple):
    """How to go through the instances of a class."""

    cls: type
    size_of: Callable[[Any], int]
    base: Any
    """The class of Python, torch or numpy whose methods read them; `object` where nothing more is known."""
    is_passed_by: bool = False
    is_extended: bool = False
    """Whether it is a container whose instances may have attributes too."""

    @classmethod
    def of(cls, what: type) -> _Kind:
        """Find out about a class."""
        size_of, ndarray = inert.sizer_of(what), inert.array_class()
        if ndarray is not None and issubclass(what, ndarray):
            return cls(what, object.__sizeof__, ndarray)  # its buffer is counted by itself
        for base in (torch.Tensor, FunctionType, type):
            if issubclass(what, base):
                return cls(what, size_of, base)
        name = inert.module_of(what)
        if issubclass(what, (ModuleType, CodeType, Agent)) or name.partition(".")[0] in _MACHINERY:
            return cls(what, size_of, object, True)
        if name.startswith(_OURS) and not issubclass(what, (Promise, torch.nn.Module)):
            return cls(what, size_of, object, True)
        for base in _CONTAINERS:
            if issubclass(what, base):
                plain = (base, collections.OrderedDict, collections.defaultdict)
                return cls(what, size_of, base, is_extended=not any(what is each for each in plain))
        return cls(what, size_of, object)


@dataclass
class Census:
    """Everything that one look has met."""

    buffers: dict[Place, _Buffer] = field(default_factory=dict)
    objects: dict[str, int] = field(default_factory=dict)
    """Bytes of plain Python objects, by category."""
    watched: dict[int | Place, int] = field(default_factory=dict)
    """Objects, by their ``id``, and buffers, of which `Walk.met` shall tell; each with a number."""
    _seen: set[int] = field(default_factory=set)
    _nodes: dict[int, Any] = field(default_factory=dict)
    """Nodes of graphs by their ``id``, which torch would give to another node if these were dropped."""
    _kinds: dict[int, _Kind] = field(default_factory=dict)
    """By the ``id`` of the class, for the reason that `inert` has."""

    def skip(self, values: Iterable[object]) -> None:
        """Walk through none of these: they are what everything leads to."""
        self._seen.update(map(id, values))

    def kind_of(self, cls: type) -> _Kind:
        """Return how to go through the instances of a class."""
        kind = self._kinds.get(id(cls))
        if kind is None:
            kind = self._kinds[id(cls)] = _Kind.of(cls)
        return kind

    def put(self, category: str, places: dict[Place, int]) -> None:
        """Count buffers that were found otherwise."""
        for place, nbytes in places.items():
            self.buffers.setdefault(place, _Buffer(nbytes, category))

    def amounts(self, regions: Regions) -> dict[str, Amount]:
        """Return what was counted, by category; without what is in no memory."""
        found: dict[str, Amount] = {}
        for (device, address), buffer in self.buffers.items():
            amount = found.setdefault(buffer.category, Amount())
            if device != "cpu":
                amount.gpu += buffer.nbytes
                continue
            resident = resident_bytes(address, buffer.nbytes)
            amount.absent += buffer.nbytes - resident
            if regions.contain(address):
                amount.shared += resident
            else:
                amount.private += resident
        for category, nbytes in self.objects.items():
            found.setdefault(category, Amount()).private += nbytes
        return found


class Walk:
    """The way through what one value holds. What is counted for it was not met before, by it or by another walk."""

    def __init__(self, census: Census, category: str, value: object) -> None:
        self.nbytes = 0
        """Of buffers and objects in this process's memory."""
        self.gpu = 0
        self.count = 0
        """Objects that were met."""
        self.is_partial = False
        """Whether something was changed while it was read, so that there may be more."""
        self.met: set[int] = set()
        """The numbers of `Census.watched` that the value leads to."""
        self._census = census
        self._category = category
        self._root = value
        self._is_module = inert.is_a(value, torch.Tensor, torch.nn.Module)
        """Of these the bytes of the objects around the buffers are not told, though counted."""
        self._stack: list[Iterator[Any]] = [iter((value,))]

    @property
    def done(self) -> bool:
        """Whether all has been met."""
        return not self._stack

    def go(self, count: int) -> int:
        """Meet so many more objects; returns how many there were."""
        before = self.count
        with no_torch_function():
            while self._stack and self.count - before < count:
                try:
                    value = next(self._stack[-1])
                except StopIteration:
                    self._stack.pop()
                    continue
                except RuntimeError:  # a dict that another thread changes
                    self.is_partial = True
                    self._stack.pop()
                    continue
                self.count += 1
                self._meet(value)
        return self.count - before

    def _meet(self, value: object) -> None:
        cls = type(value)
        if cls is int or cls is float:
            self._object(cls.__sizeof__(value))
            return
        if value is None or cls is bool:
            return
        census, key = self._census, id(value)
        if census.watched:
            self._tell(key)
        if key in census._seen:
            if census.watched and issubclass(cls, torch.Tensor):
                self._tell_place(value)  # type: ignore[arg-type]
            return
        census._seen.add(key)
        if cls is str or cls is bytes:
            self._object(cls.__sizeof__(value))
            return
        children = self._children(value, cls)
        if children is not None:
            self._stack.append(children)

    def _children(self, value: Any, cls: type) -> Iterator[Any] | None:
        """Count a value, and return what it refers to."""
        kind = self._census.kind_of(cls)
        if kind.is_passed_by:
            return None
        if kind.base is FunctionType:
            return iter((value.__closure__, value.__defaults__, value.__kwdefaults__))
        if kind.base is type:
            return iter(inert.dict_of_class(value).values()) if inert.module_of(value) == "__main__" else None
        self._object(kind.size_of(value))
        if kind.base is torch.Tensor:
            return self._tensor(value)
        if kind.base is object or (kind.is_extended and kind.base.__len__(value) < _FEW):
            return iter(_referents(value, cls))
        if kind.base is dict:
            return chain.from_iterable(dict.items(value))
        if kind.base in _CONTAINERS:
            items: Iterator[Any] = kind.base.__iter__(value)
            return items
        return self._array(value, kind.base)

    # -- tensors and arrays ---------------------------------------------------------------------

    def _tensor(self, tensor: torch.Tensor) -> Iterator[Any]:
        found = storage_of(tensor)
        if found is not None:
            self._buffer(*found, is_root=tensor is self._root)
        referents = _referents(tensor, type(tensor))  # what is set on it, and its hooks
        node = _grad_fn(tensor)
        if node is None or _retains_grad(tensor):
            gradient = _grad(tensor)
            if gradient is not None:
                referents.append(gradient)
        return chain(referents, self._graph(node)) if node is not None else iter(referents)

    def _graph(self, node: Any) -> Iterator[Any]:
        """Yield the nodes of a graph, and what they have saved."""
        nodes, pending = self._census._nodes, [node]
        while pending:
            node = pending.pop()
            if id(node) in nodes:
                continue
            nodes[id(node)] = node
            yield node
            yield from (saved.data for saved in saved_by(node))
            pending += [following for following, _ in node.next_functions if following is not None]

    def _array(self, array: Any, ndarray: Any) -> Iterator[Any] | None:
        base = ndarray.base.__get__(array)
        if base is not None and inert.is_a(base, ndarray, torch.Tensor, bytes, bytearray):
            return iter((base,))
        if inert.module_of(type(base)) != "mmap":  # what is in a file is not the process's own
            address = ndarray.__array_interface__.__get__(array)["data"][0]
            self._buffer(("cpu", address), ndarray.nbytes.__get__(array))
        return iter(ndarray.flat.__get__(array)) if ndarray.dtype.__get__(array).hasobject else None

    # -- counting -------------------------------------------------------------------------------

    def _buffer(self, place: Place, nbytes: int, *, is_root: bool = False) -> None:
        known = self._census.buffers.get(place)
        if known is None:
            self._census.buffers[place] = _Buffer(nbytes, self._category)
        elif is_root and known.category == "contexts":
            self._census.buffers[place] = _Buffer(nbytes, self._category)  # it is told as the value of a reference
        else:
            self._tell(place)
            return
        self._tell(place)
        if place[0] == "cpu":
            self.nbytes += nbytes
        else:
            self.gpu += nbytes

    def _object(self, nbytes: int) -> None:
        objects = self._census.objects
        objects[self._category] = objects.get(self._category, 0) + nbytes
        if not self._is_module:
            self.nbytes += nbytes

    def _tell(self, key: int | Place) -> None:
        number = self._census.watched.get(key)
        if number is not None:
            self.met.add(number)

    def _tell_place(self, tensor: torch.Tensor) -> None:
        found = storage_of(tensor)
        if found is not None:
            self._tell(found[0])


def _referents(value: object, cls: type) -> list[Any]:
    """Return what an object refers to as Python's garbage collector knows it, its class aside."""
    return [each for each in gc.get_referents(value) if each is not cls]
