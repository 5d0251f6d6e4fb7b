"""The functions that a pickled body refers to by name, in addition to those in `nbdist.wire.pickling.definitions`.

`nbdist.wire.pickling.unpickler` replaces the first three by functions that return objects of the message. Only plain
``pickle`` calls these three, which raise DecodeError. Renaming or moving a function here changes the bytes between
agents, and needs a new `nbdist.wire.messages.VERSION`.
"""

from __future__ import annotations

import functools
import io
from typing import Any

import torch

from nbdist.code_places import CELLS
from nbdist.errors import DecodeError


def tensor(index: int) -> Any:
    """Stand in a pickle for tensor number ``index`` of its message."""
    raise DecodeError("this pickle is part of a message of nbdist: only nbdist.wire.decoding.decode can load it")


def recorded(index: int) -> Any:
    """Stand in a pickle for recorded tensor number ``index``, sent in an autograd context."""
    return tensor(index)


def reference(index: int) -> Any:
    """Stand in a pickle for the reference of fork number ``index`` of its message."""
    return tensor(index)


def exception(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Return an error of class ``cls`` with these ``args`` and attributes (``state``)."""
    # Without its ``__init__``, which may take other arguments than ``args``.
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def cached(parameters: dict[str, Any], function: Any) -> Any:
    """Return a function with the decorator `functools.lru_cache`, with these parameters, and with an empty cache."""
    return functools.lru_cache(**parameters)(function)


def cached_property(function: Any, name: str | None) -> functools.cached_property[Any]:
    """Return a cached property of a class, where it has this name; None for a property that has none yet."""
    made = functools.cached_property(function)
    if name is not None:
        made.__set_name__(object, name)
    return made


def partialmethod(function: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> functools.partialmethod[Any]:
    """Return a method of a class that calls ``function`` with these arguments first."""
    return functools.partialmethod(function, *args, **keywords)


def cell_code(number: int, file: str, make: Any, arguments: tuple[Any, ...]) -> Any:
    """Make the code of a function that was typed in cell ``number`` of another process, and note that number."""
    CELLS[file] = number
    return make(*arguments)


def script(data: bytes) -> Any:
    """Return the module of TorchScript that ``torch.jit.save`` has written as ``data``."""
    return torch.jit.load(io.BytesIO(data))


def script_function(data: bytes) -> Any:
    """Return the function of TorchScript that ``torch.jit.save`` has written as ``data``."""
    return torch.jit.load(io.BytesIO(data)).forward
