"""Warns about large globals that travel with a function in every call."""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import cloudpickle.cloudpickle as cloudpickle
import torch

from nbdist.amounts import size
from nbdist.wire.pickling import names

_LARGE_BYTES = 1 << 20  # the size in bytes above which a global counts as large

_warned: set[tuple[str, int]] = set()  # the name and id of each global that this module has warned about


def warn_of_large_globals(function: types.FunctionType) -> None:
    """Warn once about each global of more than 1 MB that travels by value with ``function``, in every call."""
    for name in cloudpickle._extract_code_globals(function.__code__):
        value = function.__globals__.get(name)
        nbytes = _size(value)
        if nbytes > _LARGE_BYTES and (name, id(value)) not in _warned:
            _warned.add((name, id(value)))
            warnings.warn(
                f"{names.display_name(function)} uses the global {name!r} of {size(nbytes)}, which is sent "
                f"along with every call; pass an RRef to it, or let the worker define its own",
                stacklevel=2,
            )


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
