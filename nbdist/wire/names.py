"""Functions and classes by reference: ``module:qualified.name`` and back.

``torch.add`` and its like carry no usable module name; they are looked for where torch keeps them.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any, NamedTuple

import torch

from nbdist.errors import DecodeError

__all__ = ["MAIN_NAMES", "Named", "describe", "display_name", "is_builtin", "name_of", "resolve"]

MAIN_NAMES = ("__main__", "__mp_main__")
"""The modules whose definitions may differ between workers."""

_PYTHON = (types.FunctionType, types.MethodType, type)
_TORCH_HOMES = (
    ("torch", torch),
    ("torch.nn.functional", torch.nn.functional),
    ("torch", torch.Tensor),
)


class Named(NamedTuple):
    """What has to be known of a function to call it elsewhere."""

    name: str | None
    """As by `name_of`."""
    label: str
    """As by `display_name`."""
    builtin: bool
    """As by `is_builtin`."""


_MOST = 1024
_described: dict[int, tuple[Any, dict[str, Any], str, Named]] = {}
"""By the function's id: itself, the namespace where it was found, the name it has there, and what is known of it."""


def describe(function: Any) -> Named:
    """What has to be known of ``function``; what was found out is remembered for as long as it is true."""
    if type(function) is types.FunctionType and function.__module__ in MAIN_NAMES:
        return Named(None, function.__qualname__ or function.__name__, False)
    entry = _described.get(id(function))
    if entry is not None and entry[0] is function and entry[1].get(entry[2]) is function:
        return entry[3]
    named = Named(name_of(function), display_name(function), is_builtin(function))
    if named.name is not None:
        module, _, qualname = named.name.partition(":")
        namespace = getattr(sys.modules.get(module), "__dict__", {})
        if namespace.get(qualname) is function:
            if len(_described) >= _MOST:
                _described.clear()
            _described[id(function)] = (function, namespace, qualname, named)
    return named


def name_of(function: Any) -> str | None:
    """How another process finds ``function``; None where it cannot, or where ``__main__`` decides."""
    if isinstance(function, types.BuiltinFunctionType):
        name = function.__name__
        if getattr(torch, name, None) is function:
            return f"torch:{name}"
    if isinstance(function, types.MethodType) and not isinstance(function.__self__, type):
        return None
    qualname = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if not isinstance(qualname, str) or "<" in qualname:
        return None
    module = getattr(function, "__module__", None)
    if module in MAIN_NAMES:
        return None
    if isinstance(module, str) and _walk(sys.modules.get(module), qualname) is function:
        return f"{module}:{qualname}"
    short = qualname.rpartition(".")[2]
    for home, namespace in _TORCH_HOMES:
        if getattr(namespace, short, None) is function:
            inner = f"Tensor.{short}" if namespace is torch.Tensor else short
            return f"{home}:{inner}"
    if isinstance(function, types.MethodType) and isinstance(module, str):
        found = _walk(sys.modules.get(module), qualname)
        if isinstance(found, types.MethodType) and found == function:
            return f"{module}:{qualname}"
    return None


def _walk(module: Any, qualname: str) -> Any:
    found = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


def resolve(name: str) -> Any:
    """The object that ``name_of`` named, imported if need be."""
    module_name, _, qualname = name.partition(":")
    module = sys.modules.get(module_name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        found = getattr(module, qualname, None)
        if found is not None:
            return found
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        failed = DecodeError(f"this worker cannot import {module_name!r}, where {qualname!r} should be: {error}")
        failed.lacks = f"{type(error).__name__}: {error}"
        raise failed from error
    for part in qualname.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            failed = DecodeError(
                f"this worker's module {module_name!r} has no {qualname!r}: the function or class must be "
                "defined on both sides"
            )
            failed.lacks = f"AttributeError: Can't get attribute {qualname!r} on {sys.modules[module_name]!r}"
            raise failed from None
    return found


def is_builtin(function: Any) -> bool:
    """Whether ``function`` is one of torch's operators, rather than somebody's Python."""
    return not isinstance(function, _PYTHON) and (getattr(torch, getattr(function, "__name__", ""), None) is function)


def display_name(function: Any) -> str:
    """A short name for messages to people."""
    name = None if is_builtin(function) else getattr(function, "__qualname__", None)
    name = name or getattr(function, "__name__", None)
    if isinstance(name, str):
        return name
    wrapped = getattr(function, "func", None)
    if wrapped is not None and wrapped is not function:
        return f"partial({display_name(wrapped)})"
    return type(function).__qualname__
