"""Counts the memory of objects: every buffer and object once, without calling any code of their classes.

A `Census` is one look at one process. A `CensusWalk` visits what one value holds, a bounded number of objects at a
time, so that a look ends soon however much there is::

    value ── children ──> containers, fields, closures ──> ...     by iterators of the base classes and by
                │                                                  Python's garbage collector
                ├──> tensors: storage, gradient, graph ──> saved tensors
                └──> arrays: buffer, base

Nothing is copied: a walk keeps iterators over the containers, and the ``id`` of each object that it has visited.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
import torch

from nbdist.autograd.graph.saved import saved_by
from nbdist.autograd.memory_use import Place, storage_of
from nbdist.cluster.inspection import anatomy
from nbdist.cluster.inspection.anatomy import CONTAINERS, Step
from nbdist.cluster.processes.process_memory import Regions, resident_bytes
from nbdist.rpc.agent import Agent
from nbdist.rpc.promise import Promise
from nbdist.rpc.references import inert
from nbdist.torch_private import no_torch_function

_SKIPPED_PACKAGES = ("IPython", "ipykernel", "traitlets", "zmq", "jupyter_client", "asyncio", "_asyncio", "logging")
"""Packages whose objects a walk skips, because they lead to everything that the kernel holds."""
_SKIPPED_MODULES = tuple(f"nbdist.{name}" for name in ("rpc", "channel", "cluster", "autograd", "views", "magics"))
"""Modules of nbdist whose objects a walk skips as well, except for promises and `torch.nn.Module` subclasses."""
_MOST_PATHS = 1_000
"""Paths that a walk describes, each of which takes up to 0.1 ms."""
_SEARCHED_UP_TO = 10_000
"""Entries up to which an instance of a container subclass is searched for attributes too, besides its items."""


_tensor: Any = torch.Tensor
_grad: Callable[[torch.Tensor], torch.Tensor | None] = _tensor.grad.__get__
_grad_fn: Callable[[torch.Tensor], Any] = _tensor.grad_fn.__get__
_retains_grad: Callable[[torch.Tensor], bool] = _tensor.retains_grad.__get__


class Amount(msgspec.Struct):
    """The bytes that one category accounts for, by where they are."""

    private: int = 0
    """Bytes in this process's own memory."""
    shared: int = 0
    """Bytes in shared memory that this process has mapped."""
    absent: int = 0
    """Bytes that are not in memory: pages never written to, or swapped out."""
    gpu: int = 0
    """Bytes on devices other than the CPU."""


class _Buffer(NamedTuple):
    """The size of a buffer, and the category that it was counted for."""

    nbytes: int
    category: str


class _Kind(NamedTuple):
    """The method by which a walk visits the instances of a class."""

    cls: type
    size_of: Callable[[Any], int]
    """Returns the bytes of an instance itself, without the objects that it refers to."""
    base: Any
    """The class of Python, torch or numpy whose methods read the instances; `object` if none of the known ones fits."""
    is_passed_by: bool = False
    """True if a walk skips the instances."""
    is_extended: bool = False
    """True for subclasses of containers, whose instances may have attributes besides their items."""

    @classmethod
    def of(cls, what: type) -> _Kind:
        """Return the `_Kind` of a class: how to size its instances, and which base class's methods read them."""
        size_of, ndarray = inert.sizer_of(what), inert.array_class()
        if ndarray is not None and issubclass(what, ndarray):
            return cls(what, object.__sizeof__, ndarray)  # `CensusWalk._array` counts the buffer
        for base in (torch.Tensor, FunctionType, type):
            if issubclass(what, base):
                return cls(what, size_of, base)
        name = inert.module_of(what)
        if issubclass(what, (ModuleType, CodeType, Agent)) or name.partition(".")[0] in _SKIPPED_PACKAGES:
            return cls(what, size_of, object, True)
        if name.startswith(_SKIPPED_MODULES) and not issubclass(what, (Promise, torch.nn.Module)):
            return cls(what, size_of, object, True)
        for base in CONTAINERS:
            if issubclass(what, base):
                return cls(what, size_of, base, is_extended=not anatomy.is_plain(what))
        return cls(what, size_of, object)


