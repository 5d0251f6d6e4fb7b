"""Reads the functions and classes that cells have defined: a worker without the last cell has an older one."""

from __future__ import annotations

import hashlib
import inspect
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
    members = [value]
    if isinstance(value, type) and value.__module__ == "__main__":
        members = [getattr(each, "__func__", each) for each in vars(value).values()]
    for member in members:
        inner = inspect.unwrap(member) if callable(member) else member
        if isinstance(inner, FunctionType) and is_of_cell(inner.__code__.co_filename):
            yield inner.__code__


def _content(code: CodeType) -> object:
    """Return what decides what code does: not its lines."""
    constants = [_content(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, constants
