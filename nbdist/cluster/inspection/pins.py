"""Finds which names in this process hold an object, by walking back along the references to it.

Python's garbage collector knows which objects refer to an object. The walk ends at places that a user can act on: a
variable, an entry of `Out`, a traceback that is kept for the debugger. It goes through everything in between. It does
not find an object that only the variables of a running function hold: to read these variables would keep their values
alive.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import walk_tb
from types import FrameType, ModuleType
from typing import Any

import msgspec

from nbdist.rpc.agent import Agent
from nbdist.rpc.references.reference_table import References
from nbdist.rpc.references.rref import Home

_MOST_STEPS = 12
"""The most steps to walk back."""
_MOST_OBJECTS = 20_000
"""The walk stops when the next step would begin at more objects than this."""
_FEW_OBJECTS = 50
"""Up to this many objects, Python's search for referrers is quicker than a look at all objects."""
_OURS = "nbdist"
"""The package whose modules are not reported as holders."""


class Pin(msgspec.Struct, frozen=True, order=True):
    """One reason for which an object stays alive."""

    kind: str
    """``variable``, ``out``, ``traceback``, ``context`` or ``other``."""
    name: str
    """The variable, the entry of `Out`, or the reason in words."""
    within: bool = False
    """True if the object is somewhere inside what the name refers to."""

    path: str = ""
    """Where the object is in there, in words, if that is known."""

    def __str__(self) -> str:
        return self.path or (f"in {self.name}" if self.within else self.name)

    @property
    def idle(self) -> bool:
        """True if nobody will miss the object: it is kept only so that the user can look back."""
        return self.kind in ("out", "traceback")


@dataclass
class Roots:
    """The places at which walks end."""

    variables: Sequence[dict[str, Any]]
    """The user's namespaces."""
    out: dict[int, Any] = field(default_factory=dict)
    """The results of cells, by number."""
    named: Mapping[int, Pin] = field(default_factory=dict)
    """Pins for other objects that keep things alive, by the ``id`` of the object."""
    tracebacks: Mapping[int, FrameType] = field(default_factory=dict)
    """The frames of errors that are kept, by ``id``."""


def find(objects: Sequence[object], roots: Roots) -> list[list[Pin]]:
    """Return, for each object, the pins (names or other reasons) that keep it alive.

    Ends after `_MOST_STEPS` levels of holders, or before a level of more than `_MOST_OBJECTS` objects, so the list may
    be incomplete.
    """
    found: list[set[Pin]] = [set() for _ in objects]
    reached: dict[int, set[int]] = {}
    """The numbers of the searched objects that each object on the way leads to, by its ``id``."""
    level: dict[int, tuple[object, set[int]]] = {}
    """The objects to walk back from next, with the numbers of the searched objects that they lead to."""
    for number, each in enumerate(objects):
        reached.setdefault(id(each), set()).add(number)
        level[id(each)] = each, reached[id(each)]
    namespaces = {id(space): name_of(space) for space in map(namespace_of, list(sys.modules.values())) if space}
    # The search's own containers refer to the objects, too.
    passed = {id(each) for each in (reached, level, found, namespaces, objects, roots.named, roots.tracebacks)}
    passed |= {id(sys._getframe()), *(id(pair) for pair in level.values()), *map(id, objects)}
    for depth in range(_MOST_STEPS):
        if not level or len(level) > _MOST_OBJECTS:
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
    """Yield each object that refers to some of these, with the ``id`` of those it refers to."""
    is_few = len(objects) <= _FEW_OBJECTS
    for holder in gc.get_referrers(*objects.values()) if is_few else gc.get_objects():
        inner = {id(each) for each in gc.get_referents(holder) if id(each) in objects}
        if inner and holder is not objects:
            yield holder, inner