@dataclass
class Census:
    """The memory of one process, counted once: bytes by category (``contexts``, ``references``, ``variables``)."""

    buffers: dict[Place, _Buffer] = field(default_factory=dict)
    """The buffers that were counted, by device and address."""
    objects: dict[str, int] = field(default_factory=dict)
    """Bytes of Python objects, by category."""
    watched: dict[int | Place, int] = field(default_factory=dict)
    """Numbers of objects (by ``id``) and buffers (by place). A walk adds those that it meets to `CensusWalk.met`."""
    seen: set[int] = field(default_factory=set)
    """The ``id`` of every object that was visited, or that `skip` excludes."""
    nodes: dict[int, Any] = field(default_factory=dict)
    """The graph nodes visited, by ``id``. Kept alive, as torch would reuse the ``id`` of a dropped node for another."""
    _kinds: dict[int, _Kind] = field(default_factory=dict)
    """Kinds by the ``id`` of their class: to hash the class itself could call code of its metaclass."""

    def skip(self, values: Iterable[object]) -> None:
        """Exclude these objects from all walks, because they lead to everything else, as the user's namespace does."""
        # Before the first walk: objects that have been visited stay counted.
        self.seen.update(map(id, values))

    def kind_of(self, cls: type) -> _Kind:
        """Return the `_Kind` of a class, which is found out once for each class."""
        if (kind := self._kinds.get(id(cls))) is None:
            kind = self._kinds[id(cls)] = _Kind.of(cls)
        return kind

    def put(self, category: str, places: dict[Place, int]) -> None:
        """Count buffers for a category without a walk: ``places`` has their bytes, by device and address."""
        for place, nbytes in places.items():
            self.buffers.setdefault(place, _Buffer(nbytes, category))

    def amounts(self, regions: Regions) -> dict[str, Amount]:
        """Return the counted bytes of each category, split by where they are: see `Amount`."""
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


@dataclass(slots=True)
class _Level:
    """The objects that one holder leads to, of which a walk has visited some; the levels are the path of the walk."""

    holder: Any
    children: Iterator[Any]
    start: int
    """The bytes that the walk had counted when it came to the holder."""
    step: Step = (None, -1, None, None)
    """The step to the object that was visited last."""
    # A chain and no list, because a path may be thousands of steps long.
    heaviest: tuple[int, Any, Any] = (0, None, None)
    """The part that takes the most bytes: these, the step to it, and the heaviest part of that part in this form."""


