"""By how much the clock of another worker is ahead of ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nbdist.wire.messages import Record

__all__ = ["offset"]

_ROUND_TRIPS = 8


def clock() -> float:
    """The time, by this worker's clock."""
    return time.monotonic()


def offset(me: Record, record: Record, ask: Callable[..., Any]) -> float:
    """Return the seconds by which the clock of ``record`` is ahead of ours.

    It is 0 on one host, where all have the same clock. Else it is found by round trips, of which the fastest tells
    best; ``ask`` is `nbdist.rpc.agent.Agent.ask`.
    """
    if record.host == me.host:
        return 0.0
    found: list[tuple[float, float]] = []
    for _ in range(_ROUND_TRIPS):
        before = time.monotonic()
        there = ask(record.name, clock)
        after = time.monotonic()
        found.append((after - before, there - (before + after) / 2))
    return min(found)[1]