def told(pins: set[Pin]) -> list[Pin]:
    """Return the pins of an object that a user needs to see, sorted."""
    # A variable that holds the object itself is not said again to contain it. A pin that says where in a variable the
    # object is replaces one that does not.
    in_order = sorted(pins, key=lambda pin: (not pin.within, pin.path))
    found = set({(pin.kind, pin.name): pin for pin in in_order}.values())
    numbered = {pin for pin in found if pin.kind == "out" and pin.name.startswith("Out[")}
    # Beside an entry of `Out` or a traceback, `_` is left out.
    better = numbered or any(pin.kind == "traceback" for pin in found)
    return sorted(pin for pin in found if pin.kind != "out" or pin in numbered or not better)


def _pins(
    holder: object, inner: Collection[int], roots: Roots, namespaces: Mapping[int, str], *, within: bool
) -> tuple[list[tuple[int, Pin]], bool]:
    """Return the pins that a holder gives, and whether the search continues with what refers to the holder."""
    # Each pin comes with the ``id`` of the object that it holds, or 0 for all of ``inner``. ``within`` is true if these
    # only contain the object that is searched for.
    for namespace in roots.variables:
        if holder is namespace:
            names = _variables_among(namespace, inner)
            return [(id(value), variable(name, within)) for name, value in names if value is not roots.out], False
    if holder is roots.out:
        numbers = [(number, value) for number, value in list(roots.out.items()) if id(value) in inner]
        return [(id(value), Pin("out", f"Out[{number}]", within)) for number, value in numbers], False
    if id(holder) in roots.named:
        return [(0, roots.named[id(holder)])], False
    if id(holder) in roots.tracebacks:
        return [(0, Pin("traceback", "a traceback"))], True  # a variable of the user's may hold the error, too
    if (module := namespaces.get(id(holder))) is not None:
        assert type(holder) is dict
        if module.partition(".")[0] == _OURS:
            return [], False
        named = _variables_among(holder, inner)
        if module == "sys":  # which has the last error, for the debugger
            named = [(name, value) for name, value in named if not name.startswith("last_")]
        return [(id(value), Pin("variable", f"{module}.{name}", within)) for name, value in named], False
    # An agent refers to all that it owns, and each reference refers to its agent by its home: a walk through them would
    # lead from any value to any other.
    return [], not issubclass(type(holder), (ModuleType, Agent, References, Home))


def _variables_among(namespace: dict[str, Any], inner: Collection[int]) -> list[tuple[str, Any]]:
    """Return the variables of a namespace whose values are among these, given by ``id``."""
    return [(name, value) for name, value in list(namespace.items()) if id(value) in inner and type(name) is str]


def namespace_of(module: object) -> dict[str, Any]:
    """Return a module's variables; an empty dict for an object in `sys.modules` that is not a module."""
    return _namespace(module) if issubclass(type(module), ModuleType) else {}


def name_of(namespace: dict[str, Any]) -> str:
    """Return the name of the module with these variables; "" if it is not a plain text."""
    name = namespace.get("__name__")
    return name if type(name) is str else ""


_module: Any = ModuleType
_namespace: Callable[[Any], dict[str, Any]] = _module.__dict__["__dict__"].__get__


def variable(name: str, within: bool = False) -> Pin:
    """Return the `Pin` that names a variable; ``within`` says that the object is inside of the variable's value."""
    # `_`, `__`, `___` and `_12` are the shell's names for results of cells.
    if not name.strip("_") or (name.startswith("_") and name[1:].isdecimal()):
        number = name.strip("_")
        return Pin("out", f"Out[{number}]" if number else name, within)
    return Pin("variable", name, within)


def frames_of(errors: Iterable[BaseException | None]) -> dict[int, FrameType]:
    """Return the frames in the tracebacks of errors, and of the errors that led to them, by ``id``."""
    return {id(frame): frame for error in chain_of(errors) for frame, _ in walk_tb(_traceback(error))}


def chain_of(errors: Iterable[BaseException | None]) -> list[BaseException]:
    """Return errors, and the errors that led to them (``__cause__`` and ``__context__``), each once."""
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
