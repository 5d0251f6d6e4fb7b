"""Who in this process holds an object: the names by which a user knows it, found by walking back from it.

Python knows who refers to whom. What a user can act on is at the end of that way: a variable, an entry of `Out`, a
traceback that is kept for the debugger. Whatever lies between is passed by. What only a function holds that runs is not
found: to read its variables would keep them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, ModuleType, TracebackType
from typing import Any

import msgspec

from nbdist.rpc.agent import Agent
from nbdist.rpc.references import References
from nbdist.rpc.rref import Home

__all__ = ["Pin", "Roots", "chain_of", "find", "frames_of", "name_of", "namespace_of", "told", "variable"]

_DEPTH = 12
"""So many steps are walked back at most,"""
_MOST = 20_000
"""and no further where so many objects are on the way."""
_FEW = 50
_OURS = "nbdist"


class Pin(msgspec.Struct, frozen=True, order=True):
    """One reason for which an object is kept."""

    kind: str
    """``variable``, ``out``, ``traceback``, ``context`` or ``other``."""
    name: str
    within: bool = False
    """Whether it is something in it, not itself, that is the object."""

    def __str__(self) -> str:
        return f"in {self.name}" if self.within else self.name

    @property
    def idle(self) -> bool:
        """Whether nobody will miss it: it is kept in case somebody wants to look back."""
        return self.kind in ("out", "traceback")


@dataclass
class Roots:
    """Where the ways end."""

    variables: Sequence[dict[str, Any]]
    """Namespaces of the user's."""
    out: dict[int, Any] = field(default_factory=dict)
    """What cells gave, by number."""
    named: Mapping[int, Pin] = field(default_factory=dict)
    """Other objects that keep things, by their ``id``, and for what they stand."""
    tracebacks: Mapping[int, FrameType] = field(default_factory=dict)
    """The frames of errors that are kept."""


def find(objects: Sequence[object], roots: Roots) -> list[list[Pin]]:
    """Who holds each of these."""
    found: list[set[Pin]] = [set() for _ in objects]
    reached: dict[int, set[int]] = {}
    """Which of them each object on the way leads to."""
    level: dict[int, tuple[object, set[int]]] = {}
    """From where to look on, and for which of them."""
    for number, each in enumerate(objects):
        reached.setdefault(id(each), set()).add(number)
        level[id(each)] = each, reached[id(each)]
    namespaces = {id(space): name_of(space) for space in map(namespace_of, list(sys.modules.values())) if space}
    passed = {id(each) for each in (reached, level, found, namespaces, objects, roots.named, roots.tracebacks)}
    passed |= {id(sys._getframe()), *(id(pair) for pair in level.values()), *map(id, objects)}
    for depth in range(_DEPTH):
        if not level or len(level) > _MOST:
            break
        following: dict[int, tuple[object, set[int]]] = {}
        passed |= {id(following), id(level), *(id(pair) for pair in level.values())}
        for holder, inner in _holders({key: each for key, (each, _) in level.items()}):
            if id(holder) in passed:
                continue
            leads = set[int]().union(*(level[key][1] for key in inner))
            ends, goes_on = _pins(holder, inner, roots, namespaces, within=depth > 0)
            for key, pin in ends:
                for number in level[key][1] if key else leads:
                    found[number].add(pin)
            new = leads - reached.get(id(holder), set())
            if goes_on and new:
                reached.setdefault(id(holder), set()).update(new)
                following[id(holder)] = holder, new
                passed.add(id(following[id(holder)]))
        level = following
    return [told(pins) for pins in found]


def _holders(objects: dict[int, object]) -> Iterator[tuple[object, set[int]]]:
    """Who refers to some of these, and to which: of few Python finds that out at once, for many it is slow."""
    if len(objects) <= _FEW:
        around: Iterable[object] = gc.get_referrers(*objects.values())
    else:
        around = gc.get_objects()
    for holder in around:
        if holder is not objects:
            inner = {id(each) for each in gc.get_referents(holder) if id(each) in objects}
            if inner:
                yield holder, inner