class CensusWalk:
    """Visits all objects that one value holds; counts an object unless a walk of the same census has visited it."""

    def __init__(self, census: Census, category: str, value: object, name: str = "") -> None:
        self.nbytes = 0
        """Bytes of buffers and objects in this process's memory. For a tensor or module, of the buffers alone."""
        self.gpu = 0
        """Bytes of buffers on other devices."""
        self.count = 0
        """The number of objects visited so far."""
        self.is_partial = False
        """True if another thread changed a container while it was read, so that the walk may have missed objects."""
        self.digest = 0
        """A number that differs if the value leads to other numbers and texts. It is the same in all processes."""
        self.nodes = 0
        """The number of nodes of autograd graphs."""
        self.met: dict[int, str] = {}
        """The numbers from `Census.watched` of the objects and buffers that the value leads to, with where each is."""
        self._name = name  # of the variable; "" to describe no paths
        self._census = census
        self._category = category
        self._root = value
        self._is_module = inert.is_a(value, torch.Tensor, torch.nn.Module)
        """True for a tensor or module: the Python objects around its buffers count for the census, not for `nbytes`."""
        self._bottom = _Level(None, iter((value,)), 0)
        self._stack = [self._bottom]

    @property
    def done(self) -> bool:
        """True once everything that the value holds has been visited."""
        return not self._stack

    def go(self, count: int) -> int:
        """Visit up to ``count`` more objects, until the walk is `done`; return how many were visited."""
        before = self.count
        with no_torch_function():
            while self._stack and self.count - before < count:
                level = self._stack[-1]
                try:
                    value = next(level.children)
                except (StopIteration, RuntimeError) as end:
                    self.is_partial |= type(end) is RuntimeError  # another thread has changed the dict
                    self._leave()
                    continue
                self.count += 1
                level.step = level.holder, level.step[1] + 1, level.step[3], value
                self._count_once(value)
        return self.count - before

    def _leave(self) -> None:
        """Take the last level off the stack, and note its bytes at the level before if they are the most there."""
        level = self._stack.pop()
        nbytes = self.nbytes + self.gpu - level.start
        if self._stack and nbytes > self._stack[-1].heaviest[0]:
            self._stack[-1].heaviest = nbytes, self._stack[-1].step, level.heaviest

    def contents(self) -> str:
        """Return what the value itself holds, in words; see `anatomy.contents_of`."""
        with no_torch_function():
            return anatomy.contents_of(self._root, self.nodes)

    def main_part(self) -> str:
        """Return where in the value more than half of its bytes are, and what is there; "" if they are spread."""
        # Once the walk is `done`: before, the levels on the stack are not among the parts.
        steps, part = list[Step](), self._bottom.heaviest[2]
        while part is not None and 2 * part[0] > self.nbytes + self.gpu:
            steps.append(part[1])
            part = part[2]
        while steps and anatomy.is_part(steps[-1][0], steps[-1][3]):
            steps.pop()
        with no_torch_function():
            path = anatomy.describe_path(self._name, steps)
            return path and f"{path}: {anatomy.short_name(type(steps[-1][3]))}{anatomy.contents_of(steps[-1][3])}"

    def _count_once(self, value: Any) -> None:
        """Count an object unless it has been visited, and put its referents on the stack, to be visited next."""
        cls: Any = type(value)
        if cls is int or cls is float or cls is bool or cls is str:
            same = value if cls is not str else crc32(value[:1000].encode(errors="replace"))  # the rest takes too long
            same = "nan" if value != value else (same, same == -1)  # a NaN's hash is its address; -1 has that of -2
            self.digest = hash((self.digest, same))
        if cls is int or cls is float:
            self._object(cls.__sizeof__(value))
            return
        if value is None or cls is bool:
            return
        census, key, start = self._census, id(value), self.nbytes + self.gpu
        if census.watched:
            self._note_watched(key)
        if key in census.seen:
            if census.watched and issubclass(cls, torch.Tensor) and (found := storage_of(value)) is not None:
                self._note_watched(found[0])
            return
        census.seen.add(key)
        if cls is str or cls is bytes:
            self._object(cls.__sizeof__(value))
            return
        if (children := self._children(value, cls)) is not None:
            self._stack.append(_Level(value, children, start))

    def _children(self, value: Any, cls: type) -> Iterator[Any] | None:
        """Count an object; return an iterator over its referents, or None if there is nothing to visit."""
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
        if kind.base is object or (kind.is_extended and kind.base.__len__(value) < _SEARCHED_UP_TO):
            return iter(_referents(value, cls))
        if kind.base is dict:
            return chain.from_iterable(dict.items(value))
        if kind.base in CONTAINERS:
            items: Iterator[Any] = kind.base.__iter__(value)
            return items
        return self._array(value, kind.base)

    # -- tensors and arrays ---------------------------------------------------------------------

    def _tensor(self, tensor: torch.Tensor) -> Iterator[Any]:
        """Count a tensor's buffer; return its attributes, hooks, gradient, and the nodes of its autograd graph."""
        if (found := storage_of(tensor)) is not None:
            self._buffer(*found, is_root=tensor is self._root)
        referents = _referents(tensor, type(tensor))  # the attributes that were set on the tensor, and its hooks
        node = _grad_fn(tensor)
        if (node is None or _retains_grad(tensor)) and (gradient := _grad(tensor)) is not None:
            referents.append(gradient)
        return chain(referents, self._graph(node)) if node is not None else iter(referents)

    def _graph(self, node: Any) -> Iterator[Any]:
        """Yield the nodes of an autograd graph, from ``node`` on, and the values that they have saved for backward."""
        nodes, pending = self._census.nodes, [node]
        while pending:
            node = pending.pop()
            if id(node) in nodes:
                continue
            nodes[id(node)] = node
            self.nodes += 1
            yield node
            yield from (saved.data for saved in saved_by(node))
            pending += [following for following, _ in node.next_functions if following is not None]

    def _array(self, array: Any, ndarray: Any) -> Iterator[Any] | None:
        """Count a numpy array's buffer; return its base if that owns the buffer, else the objects in it."""
        base = ndarray.base.__get__(array)
        if base is not None and inert.is_a(base, ndarray, torch.Tensor, bytes, bytearray):
            return iter((base,))
        if inert.module_of(type(base)) != "mmap":  # a mapped file is not the process's own memory
            address = ndarray.__array_interface__.__get__(array)["data"][0]
            self._buffer(("cpu", address), ndarray.nbytes.__get__(array))
        return iter(ndarray.flat.__get__(array)) if ndarray.dtype.__get__(array).hasobject else None

    # -- counting -------------------------------------------------------------------------------

    def _buffer(self, place: Place, nbytes: int, *, is_root: bool = False) -> None:
        """Count a buffer for the category of this walk, unless it was counted before."""
        self._note_watched(place)
        known = self._census.buffers.get(place)
        # If it was counted for the contexts, and the walk began at its tensor, it moves to the category of the walk:
        # the user knows the tensor by its reference or variable.
        if known is not None and not (is_root and known.category == "contexts"):
            return
        self._census.buffers[place] = _Buffer(nbytes, self._category)
        if place[0] == "cpu":
            self.nbytes += nbytes
        else:
            self.gpu += nbytes

    def _object(self, nbytes: int) -> None:
        """Add the bytes of a Python object to the category of this walk."""
        objects = self._census.objects
        objects[self._category] = objects.get(self._category, 0) + nbytes
        if not self._is_module:
            self.nbytes += nbytes

    def _note_watched(self, key: int | Place) -> None:
        """Note in `met` that the value leads to an object (an ``id``) or buffer, if `Census.watched` asks for it."""
        if (number := self._census.watched.get(key)) is not None and number not in self.met:
            stack = self._stack[1 : anatomy.MOST_STEPS + 2] if len(self.met) < _MOST_PATHS else []
            self.met[number] = anatomy.describe_path(self._name, [level.step for level in stack])


def _referents(value: object, cls: type) -> list[Any]:
    """Return the objects that Python's garbage collector finds in a value, without the value's class."""
    return [each for each in gc.get_referents(value) if each is not cls]
