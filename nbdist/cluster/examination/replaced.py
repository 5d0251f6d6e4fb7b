"""Finds the functions of torch that somebody has replaced, by the files of the functions that stand in torch's modules.

Looks at torch's public modules and their classes, and at torch's objects among the user's variables, such as an
optimizer whose ``step`` was replaced. A replacement from a file of torch, nbdist or Python is not told, and neither is
one that has no Python code.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from nbdist.code_places import is_nbdists, is_pythons, is_torchs, shown_name

# Files of code that has no file, and of packages whose functions torch itself imports into its modules.
_EXPECTED = re.compile(
    r"^[^/]|/(filelock|fsspec|jinja2|networkx|numpy|opt_einsum|optree|setuptools|sympy|tabulate|tensorboard|torchgen|tqdm|"
    r"triton|typing_extensions)[/.]"
)
# The attribute of a wrapper that has the wrapped function.
_INSIDE: dict[type, str] = {
    **dict.fromkeys((FunctionType, staticmethod, classmethod, type(functools.cache(len))), "__wrapped__"),
    **{MethodType: "__func__", property: "fget", functools.partial: "func"},
}


def replaced_functions() -> dict[str, str]:
    """Return the place of each function that somebody has put in place of torch's, by the path of torch's."""
    return {path: place for path, value in [*_of_modules(), *_of_variables()] if (place := _foreign_place(value))}


def _of_modules() -> Iterator[tuple[str, Any]]:
    """Yield the values in torch's public modules, and the attributes of the classes there, with their paths."""
    for home, module in list(sys.modules.items()):
        for name, value in list(vars(module).items()) if re.match(r"torch(\.[^_]\w*)*$", home) else ():
            yield f"{home}.{name}", value
            if issubclass(type(value), type) and value.__module__ == home:
                yield from ((f"{home}.{name}.{own}", each) for own, each in list(vars(value).items()))


def _of_variables() -> Iterator[tuple[str, Any]]:
    """Yield what hides a method of torch in an object that a variable of ``__main__`` names, with its path."""
    for name, value in list(vars(sys.modules["__main__"]).items()):
        for attribute, own in list(getattr(value, "__dict__", {}).items()) if not name.startswith("_") else ():
            hidden = getattr(type(value), attribute, None)
            if type(hidden) is FunctionType and is_torchs(hidden.__code__.co_filename):
                yield f"{name}.{attribute}", own


def _foreign_place(value: Any) -> str:
    """Return the name and the place of a function or class that is of no file of torch's; else ''."""
    # Never ``value.__class__``: some of torch's objects answer with code of their own.
    if issubclass(type(value), type):  # by its own methods: a class of torch may have those of another package, too
        value = next((each for each in vars(value).values() if type(each) is FunctionType), None)
    while inside := _INSIDE.get(kind := type(value)):
        if kind is FunctionType and _is_foreign(file := value.__code__.co_filename):
            shown = file.rpartition("-packages/")[2] if "-packages/" in file else shown_name(file)
            return f"{value.__code__.co_qualname}, {shown}:{value.__code__.co_firstlineno}"
        value = getattr(value, inside, None)
    return ""


def _is_foreign(file: str) -> bool:
    return not (is_torchs(file) or is_nbdists(file) or is_pythons(file) or _EXPECTED.search(file))
