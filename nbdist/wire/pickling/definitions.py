"""Finds the functions and classes of ``__main__``, and tells whether two processes define the same.

If every rank runs the same script, each process has its own copy of each function and class, with its own locks and
globals. Then a definition must travel by name. The definitions of a notebook exist in one process only. Then they must
travel by value. The sender cannot know which case it is. So a reference to ``__main__`` carries a digest of the code. A
callee without an equal definition reports this (`MissingDefinition`) before it has run the function, and the caller
sends the call again with the definitions in it (`nbdist.rpc.calls.repeats`). Results and errors always carry the
definitions.

The digest covers code: bytecode, constants, defaults, class attributes, members of enums, bases in ``__main__``, and
the function that a decorator wrapped, which is in the closure or in the object that the decorator returned. Functions
and types of other modules count by their names. It does not cover state, because running the code may change it:
globals, the contents of lists, dicts and objects, and variables of a closure that the function itself assigns
(``nonlocal``).
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import sys
import types
import weakref
from typing import Any

import torch

from nbdist.errors import MissingDefinition
from nbdist.wire.pickling.names import MAIN_NAMES

# The type of functions with the decorator `functools.lru_cache` or `functools.cache`.
_CACHED: Any = type(functools.cache(lambda: None))
_FUNCTIONS = (types.FunctionType, _CACHED)

# The functions that `choose` returned because they came by value, each with its name, digest and attributes.
_origins: weakref.WeakKeyDictionary[Any, tuple[str, str, dict[str, Any]]] = weakref.WeakKeyDictionary()


def find_named(qualname: str) -> Any:
    """Return the object with a qualified name in this process's ``__main__``; None if there is none."""
    for name in MAIN_NAMES:  # in a process that `multiprocessing` has spawned, ``__mp_main__`` is the program's module
        found: Any = sys.modules.get(name)
        for part in qualname.split("."):  # not by `names.walk`: each call of a function of ``__main__`` comes here
            if (found := getattr(found, part, None)) is None:
                break
        else:
            return found
    return None


def own_name(definition: Any) -> str | None:
    """Return the qualified name under which this process's ``__main__`` has ``definition``; None if there is none."""
    if getattr(definition, "__module__", None) not in MAIN_NAMES:
        return None
    qualname = getattr(definition, "__qualname__", "")
    return str(qualname) if qualname and "<" not in qualname and find_named(qualname) is definition else None


def find_own(qualname: str, expected: str) -> Any:
    """Return the function or class that ``__main__`` here has under ``qualname``, if its digest is ``expected``."""
    found = find_named(qualname)
    return found if isinstance(found, (*_FUNCTIONS, type)) and digest(found) == expected else None


def get_own(qualname: str, expected: str) -> Any:
    """Return what ``__main__`` here has under ``qualname``; raise MissingDefinition unless its digest is ``expected``.

    The pickle of a function or class that is sent by name refers to this function.
    """
    if (found := find_own(qualname, expected)) is None:
        raise MissingDefinition(
            f"__main__ on this worker has no {qualname!r} with the same code as on the sender; "
            "call again to send it along"
        )
    return found


def name_and_digest(function: types.FunctionType) -> tuple[str, str] | None:
    """Return the name and digest of a top-level function of ``__main__``, for a call; None for other functions."""
    qualname = own_name(function)
    return None if qualname is None or "." in qualname else (qualname, digest(function))


def choose(qualname: str, expected: str, value: Any) -> Any:
    """Return what ``__main__`` here has under ``qualname`` if its digest is ``expected``, else ``value``.

    The pickle of a function or class that is sent by value refers to this function. So if both processes have the same
    class, an instance that travels has the receiver's own class.
    """
    if (own := find_own(qualname, expected)) is not None:
        return own
    if isinstance(value, _FUNCTIONS):
        _origins[value] = qualname, expected, dict(vars(value))
    return value


def origin(function: Any) -> tuple[str, str] | None:
    """Return the name and digest of an unchanged function that came by value, as its own process has it; else None."""
    if not isinstance(function, _FUNCTIONS) or (known := _origins.get(function)) is None:
        return None
    qualname, expected, attributes = known
    try:
        return (qualname, expected) if vars(function) == attributes and digest(function) == expected else None
    except Exception:  # an attribute's own ``__eq__``: whatever it raises, as a tensor's does, counts as a change
        return None


_DIGESTS_REMEMBERED = 1024  # the most entries of each cache in this module
# The digests by description, a tuple of everything that counts for them (`_function`, `_class`).
_digests: dict[Any, str] = {}


def digest(definition: Any) -> str:
    """Return a fingerprint of a function's or class's code that does not depend on where the code was written."""
    # Everything that counts is read each time, so a change is always noticed. Only the slow hashing is cached.
    described = (
        _function(definition, set()) if isinstance(definition, types.FunctionType) else _member(definition, set())
    )
    found = _digests.get(described)
    if found is None:
        if len(_digests) >= _DIGESTS_REMEMBERED:
            _digests.clear()
        text = repr(_in_full(described))
        found = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
        _digests[described] = found
    return found


