"""Names functions and classes for other processes as ``module:qualified.name``, and finds them by that name.

``torch.add`` and similar functions have no usable module name. They are looked up where torch has them.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any, NamedTuple

import torch

from nbdist.errors import DecodeError

MAIN_NAMES = ("__main__", "__mp_main__")  # the modules whose definitions may differ between workers

# The types of functions that are written in Python, and the type of classes.
_PYTHON = (types.FunctionType, types.MethodType, type)
# The namespaces in which torch's functions are looked for, each with the beginning of its functions' names.
_TORCH_HOMES = (("torch:", torch), ("torch.nn.functional:", torch.nn.functional), ("torch:Tensor.", torch.Tensor))


class Named(NamedTuple):
    """The facts about a function that a call needs."""

    name: str | None  # the result of `name_of`
    label: str  # the result of `display_name`


_NAMES_REMEMBERED = 1024  # the most functions that `describe` remembers
# The cache of `describe`, by the function's id: function, the namespace that has it, its name there, the facts.
_described: dict[int, tuple[Any, dict[str, Any], str, Named]] = {}


def describe(function: Any) -> Named:
    """Return the facts about ``function`` that a call needs, cached while its module still has the function."""
    # Such a function has no name for other processes: it travels with its digest (`nbdist.wire.pickling.definitions`).
    if type(function) is types.FunctionType and function.__module__ in MAIN_NAMES:
        return Named(None, function.__qualname__ or function.__name__)
    entry = _described.get(id(function))
    # The module may have another function under this name by now.
    if entry is not None and entry[0] is function and entry[1].get(entry[2]) is function:
        return entry[3]
    named = Named(name_of(function), display_name(function))
    if named.name is not None:
        module, _, qualname = named.name.partition(":")
        namespace = getattr(sys.modules.get(module), "__dict__", {})
        if namespace.get(qualname) is function:
            if len(_described) >= _NAMES_REMEMBERED:
                _described.clear()
            _described[id(function)] = (function, namespace, qualname, named)
    return named


def named_modules() -> set[str]:
    """Return the modules of the functions that calls of this process have named lately."""
    return {str(named.name).partition(":")[0] for _, _, _, named in list(_described.values())}


def name_of(function: Any) -> str | None:
    """Return the name by which another process finds ``function``; None if it cannot, or if ``__main__`` defines it."""
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
    # The name must lead to the same object here: decorators and assignments give functions names that others have.
    if isinstance(module, str) and _is_same(walk(sys.modules.get(module), qualname), function):
        return f"{module}:{qualname}"
    # The module name of an operator of torch is of no use.
    short = qualname.rpartition(".")[2]
    for home, namespace in _TORCH_HOMES:
        if getattr(namespace, short, None) is function:
            return home + short
    if isinstance(function, types.MethodType) and isinstance(module, str):
        # A class method: each lookup makes a new object, so compare with ==.
        found = walk(sys.modules.get(module), qualname)
        if isinstance(found, types.MethodType) and found == function:
            return f"{module}:{qualname}"
    return None


def _is_same(found: Any, function: Any) -> bool:
    # After IPython's autoreload, a function that was imported from the module is another object with the new code. As
    # one of a closure has cells of its own, it is not the same.
    if found is function or type(found) is not types.FunctionType or type(function) is not types.FunctionType:
        return found is function
    return found.__code__ is function.__code__ and not function.__closure__


def walk(module: Any, qualname: str) -> Any:
    """Return the object with a qualified name in a module, which may be None; None if there is none."""
    found = module
    for part in qualname.split("."):
        if (found := getattr(found, part, None)) is None:
            return None
    return found


def resolve(name: str) -> Any:
    """Return the object that `name_of` named; import its module if necessary. Raises DecodeError if there is none."""
    module_name, _, qualname = name.partition(":")
    module = sys.modules.get(module_name)
    # The usual case: the module is loaded, and the name has no dots.
    # A module that is still being imported may lack the name: then `import_module` waits until it is complete.
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        found = getattr(module, qualname, None)
        if found is not None:
            return found
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        failed = DecodeError(
            f"this worker cannot import {module_name!r}, where {qualname!r} should be: {error}; it must be "
            "importable here, too"
        )
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
    """Return whether ``function`` is one of torch's operators, rather than a Python function."""
    return not isinstance(function, _PYTHON) and (getattr(torch, getattr(function, "__name__", ""), None) is function)


def display_name(function: Any) -> str:
    """Return a short name of ``function`` for displays and messages."""
    name = None if is_builtin(function) else getattr(function, "__qualname__", None)
    name = name or getattr(function, "__name__", None)
    if isinstance(name, str):
        return name
    wrapped = getattr(function, "func", None)
    if wrapped is not None and wrapped is not function:
        return f"partial({display_name(wrapped)})"
    return type(function).__qualname__
