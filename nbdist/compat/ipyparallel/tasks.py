"""Runs one task of a view on a worker: the only code of a view that workers run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython import get_ipython

__all__ = ["Reference", "call", "call_each", "take_name"]


@dataclass(frozen=True)
class Reference:
    """Stands for a variable, or another expression, of the worker on which a task runs."""

    expression: str


def call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function; a `Reference` as the function or an argument is replaced by the value that it stands for."""
    return _found(function)(*map(_found, args), **{name: _found(value) for name, value in kwargs.items()})


def call_each(function: Any, rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Call a function, or what a `Reference` stands for, once for each row of arguments; return the values."""
    return [_found(function)(*row) for row in rows]


def take_name() -> None:
    """Have ``import ipyparallel`` mean nbdist's on a worker: modules of the notebook's folder may import it."""
    sys.modules.setdefault("ipyparallel", sys.modules["nbdist.compat.ipyparallel"])


def _found(value: Any) -> Any:
    shell: Any = get_ipython()
    return eval(value.expression, shell.user_global_ns, shell.user_ns) if isinstance(value, Reference) else value