def _in_full(described: Any) -> Any:
    """Return a description, as `_function` and `_class` make it, with every code object replaced by its contents."""
    if isinstance(described, types.CodeType):
        return _code(described)
    return tuple(map(_in_full, described)) if isinstance(described, tuple) else described


# An int with more bits is described in hexadecimal: Python refuses to make a decimal text of that length.
_LONGEST_INT = 10_000
# The types whose equal values have equal reprs, unlike 0.0 and -0.0.
_EXACT = frozenset({type(None), bool, int, str, bytes})


def is_cached(value: Any) -> bool:
    """Return whether ``value`` is a function with the decorator `functools.lru_cache` or `functools.cache`."""
    return isinstance(value, _CACHED)


def _constant(value: Any) -> Any:
    """Return ``value``, or what counts of it, in a form whose repr is the same in every process."""
    if type(value) is int and value.bit_length() > _LONGEST_INT:
        return "int", hex(value)
    if type(value) in _EXACT:
        return type(value).__name__, value
    if isinstance(value, types.CodeType):
        return _code(value)
    if isinstance(value, tuple):
        return type(value).__name__, *map(_constant, value)
    if isinstance(value, frozenset):
        # Sorted: the order of a set differs between processes.
        return "frozenset", *sorted(repr(_constant(item)) for item in value)
    if isinstance(value, int | float | complex | str | bytes):
        return type(value).__name__, repr(value)
    if isinstance(value, torch.dtype):
        return "torch", str(value)
    if isinstance(value, type | types.BuiltinFunctionType | types.FunctionType):
        return "named", str(value.__module__), value.__qualname__
    if isinstance(value, enum.Enum):
        return "enum", type(value).__module__, type(value).__qualname__, value.name
    return "object", type(value).__module__, type(value).__qualname__  # lists, dicts, objects: their contents are state


def _code(code: types.CodeType) -> tuple[Any, ...]:
    """Return the parts of a code object that count for the digest. Its file, its lines and its name do not count."""
    return (
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_flags,
        code.co_exceptiontable,  # two functions may differ only in the lines that their handlers cover
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        tuple(map(_constant, code.co_consts)),
    )


@functools.lru_cache(maxsize=_DIGESTS_REMEMBERED)
def _assigned_around(code: types.CodeType) -> frozenset[str]:
    """Return the names of the closure's variables to which a function with this code, or one inside it, assigns."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname in ("STORE_DEREF", "DELETE_DEREF")}
    inner = [_assigned_around(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(found.union(*inner).intersection(code.co_freevars))


def _function(function: types.FunctionType, seen: set[Any]) -> tuple[Any, ...]:
    """Return a description of a function by everything that counts for its digest, as a hashable tuple.

    ``seen`` has the functions and classes described so far. One that occurs again counts by its name only, so that
    recursion ends.
    """
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
    """Return a hashable description of the value of a closure's variable; ``"empty"`` if the variable has no value."""
    try:
        return _member(cell.cell_contents, seen)
    except ValueError:
        return "empty"


# Attributes of a class that are not code, or that Python adds by itself.
_IGNORED = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__firstlineno__",
    "__static_attributes__",
    "__annotations__",
    "__annotations_cache__",
    "__slotnames__",  # added when an instance is first pickled
    "_abc_impl",
}


def _class(cls: type, seen: set[Any]) -> tuple[Any, ...]:
    """Return a description of a class by everything that counts for its digest; ``seen`` is as in `_function`."""
    if cls in seen:
        return ("again", cls.__qualname__)
    seen.add(cls)
    bases = tuple(
        _class(base, seen) if base.__module__ in MAIN_NAMES else (base.__module__, base.__qualname__)
        for base in cls.__bases__
    )
    members = tuple((name, _member(value, seen)) for name, value in sorted(vars(cls).items()) if name not in _IGNORED)
    if isinstance(cls, enum.EnumType):
        of_enum: dict[str, Any] = dict(cls.__members__)
        members += tuple((name, _constant(member.value)) for name, member in of_enum.items())
    return "class", cls.__qualname__, bases, members


def _member(value: Any, seen: set[Any]) -> Any:
    """Return a hashable description of an attribute of a class, or of the value of a closure's variable."""
    if isinstance(value, staticmethod | classmethod):
        return type(value).__name__, _member(value.__func__, seen)
    if isinstance(value, property):
        return "property", *(_member(part, seen) for part in (value.fget, value.fset, value.fdel))
    if isinstance(value, functools.cached_property):
        return "cached_property", _member(value.func, seen)
    if isinstance(value, functools.partialmethod):
        named = tuple((name, _constant(argument)) for name, argument in value.keywords.items())
        return "partialmethod", _member(value.func, seen), *map(_constant, value.args), named
    if isinstance(value, functools.partial):
        return "partial", _member(value.func, seen)  # its arguments may be state, such as the rank
    if isinstance(value, _CACHED):
        return "cached", tuple(sorted(value.cache_parameters().items())), _member(value.__wrapped__, seen)
    if isinstance(value, types.FunctionType):
        return _function(value, seen)
    if isinstance(value, type) and value.__module__ in MAIN_NAMES:
        return _class(value, seen)
    return _constant(value)
