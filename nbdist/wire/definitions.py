"""What ``__main__`` defines, and how to tell whether two processes define the same.

A script that every rank runs defines each function and class once per process, with the process's
own locks and globals; there a definition must travel by name. A notebook's definitions exist in one
process only; there they must travel by value. The sender cannot know which it is, so a reference to
``__main__`` carries a digest of the code, and a receiver that has no equal definition says so
(`MissingDefinition`), whereupon the sender repeats itself by value. No user function has run by then.
"""

from __future__ import annotations

import hashlib
import sys
import types
import weakref
from typing import Any

from nbdist.wire.names import MAIN_NAMES

__all__ = ["digest", "find_named", "find_own", "own_name"]


def find_named(qualname: str) -> Any:
    """What this process's ``__main__`` has under that qualified name, or None."""
    for name in MAIN_NAMES:
        found: Any = sys.modules.get(name)
        for part in qualname.split("."):
            found = getattr(found, part, None)
            if found is None:
                break
        else:
            return found
    return None


def own_name(definition: Any) -> str | None:
    """The qualified name under which this process's ``__main__`` has ``definition``, if it does."""
    if getattr(definition, "__module__", None) not in MAIN_NAMES:
        return None
    qualname = getattr(definition, "__qualname__", "")
    if not qualname or "<" in qualname or find_named(qualname) is not definition:
        return None
    return str(qualname)


def find_own(qualname: str, expected: str) -> Any:
    """This process's definition of that name, if its code is the same; else None."""
    found = find_named(qualname)
    if isinstance(found, types.FunctionType | type) and digest(found) == expected:
        return found
    return None


_digests: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


def digest(definition: Any) -> str:
    """A fingerprint of a function's or class's code that ignores where it was written."""
    if isinstance(definition, types.FunctionType):
        version: list[Any] = [definition.__code__, id(definition.__defaults__), id(definition.__kwdefaults__)]
    else:
        version = [id(member) for member in vars(definition).values()]
    cached = _digests.get(definition)
    if cached is not None and cached[0] == version:
        return cached[1]
    seen: set[Any] = set()
    described = _function(definition, seen) if isinstance(definition, types.FunctionType) else _class(definition, seen)
    result = _hash(described)
    _digests[definition] = (version, result)
    return result


def _hash(description: Any) -> str:
    return hashlib.blake2b(repr(description).encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _constant(value: Any) -> Any:
    """``value`` in a form whose repr is the same in every process; what can be changed is state, not code."""
    if isinstance(value, types.CodeType):
        return _code(value)
    if isinstance(value, tuple):
        return type(value).__name__, [_constant(item) for item in value]
    if isinstance(value, frozenset):
        return "frozenset", sorted(repr(_constant(item)) for item in value)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value).__name__, value
    return "object", type(value).__module__, type(value).__qualname__


def _code(code: types.CodeType) -> tuple[Any, ...]:
    return (
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_flags,
        code.co_exceptiontable,  # two functions may differ in nothing but what their handlers cover
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        [_constant(constant) for constant in code.co_consts],
    )


def _function(function: types.FunctionType, seen: set[Any]) -> tuple[Any, ...]:
    if function in seen:
        return ("again", function.__qualname__)
    seen.add(function)
    cells = []
    for cell in function.__closure__ or ():  # what a decorator wrapped is part of the function
        try:
            cells.append(_member(cell.cell_contents, seen))
        except ValueError:
            cells.append("empty")
    return (
        "function",
        function.__qualname__,
        _code(function.__code__),
        _constant(function.__defaults__),
        [(name, _constant(value)) for name, value in (function.__kwdefaults__ or {}).items()],
        cells,
    )


_IGNORED = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__firstlineno__",
    "__static_attributes__",
    "__annotations__",
    "__annotations_cache__",
    "__slotnames__",  # put there by the first pickling of an instance
    "_abc_impl",
}


def _class(cls: type, seen: set[Any]) -> tuple[Any, ...]:
    if cls in seen:
        return ("again", cls.__qualname__)
    seen.add(cls)
    bases = [
        _class(base, seen) if base.__module__ in MAIN_NAMES else (base.__module__, base.__qualname__)
        for base in cls.__bases__
    ]
    members = [(name, _member(value, seen)) for name, value in sorted(vars(cls).items()) if name not in _IGNORED]
    return "class", cls.__qualname__, bases, members


def _member(value: Any, seen: set[Any]) -> Any:
    if isinstance(value, staticmethod | classmethod):
        return type(value).__name__, _member(value.__func__, seen)
    if isinstance(value, property):
        return "property", [_member(part, seen) for part in (value.fget, value.fset, value.fdel)]
    if isinstance(value, types.FunctionType):
        return _function(value, seen)
    if isinstance(value, type) and value.__module__ in MAIN_NAMES:
        return _class(value, seen)
    return _constant(value)
