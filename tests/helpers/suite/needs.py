"""Finds out what each test needs: a thread, other processes, a page. `conftest` marks the tests with it.

Nobody marks tests by hand. A test needs what its code names, or what is named by the fixtures, functions and classes of
the tests that it uses. `make quick` runs the tests that need one process, and refuses to start another, so a test that
this overlooks fails there.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

TESTS = f"{Path(__file__).parents[2]}/"

PAGE = {"sync_playwright", "browser"}
"""What opens a page in a browser: a function, and a module of the tests."""
PROCESSES = {"subprocess", "multiprocessing", "pty", "ray"}
"""Modules that start processes."""
STARTERS = {
    *("Cluster", "JoinLauncher", "Keeper", "LocalLauncher", "OpenLocalLauncher", "Processes", "RayLauncher", "Zygote"),
    *("KernelManager", "execute_notebook", "fork", "forkpty", "posix_spawn", "system"),
    *("Contestant", "run_cells", "SHARED_CLUSTER"),
}
"""Names that start processes: of nbdist, of Jupyter and Python, of scripts beside the tests."""
THREADS = {"threading", "World", "Endpoint"}

KINDS = ("page", "processes", "threads", "pure")
"""What a test may need, from much to little; each test has one of these marks."""


def names_of(*parts: Any) -> set[str]:
    """Return all names that a test uses: ``parts`` are its function, those of its fixtures, and its class."""
    return set[str]().union(*map(_named, parts))


def need_of(names: set[str]) -> str:
    """Return the one of `KINDS` that a test needs which uses these names."""
    if names & PAGE:
        return "page"
    if names & (PROCESSES | STARTERS):
        return "processes"
    return "threads" if names & THREADS else "pure"


def _named(start: Any) -> set[str]:
    """Return all names that the code of an object uses, and that of the tests' own objects that it uses."""
    found: set[str] = set()
    seen: set[int] = set()
    waiting = [start]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        names, used = _uses(one)
        found |= names
        waiting += used
    return found


@cache
def _uses(one: Any) -> tuple[frozenset[str], tuple[Any, ...]]:
    """Return the names in an object's own code, and the tests' objects to which they refer."""
    names: set[str] = set()
    used: list[Any] = []
    for code, scope in _codes(one):
        for name in (*code.co_names, *code.co_freevars):
            names.add(name)
            value = scope.get(name)
            if isinstance(value, types.ModuleType):
                names.add(_name_of(value.__name__))
                if _is_tests(value):
                    used += [getattr(value, each) for each in code.co_names if hasattr(value, each)]
            elif isinstance(value, type | types.FunctionType):
                names.add(_name_of(value.__module__))
                if _is_tests(value):
                    used.append(value)
    return frozenset(names), tuple(each for each in used if isinstance(each, type | types.FunctionType))


def _codes(one: Any) -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
    """Yield the code of a function, with the functions in it, or of all methods of a class, each with its globals."""
    if isinstance(one, type):
        for base in type.mro(one):  # a class of the tests may refuse `__mro__`
            if _is_tests(base):
                for value in vars(base).values():
                    yield from _codes(inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None)
        return
    one = inspect.unwrap(one) if callable(one) else one
    if isinstance(one, types.FunctionType):
        waiting = [one.__code__]
        while waiting:
            code = waiting.pop()
            yield code, one.__globals__
            waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]


def _name_of(module: str) -> str:
    """Return the last part of the name of a module in `helpers`, and the first of any other."""
    return module.rpartition(".")[2] if module.startswith("helpers.") else module.partition(".")[0]


def _is_tests(value: Any) -> bool:
    """Return whether a module, class or function belongs to the tests."""
    try:
        return inspect.getfile(inspect.unwrap(value)).startswith(TESTS)
    except (TypeError, OSError):
        return False
