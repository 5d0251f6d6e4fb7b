"""Finds the part of a value that cannot be pickled, and names the way to it: ``args[0]['lock'] is a lock``.

Used only after pickling has failed. Each part is pickled by itself, so this may take as long as many attempts.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import types
from collections.abc import Iterator
from typing import Any

import cloudpickle
import torch

from nbdist.code_places import CELLS

_DEEPEST = 20  # the most steps down into a value
_MOST_PARTS = 10_000  # the most items of a list, tuple or dict that are tried

# The reason for a value that holds a process group, such as a module wrapped by DistributedDataParallel or FSDP2.
HOLDS_GROUP = (
    "it holds a process group, which only its own process can use. Send the module's state_dict(); of a DTensor in it, "
    "to_local(), or full_tensor(), which all workers of its mesh must call"
)

# Words for the types of objects that often cannot be pickled.
_KINDS = {"lock": "a lock", "RLock": "a lock", "generator": "a generator", "frame": "a frame", "socket": "a socket"}


class _Trial(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
    """Pickles a value and drops the result, to test whether that works. Tensors and storages count as picklable."""

    def persistent_id(self, obj: Any) -> Any:
        """Return a text for a tensor or storage, which the codec carries, so that pickle skips it; else None."""
        return "tensor" if isinstance(obj, torch.Tensor | torch.storage.UntypedStorage) else None


class _Nowhere(io.RawIOBase):
    """A file that drops what is written to it."""

    def write(self, data: Any) -> int:
        """Drop the data; return its length, as if it had been written."""
        return len(data)


def of_call(body: tuple[Any, Any, Any]) -> str:
    """Return which part of a call (function or name, args, kwargs) cannot be pickled, for the user; else ""."""
    function, args, kwargs = body
    if not isinstance(function, str) and _failure(function) is not None:
        return _follow(function, str(getattr(function, "__qualname__", "the function")).rpartition(".")[2])
    parts = [(f"args[{number}]", value) for number, value in enumerate(args)] + list(kwargs.items())
    return next((_follow(value, path) for path, value in parts if _failure(value) is not None), "")


def reason(error: BaseException | None) -> str:
    """Return why a value cannot be pickled, from pickle's error; for a process group, also what to send instead."""
    text = str(error)
    return HOLDS_GROUP if "_distributed_c10d." in text and "ProcessGroup" in text else text


def of_value(value: Any, name: str) -> str:
    """Return which part of a value with that name cannot be pickled, for the user; an empty text if none is found."""
    return "" if _failure(value) is None else _follow(value, name)


def _failure(value: Any) -> Exception | None:
    """Return the error with which pickling a value fails, apart from its tensors; None if it can be pickled."""
    try:
        _Trial(_Nowhere(), 5).dump(value)
    except Exception as error:  # the user's reducers, or a library's: whatever they raise is the answer
        return error
    return None


def _follow(value: Any, path: str) -> str:
    """Name the innermost part of a value that cannot be pickled, and the way to it from the value's ``path``."""
    by = ""
    for _ in range(_DEEPEST):
        if isinstance(value, types.MethodType):
            value, path = value.__self__, f"{path}.__self__"
        if not isinstance(value, types.FunctionType | dict | list | tuple) and reason(_failure(value)) == HOLDS_GROUP:
            break  # the user knows the module; the way to its group goes through torch's own attributes
        worse = next((part for part in _parts(value) if _failure(part[1]) is not None), None)
        if worse is None:
            break
        # The reader knows the last function on the way better than a path through its globals.
        if isinstance(value, types.FunctionType):
            by = f", used by `{value.__qualname__.rpartition('.')[2]}`{_cell_of(value)},"
            path = ""
        step, value = worse
        path += step
    return f"`{path}`{by} is {_kind(value)}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with the text that leads to it when appended to the value's name."""
    if isinstance(value, types.FunctionType):  # its parts are its closure's variables, and the globals that it names
        code = value.__code__
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # the cell is empty
                yield name, cell.cell_contents
        for name in code.co_names:
            if name in value.__globals__:
                yield name, value.__globals__[name]
    elif isinstance(value, dict):
        for key, item in itertools.islice(value.items(), _MOST_PARTS):
            yield f"[{key!r}]", item
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value[:_MOST_PARTS]):
            yield f"[{number}]", item
    else:
        fields = getattr(value, "__dict__", None)
        if isinstance(fields, dict) and not isinstance(value, type | types.ModuleType):
            for name, item in fields.items():
                yield f".{name}", item


def _cell_of(function: types.FunctionType) -> str:
    """Return the cell in which a function was typed, as " of cell 22"; an empty text for functions from files."""
    number = CELLS.get(function.__code__.co_filename)
    return f" of cell {number}" if number else ""


def _kind(value: Any) -> str:
    """Return a value's type with an article, as in "a lock"."""
    name = type(value).__name__
    return _KINDS.get(name) or f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
