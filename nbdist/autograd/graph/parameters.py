"""Finds the names of leaves: `fc1.weight` for a parameter of a module, `x` for a tensor that a cell named.

Nothing is registered while programs run. When a graph is shown, the modules of this process are looked up once among
all objects that Python's garbage collector knows, and each parameter's name is remembered as long as the parameter
lives. So the first look at a model costs one scan (0.2 s for a million objects), and later looks cost one dictionary
look-up for each leaf. No code of the user's is called: modules are read through the dictionaries in which
`torch.nn.Module` keeps its children and parameters, and classes through `type`.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from nbdist.rpc.references.inert import mro

_PARTS: Any = torch.nn.Module.__dict__["__dict__"]  # reads an instance's dictionary, whatever its class defines


class ParameterName(NamedTuple):
    """The name of a leaf."""

    label: str  # the dotted path within the outermost module, `fc1.weight`; or the name of a variable of `__main__`
    module: str | None = None  # that holds it, by its path from the class of the outermost one, `Net.fc1`


class _Known(NamedTuple):
    """The name of one parameter, with weak references by which `_is_known` checks it."""

    parameter: weakref.ref[torch.Tensor]
    root: weakref.ref[torch.nn.Module] | None  # the outermost module; None for a parameter that no module holds
    path: tuple[str, ...]  # the names of the modules below the outermost one, and the parameter's own name


_CHUNK = 20_000  # objects to scan before other threads get their turn
_known: dict[int, _Known] = {}  # by `id`, because ``==`` of parameters compares elements: they cannot be keys
_lock = threading.Lock()


def names_of(leaves: Iterable[torch.Tensor]) -> dict[int, ParameterName]:
    """Return the names of these leaves by their `id`, without the leaves that have none."""
    leaves = list(leaves)
    # Not by `issubclass`, which would call the code of a user's metaclass (test_no_code_of_the_users_is_called).
    parameters = [leaf for leaf in leaves if torch.nn.Parameter in mro(type(leaf))]
    found = {}
    with _lock:
        if not all(_is_known(parameter) for parameter in parameters):
            _scan(parameters)
        for parameter in parameters:
            known = _known[id(parameter)]
            if known.root is not None and (root := known.root()) is not None:
                holder = ".".join((type(root).__name__, *known.path[:-1]))
                found[id(parameter)] = ParameterName(".".join(known.path), holder)
    variables = _variables()
    return {id(leaf): ParameterName(variables[id(leaf)]) for leaf in leaves if id(leaf) in variables} | found


def root_of(parameter: torch.Tensor) -> Any:
    """Return the outermost module that holds a parameter, if `names_of` has named it and that is still so; or None."""
    known = _known.get(id(parameter))
    return known.root() if known is not None and known.root is not None and _is_known(parameter) else None


def _is_known(parameter: torch.Tensor) -> bool:
    """Return whether the name of a parameter is known, and its module still has the parameter in that place."""
    known = _known.get(id(parameter))
    if known is None or known.parameter() is not parameter:  # perhaps of a dead parameter, whose `id` is used again
        return False
    if known.root is None:
        return True
    module: Any = known.root()
    for name in known.path[:-1]:
        module = _part(module, "_modules").get(name)
    return _part(module, "_parameters").get(known.path[-1]) is parameter


def _part(module: Any, name: str) -> dict[str, Any]:
    """Return a copy of a module's ``_modules`` or ``_parameters``; empty for no module, or if that is no usual dict."""
    if torch.nn.Module not in mro(type(module)):
        return {}
    found = _PARTS.__get__(module).get(name)
    return dict(found) if type(found) in _PART_TYPES else {}  # a copy, because other threads may change the original


_PART_TYPES = (dict, type(torch.nn.Module()._modules))  # in which torch keeps the parts of a module


def _scan(parameters: Iterable[torch.Tensor]) -> None:
    """Find the modules of this process, and remember what they call these parameters; the lock is held."""
    modules = list({id(module): module for module in instances(torch.nn.Module)}.values())
    inner = {id(child) for module in modules for child in _part(module, "_modules").values()}
    wanted = {id(parameter): parameter for parameter in parameters}
    found: dict[int, tuple[tuple[int, str, tuple[str, ...]], _Known]] = {}
    for root in modules:
        if id(root) in inner:
            continue
        held = [
            ((*path, name), parameter)
            for path, module in walk(root)
            for name, parameter in _part(module, "_parameters").items()
        ]
        for path, parameter in held:
            key = id(parameter)
            if key in wanted:
                # If several modules hold it, the largest one names it; the class and path break a tie.
                rank = (-len(held), type(root).__name__, path)
                if key not in found or rank < found[key][0]:
                    found[key] = rank, _Known(weakref.ref(wanted[key]), weakref.ref(root), path)
    for dead in [key for key, known in _known.items() if known.parameter() is None]:
        del _known[dead]
    for key, parameter in wanted.items():  # a parameter that no module has is noted too, or each look would scan again
        _known[key] = found[key][1] if key in found else _Known(weakref.ref(parameter), None, ())


def instances(kind: type) -> Iterator[Any]:
    """Yield every object of a kind that the garbage collector or an imported file has; some twice."""
    kinds = {id(each) for each in _subclasses(kind)}  # by `id`, because a metaclass may define ``==``
    everything = gc.get_objects()
    # In chunks, between which other threads run, and without bytecode for each object, which takes half the time.
    for start in range(0, len(everything), _CHUNK):
        chunk = everything[start : start + _CHUNK]
        yield from itertools.compress(chunk, map(kinds.__contains__, map(id, map(type, chunk))))
    # The collector does not list frozen objects (`gc.freeze`), as those of files that a worker imports with --preload.
    for file in list(sys.modules.values()):
        if type(file) is types.ModuleType:
            values = list(vars(file).values())
            yield from itertools.compress(values, map(kinds.__contains__, map(id, map(type, values))))


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = type.__subclasses__(kind)  # by way of `type`, whatever a metaclass defines
    for each in below:
        yield from _subclasses(each)


def walk(root: torch.nn.Module) -> Iterator[tuple[tuple[str, ...], torch.nn.Module]]:
    """Yield a module and all modules below it, each once, with its path from the first."""
    # Not `named_modules`, which a class may override.
    seen = set[int]()
    stack: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while stack:
        path, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        stack += [((*path, name), child) for name, child in reversed(_part(module, "_modules").items())]


def _variables() -> dict[int, str]:
    """Return the names of the variables of `__main__` by the `id` of their values, without IPython's ``_`` and such."""
    there = list(vars(sys.modules["__main__"]).items())  # other threads may add some meanwhile
    # Reversed, so that of several names of one value the first stays.
    return {id(value): name for name, value in reversed(there) if not name.startswith("_")}