def told(pins: set[Pin]) -> list[Pin]:
    """What is held by a variable directly need not be said to be in it as well; what is in `Out`, not to be `_`.

    And of what a traceback holds the shell has the error.
    """
    direct = {(pin.kind, pin.name) for pin in pins if not pin.within}
    found = {pin for pin in pins if not pin.within or (pin.kind, pin.name) not in direct}
    numbered = {pin for pin in found if pin.kind == "out" and pin.name.startswith("Out[")}
    better = numbered or any(pin.kind == "traceback" for pin in found)
    return sorted(pin for pin in found if pin.kind != "out" or pin in numbered or not better)


def _pins(
    holder: object, inner: Collection[int], roots: Roots, namespaces: Mapping[int, str], *, within: bool
) -> tuple[list[tuple[int, Pin]], bool]:
    """For what a holder stands, and for which object, 0 for all; and whether others may hold on to that by it."""
    for namespace in roots.variables:
        if holder is namespace:
            names = _entries(namespace, inner)
            return [(id(value), variable(name, within)) for name, value in names if value is not roots.out], False
    if holder is roots.out:
        numbers = [(number, value) for number, value in list(roots.out.items()) if id(value) in inner]
        return [(id(value), Pin("out", f"Out[{number}]", within)) for number, value in numbers], False
    if id(holder) in roots.named:
        return [(0, roots.named[id(holder)])], False
    if id(holder) in roots.tracebacks:
        return [(0, Pin("traceback", "a traceback"))], True  # the user may have kept the error
    module = namespaces.get(id(holder))
    if module is not None:
        assert type(holder) is dict
        if module.partition(".")[0] == _OURS:
            return [], False
        named = _entries(holder, inner)
        if module == "sys":  # where the last error is, for the debugger
            named = [(name, value) for name, value in named if not name.startswith("last_")]
        return [(id(value), Pin("variable", f"{module}.{name}", within)) for name, value in named], False
    # An agent refers to all that it owns, and each reference, by its home, to its agent: that way leads from anything
    # to anything.
    return [], not issubclass(type(holder), (ModuleType, Agent, References, Home))


def _entries(namespace: dict[str, Any], inner: Collection[int]) -> list[tuple[str, Any]]:
    """Return the variables whose values are among these, given by their ``id``."""
    return [(name, value) for name, value in list(namespace.items()) if id(value) in inner and type(name) is str]


def namespace_of(module: object) -> dict[str, Any]:
    """Return a module's variables; none of what is in `sys.modules` and is not a module."""
    return _namespace(module) if issubclass(type(module), ModuleType) else {}


def name_of(namespace: dict[str, Any]) -> str:
    """Return the name of the module with these variables; "" where that is no plain text."""
    name = namespace.get("__name__")
    return name if type(name) is str else ""


_module: Any = ModuleType
_namespace: Callable[[Any], dict[str, Any]] = _module.__dict__["__dict__"].__get__


def variable(name: str, within: bool = False) -> Pin:
    """For what a variable's name stands: `_`, `__`, `___` and `_12` are the shell's, for what cells gave."""
    if not name.strip("_") or (name.startswith("_") and name[1:].isdecimal()):
        number = name.strip("_")
        return Pin("out", f"Out[{number}]" if number else name, within)
    return Pin("variable", name, within)


def frames_of(errors: Iterable[BaseException | None]) -> dict[int, FrameType]:
    """The frames that errors keep, and those for which they were raised."""
    found: dict[int, FrameType] = {}
    for error in chain_of(errors):
        traceback: TracebackType | None = _traceback(error)
        while traceback is not None:
            found[id(traceback.tb_frame)] = traceback.tb_frame
            traceback = traceback.tb_next
    return found


def chain_of(errors: Iterable[BaseException | None]) -> list[BaseException]:
    """Errors, and those for which they were raised, each once."""
    found: dict[int, BaseException] = {}
    stack = list(errors)
    while stack:
        error = stack.pop()
        if error is not None and id(error) not in found:
            found[id(error)] = error
            stack += [_cause(error), _context(error)]
    return list(found.values())


_traceback, _cause, _context = (
    BaseException.__dict__[name].__get__ for name in ("__traceback__", "__cause__", "__context__")
)
