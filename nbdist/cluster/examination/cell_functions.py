"""Reads the functions and classes that cells have defined: a worker without the last cell has an older one."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType

from nbdist.code_places import is_of_cell, shown_name


def read_cell_functions() -> dict[str, str]:
    """Return the digest of the code, and the line, of each function and class that a cell of this process defined."""
    found = {}
    for name, value in list(vars(sys.modules["__main__"]).items()):
        if codes := list(_codes(value)):
            digest = hashlib.sha256(repr([_content(code) for code in codes]).encode()).hexdigest()
            found[name] = f"code {digest[:8]} of {shown_name(codes[0].co_filename)}:{codes[0].co_firstlineno}"
    return found


def _codes(value: object) -> Iterator[CodeType]:
    is_own = isinstance(value, type) and value.__module__ == "__main__"
    for member in vars(value).values() if is_own else (value,):
        # By type, and not by ``inspect.unwrap``, which asks any object for an attribute, and may call user code.
        inner = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        while isinstance(inner, FunctionType) and isinstance(wrapped := vars(inner).get("__wrapped__"), FunctionType):
            inner = wrapped
        if isinstance(inner, FunctionType) and is_of_cell(inner.__code__.co_filename):
            yield inner.__code__


def _content(value: object) -> object:
    """Return what decides what code does, or the text of a constant of it: not lines, or the order of a set."""
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, value.co_varnames, [_content(each) for each in value.co_consts]
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    return [_content(each) for each in value] if isinstance(value, tuple) else repr(value)
