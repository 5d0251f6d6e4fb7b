"""What ``__main__`` defines, and how to tell whether two processes define the same.

A script that every rank runs defines each function and class once per process, with the process's
own locks and globals; there a definition must travel by name. A notebook's definitions exist in one
process only; there they must travel by value. The sender cannot know which it is, so a reference to
``__main__`` carries a digest of the code, and a receiver that has no equal definition says so
(`MissingDefinition`), whereupon the sender repeats itself by value. No user function has run by then.

What counts is code: bytecode, constants, defaults, class attributes, bases in ``__main__``, and what a decorator
wrapped, which is in the function's closure. What runs may change is state, and does not count: globals, the contents
of lists, dicts and objects, and variables of a closure that the function itself assigns (``nonlocal``).
"""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import types
from typing import Any

from nbdist.errors import MissingDefinition
from nbdist.wire.names import MAIN_NAMES

__all__ = ["choose", "digest", "find_named", "find_own", "get_own", "name_and_digest", "own_name"]


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


def get_own(qualname: str, expected: str) -> Any:
    """Return this process's definition of that name; raise MissingDefinition unless its code is the same."""
    found = find_own(qualname, expected)
    if found is None:
        raise MissingDefinition(f"__main__ here has no {qualname!r} with the sender's code")
    return found


def name_and_digest(function: types.FunctionType) -> tuple[str, str] | None:
    """Return by what a call names a function at the top level of ``__main__``; None for any other function."""
    qualname = own_name(function)
    return None if qualname is None or "." in qualname else (qualname, digest(function))


def choose(qualname: str, expected: str, value: Any) -> Any:
    """Return this process's definition of that name if its code is the same, else ``value``."""
    return find_own(qualname, expected) or value


_MOST = 1024
_digests: dict[Any, str] = {}
"""The digests by everything that counts for them, as `_function` and `_class` return it."""


def digest(definition: Any) -> str:
    """Return a fingerprint of a function's or class's code that ignores where it was written.

    All that counts is looked at each time, so a change is always seen. What is cached is the slow part: the hash of
    the bytecode and of everything beside it, by these very things.
    """
    described = (
        _function(definition, set()) if isinstance(definition, types.FunctionType) else _class(definition, set())
    )
    found = _digests.get(described)
    if found is None:
        if len(_digests) >= _MOST:
            _digests.clear()
        text = repr(_in_full(described))
        found = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
        _digests[described] = found
    return found


def _in_full(described: Any) -> Any:
    """Return a description with what is in code objects in their place."""
    if isinstance(described, types.CodeType):
        return _code(described)
    return tuple(map(_in_full, described)) if isinstance(described, tuple) else described


_EXACT = frozenset({type(None), bool, int, str, bytes})
"""The types whose equal values have equal reprs, unlike 0.0 and -0.0."""


def _constant(value: Any) -> Any:
    """Return ``value`` in a form whose repr is the same in every process; what can be changed is state, not code."""
    if type(value) in _EXACT:
        return type(value).__name__, value
    if isinstance(value, types.CodeType):
        return _code(value)
    if isinstance(value, tuple):
        return type(value).__name__, *map(_constant, value)
    if isinstance(value, frozenset):
        return "frozenset", *sorted(repr(_constant(item)) for item in value)
    if isinstance(value, int | float | complex | str | bytes):
        return type(value).__name__, repr(value)
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
        tuple(map(_constant, code.co_consts)),
    )


@functools.lru_cache(maxsize=_MOST)
def _assigned_around(code: types.CodeType) -> frozenset[str]:
    """Return the variables of the closure that a function with this code assigns, or that an inner function does."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname in ("STORE_DEREF", "DELETE_DEREF")}
    inner = [_assigned_around(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(found.union(*inner).intersection(code.co_freevars))


def _function(function: types.FunctionType, seen: set[Any]) -> tuple[Any, ...]:
    if function in seen:
        return ("again", function.__qualname__)
    seen.add(function)
    cells: Any = ()
    if function.__closure__:
        state = _assigned_around(function.__code__)
        names = function.__code__.co_freevars
        cells = tuple(
            _content(cell, seen) for name, cell in zip(names, function.__closure__, strict=True) if name not in state
        )
    defaults, kwdefaults = function.__defaults__, function.__kwdefaults__
    return (
        "function",
        function.__qualname__,
        function.__code__,
        defaults and _constant(defaults),
        kwdefaults and tuple((name, _constant(value)) for name, value in kwdefaults.items()),
        cells,
    )


def _content(cell: types.CellType, seen: set[Any]) -> Any:
    try:
        return _member(cell.cell_contents, seen)
    except ValueError:
        return "empty"


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
    bases = tuple(
        _class(base, seen) if base.__module__ in MAIN_NAMES else (base.__module__, base.__qualname__)
        for base in cls.__bases__
    )
    members = tuple((name, _member(value, seen)) for name, value in sorted(vars(cls).items()) if name not in _IGNORED)
    return "class", cls.__qualname__, bases, members


def _member(value: Any, seen: set[Any]) -> Any:
    if isinstance(value, staticmethod | classmethod):
        return type(value).__name__, _member(value.__func__, seen)
    if isinstance(value, property):
        return "property", *(_member(part, seen) for part in (value.fget, value.fset, value.fdel))
    if isinstance(value, types.FunctionType):
        return _function(value, seen)
    if isinstance(value, type) and value.__module__ in MAIN_NAMES:
        return _class(value, seen)
    return _constant(value)
