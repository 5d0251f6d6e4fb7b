"""Measures how far the clock of another worker is ahead of ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nbdist.wire.messages import Record

# The calls that measure the clock of another host. The fastest call counts.
_ROUND_TRIPS = 8


def clock() -> float:
    """Return this worker's monotonic time in seconds."""
    return time.monotonic()


def offset(me: Record, record: Record, ask: Callable[..., Any]) -> float:
    """Return the seconds by which the clock of ``record``'s worker is ahead of ours; 0 on one host."""
    if record.host == me.host:
        return 0.0
    found: list[tuple[float, float]] = []
    for _ in range(_ROUND_TRIPS):
        before = time.monotonic()
        there = ask(record.name, clock)
        after = time.monotonic()
        found.append((after - before, there - (before + after) / 2))
    return min(found)[1]  # the fastest round trip is the most exact
