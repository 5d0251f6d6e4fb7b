"""Runs one task on a worker, and measures it: the only code of a view that workers run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython import get_ipython

__all__ = ["Reference", "run", "take_name"]


class Reference:
    """Stands for a variable, or another expression, of the worker on which a task runs."""

    def __init__(self, expression: str) -> None:
        self.expression = expression

    def __repr__(self) -> str:
        return f"Reference({self.expression!r})"


def run(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], each: bool) -> tuple[Any, float, float]:
    """Call a function with its arguments; return its value, and when it began and ended (seconds since 1970).

    With ``each`` the arguments are sequences, and the function is called for each tuple of their items. A `Reference`
    becomes the value that it stands for.
    """
    function, args = _found(function), [_found(arg) for arg in args]
    kwargs = {name: _found(value) for name, value in kwargs.items()}
    began = time.time()
    value = [function(*items, **kwargs) for items in zip(*args, strict=False)] if each else function(*args, **kwargs)
    return value, began, time.time()


def take_name() -> None:
    """Have ``import ipyparallel`` mean nbdist's on a worker: modules of the notebook's folder may import it."""
    sys.modules.setdefault("ipyparallel", sys.modules["nbdist.compat.ipyparallel"])


def _found(value: Any) -> Any | Callable[..., Any]:
    if not isinstance(value, Reference):
        return value
    shell: Any = get_ipython()
    return eval(value.expression, shell.user_global_ns, shell.user_ns)
