"""Computes how much of a span of time is not covered by any of several intervals. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]
"""A start and an end, in seconds."""


def uncovered(span: Interval, intervals: Iterable[Interval]) -> float:
    """Return the seconds of a span that lie in none of the intervals. The intervals may overlap.

    >>> uncovered((0.0, 10.0), [(-1.0, 2.0), (1.0, 4.0), (6.0, 7.0)])
    5.0
    """
    at, end = span
    free = 0.0
    for begun, ended in sorted(intervals):
        if begun >= end:
            break
        free += max(0.0, begun - at)
        at = max(at, ended)
    return free + max(0.0, end - at)
