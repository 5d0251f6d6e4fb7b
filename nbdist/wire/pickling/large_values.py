"""Warns about large values that travel with a function in every call: globals, closures, defaults, partials."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle.cloudpickle as cloudpickle
import torch

from nbdist.amounts import size
from nbdist.code_places import is_users
from nbdist.thread_frames import outwards
from nbdist.wire.pickling import names

_LARGE_BYTES = 1 << 20  # the size in bytes above which a value counts as large

# The name and id of each value that this module has warned about, and what tells whether it lives: its id may become
# that of another value. Of lists and the like, which have no weak references, that is not known.
_warned: dict[tuple[str, int], Callable[[], Any]] = {}


def warn_of_large_values(function: types.FunctionType | functools.partial[Any]) -> None:
    """Warn once about each value of more than 1 MB that travels with ``function``, in every call."""
    for what, name, value in _carried(function):
        nbytes = _size(value)
        if nbytes > _LARGE_BYTES and _warned.get((name, id(value)), lambda: None)() is None:
            try:
                _warned[name, id(value)] = weakref.ref(value)
            except TypeError:
                _warned[name, id(value)] = lambda: True
            frames = enumerate(outwards(sys._getframe()), 1)
            warnings.warn(
                f"{names.display_name(function)} uses the {what} {name!r} of {size(nbytes)}, which is sent "
                f"along with every call; pass an RRef to it, or let the worker define its own",
                stacklevel=next((level for level, frame in frames if is_users(frame.f_code.co_filename)), 1),
            )


def _carried(function: types.FunctionType | functools.partial[Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the values that travel with a function: the kind of each, its name and the value."""
    if isinstance(function, functools.partial):
        for number, value in enumerate(function.args):
            if _size(value) > _LARGE_BYTES:  # else its name is not needed, for which the signature is read
                yield "argument", _parameter(function.func, number), value
        yield from (("argument", name, value) for name, value in function.keywords.items())
        return
    code = function.__code__
    for name in cloudpickle._extract_code_globals(code):
        yield "global", name, function.__globals__.get(name)
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    # An empty cell: nothing is assigned to the variable yet.
    yield from (("captured variable", name, cell.cell_contents) for name, cell in cells if cell != types.CellType())
    own = zip(reversed(code.co_varnames[: code.co_argcount]), reversed(function.__defaults__ or ()), strict=False)
    for name, value in [*own, *(function.__kwdefaults__ or {}).items()]:
        yield "default argument", name, value


def _parameter(function: Any, number: int) -> str:
    with contextlib.suppress(Exception):  # a function of C; one of ``*args``; whatever a `__signature__` raises
        parameters = inspect.signature(function).parameters.values()
        return [each.name for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD][number]
    return f"args[{number}]"


def _size(value: Any, depth: int = 2) -> int:
    """Return roughly how many bytes a value takes when it is sent. Looks ``depth`` containers deep."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.layout is torch.strided else 0
    if isinstance(value, torch.nn.Module):
        return sum(parameter.nbytes for parameter in value.parameters())
    if isinstance(value, list | tuple | set | frozenset | dict) and depth:
        items = value.values() if isinstance(value, dict) else value
        return sys.getsizeof(value) + sum(_size(item, depth - 1) for item in items)
    if isinstance(value, types.ModuleType | types.FunctionType | type):  # they travel by name, or are small
        return 0
    nbytes = getattr(value, "nbytes", None)
    return nbytes if isinstance(nbytes, int) else sys.getsizeof(value, 0)
