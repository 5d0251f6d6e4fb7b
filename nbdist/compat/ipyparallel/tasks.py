"""Runs one task of a view on a worker. Workers run no other code of the views."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython import get_ipython

__nbdist_runs_tasks__ = True  # for `nbdist.rpc.calls.stopping` and `nbdist.views.timeline.wording`


@dataclass(frozen=True)
class Reference:
    """Stands for a variable of the worker on which a task runs, or for another expression there."""

    expression: str
    """The expression, evaluated among the worker's variables when the task runs."""


def call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function and return its value. A `Reference`, as the function or an argument, is evaluated first."""
    # On the worker. Its errors become errors of the task.
    return _resolved(function)(*map(_resolved, args), **{name: _resolved(value) for name, value in kwargs.items()})


def call_each(function: Any, rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Call a function, which may be a `Reference`, once for each row of arguments; return the values."""
    # On the worker. The first error ends it, and becomes the error of the task.
    return [_resolved(function)(*row) for row in rows]


def take_name() -> None:
    """Make ``import ipyparallel`` import nbdist's substitute on this worker, for the user's modules that import it."""
    # Not if the worker has imported ipyparallel itself.
    sys.modules.setdefault("ipyparallel", sys.modules["nbdist.compat.ipyparallel"])


def _resolved(value: Any) -> Any:
    """Evaluate a `Reference` among this worker's variables; return any other value unchanged."""
    shell: Any = get_ipython()
    return eval(value.expression, shell.user_global_ns, shell.user_ns) if isinstance(value, Reference) else value
