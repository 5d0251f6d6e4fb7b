"""By how much the clock of another worker is ahead of ours."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.rpc.agent import Agent
    from nbdist.wire.messages import Record

__all__ = ["offset"]

_ROUND_TRIPS = 8


def clock() -> float:
    """The time, by this worker's clock."""
    return time.monotonic()


def offset(agent: Agent, record: Record) -> float:
    """Seconds; 0 on one host, where all have the same clock, else by round trips, of which the fastest tells best."""
    if record.host == agent.me.host:
        return 0.0
    found: list[tuple[float, float]] = []
    for _ in range(_ROUND_TRIPS):
        before = time.monotonic()
        there = agent.caller.sync(record.name, clock, (), None, -1)
        after = time.monotonic()
        found.append((after - before, there - (before + after) / 2))
    return min(found)[1]
