"""Who in this process holds an object: the names by which a user knows it, found by walking back from it.

Python knows who refers to whom. What a user can act on is at the end of that way: a variable, an entry of `Out`, a
traceback that is kept for the debugger. Whatever lies between is passed by. What only a function holds that runs is not
found: to read its variables would keep them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, ModuleType, TracebackType
from typing import Any

import msgspec

from nbdist.rpc.agent import Agent
from nbdist.rpc.references import References

__all__ = ["Pin", "Roots", "find", "frames_of", "told", "variable"]

_DEPTH = 12
"""So many steps are walked back at most."""
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
    reached: dict[int, set[int]] = {}  # which of them each object on the way leads to
    level: dict[int, object] = {}
    for number, each in enumerate(objects):
        reached.setdefault(id(each), set()).add(number)
        level[id(each)] = each
    namespaces = {
        id(module.__dict__): module.__name__ for module in list(sys.modules.values()) if isinstance(module, ModuleType)
    }
    ours = [reached, level, found, namespaces, objects, roots.named, roots.tracebacks]
    passed = {id(each) for each in ours} | {id(sys._getframe())} | set(reached)
    for depth in range(_DEPTH):
        here = list(level.values())
        if not here:
            break
        # `here` itself and the dictionaries of this walk refer to them as well.
        around = gc.get_referrers(*here)
        passed |= {id(here), id(around)}
        following: dict[int, object] = {}
        passed.add(id(following))
        for holder in around:
            if id(holder) in passed:
                continue
            leads = set[int]()
            for inner in gc.get_referents(holder):
                if id(inner) in level:
                    leads |= reached[id(inner)]
            ends = _pins(holder, level, roots, namespaces, within=depth > 0)
            if ends is None:
                following[id(holder)] = holder
                reached.setdefault(id(holder), set()).update(leads)
                continue
            for inner, pin in ends:
                for number in reached[inner] if inner else leads:
                    found[number].add(pin)
        passed |= set(following)
        level = following
        passed.add(id(level))
        del here, around
    return [told(pins) for pins in found]


def told(pins: set[Pin]) -> list[Pin]:
    """What is held by a variable directly need not be said to be in it as well; what is in `Out`, not to be `_`."""
    direct = {(pin.kind, pin.name) for pin in pins if not pin.within}
    found = {pin for pin in pins if not pin.within or (pin.kind, pin.name) not in direct}
    numbered = {pin for pin in found if pin.kind == "out" and pin.name.startswith("Out[")}
    return sorted(pin for pin in found if pin.kind != "out" or pin in numbered or not numbered)


def _pins(
    holder: object,
    level: Mapping[int, object],
    roots: Roots,
    namespaces: Mapping[int, str],
    *,
    within: bool,
) -> list[tuple[int, Pin]] | None:
    """For what a holder stands, and for which object, 0 for all that it leads to; None if it is on the way only."""
    for namespace in roots.variables:
        if holder is namespace:
            names = [(name, value) for name, value in list(namespace.items()) if id(value) in level]
            return [(id(value), variable(name, within)) for name, value in names if value is not roots.out]
    if holder is roots.out:
        numbers = [(number, value) for number, value in list(roots.out.items()) if id(value) in level]
        return [(id(value), Pin("out", f"Out[{number}]", within)) for number, value in numbers]
    if id(holder) in roots.named:
        return [(0, roots.named[id(holder)])]
    if id(holder) in roots.tracebacks:
        return [(0, Pin("traceback", "a traceback"))]
    module = namespaces.get(id(holder))
    if module is not None:
        if module.partition(".")[0] == _OURS:
            return []
        assert isinstance(holder, dict)
        named = [(name, value) for name, value in list(holder.items()) if id(value) in level]
        return [(id(value), Pin("variable", f"{module}.{name}", within)) for name, value in named]
    # An agent refers to all that it owns, and each reference to its agent: that way leads from anything to anything.
    return [] if isinstance(holder, ModuleType | Agent | References) else None


def variable(name: str, within: bool = False) -> Pin:
    """For what a variable's name stands: `_`, `__`, `___` and `_12` are the shell's, for what cells gave."""
    if not name.strip("_") or (name.startswith("_") and name[1:].isdecimal()):
        number = name.strip("_")
        return Pin("out", f"Out[{number}]" if number else name, within)
    return Pin("variable", name, within)


def frames_of(errors: Iterable[BaseException | None]) -> dict[int, FrameType]:
    """The frames that errors keep, and those for which they were raised."""
    found: dict[int, FrameType] = {}
    stack = [error for error in errors if error is not None]
    seen = set[int]()
    while stack:
        error = stack.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        stack += [other for other in (error.__cause__, error.__context__) if other is not None]
        traceback: TracebackType | None = error.__traceback__
        while traceback is not None:
            found[id(traceback.tb_frame)] = traceback.tb_frame
            traceback = traceback.tb_next
    return found
