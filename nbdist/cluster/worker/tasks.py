"""Runs the tasks of a `WorkerExecutor` on a worker, and measures when they start and end."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__nbdist_runs_tasks__ = True  # for `nbdist.rpc.calls.stopping` and `nbdist.views.timeline.wording`


def now() -> datetime.datetime:
    """Return the time in UTC, as an aware datetime."""
    return datetime.datetime.now(datetime.UTC)


def run(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, datetime.datetime, datetime.datetime]:
    """Call a function; return its value, and when the call started and completed by the worker's clock."""
    started = now()
    return function(*args, **kwargs), started, now()
