"""Says where a worker was seen last, with how much memory, after the system has killed it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nbdist.amounts import size

KEPT = 30  # sightings of a worker: of a minute, while its cell is silent
_RECENT = 60.0
_GROWTH = 100_000_000  # bytes by which the memory must have grown to be told


class Sighting(NamedTuple):
    """Where a worker's main thread was at one moment."""

    at: float  # by `time.monotonic` in the notebook
    call: str  # as `Position.call`
    line: str  # as `Position.line`
    memory: int
    """Bytes that the process had in memory, shared ones included; 0 if it is not known."""


def say_last_seen(seen: Sequence[Sighting], now: float) -> str:
    """Return a line about the newest sighting, and the growth of memory before it; "" if none is recent."""
    recent = [each for each in seen if now - each.at <= _RECENT]
    if not recent:
        return ""
    first, last = recent[0], recent[-1]
    growth = last.memory - first.memory
    grown = f", {size(growth)} more than {last.at - first.at:.0f} s earlier" if growth >= _GROWTH else ""
    memory = f", with {size(last.memory)}{grown}" if last.memory else ""
    return f"it was seen last in {last.call}, {last.line}, {now - last.at:.0f} s before{memory}"
