"""Decides which steps of a training loop are watched, so that watching takes a small part of the time. Pure.

Watching a backward pass takes time: for notes of lines, hooks on each node, norms, and a drawing. The cost is measured
by how much longer the watched step and the step after it took than the steps that were not watched::

    step       1  2  3  4  5  6  7  8  9  …
    watched    x              x
    pays       x  x           x  x             `_STEPS_SLOWED`: the watched one, and the one during which it is drawn
    others           x  x  x        x  x  x    their median is a step's time without watching
"""

from __future__ import annotations

import statistics
from collections import deque

_SECONDS_BETWEEN = 1.0  # two watched steps, at least
_COST_SHARE = 0.03  # of the time, which watching may take
_TIMES_KEPT = 16  # unwatched steps whose times are kept for the median
_TIMES_NEEDED = 3  # unwatched steps whose times must be known before another step is watched
_STEPS_SLOWED = 2  # the watched step, and the step during which it is drawn


class Pace:
    """Decides for each step whether it is watched. The caller passes the times, and holds a lock."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._looked: float | None = None  # when the last watched step began
        self._paying = 0
        self._paid = 0.0
        # Seconds of the steps that paid for the last two watched steps. The smaller counts, because the first may have
        # included a warm-up, and another one a pause.
        self._costs: deque[float] = deque(maxlen=2)
        self._others: deque[float] = deque(maxlen=_TIMES_KEPT)

    def begins(self, now: float) -> None:
        """Note that a step, watched or not, begins at ``now``, on a monotonic clock, and that the last one ends."""
        began, self._began = self._began, now
        if began is not None and self._paying:
            self._paid += now - began
            self._paying -= 1
            if not self._paying:
                self._costs.append(self._paid)
        elif began is not None:
            self._others.append(now - began)

    def is_due(self, now: float) -> bool:
        """Return whether to watch the step that begins at ``now``. A caller that watches the step calls `looks`."""
        if self._looked is None:
            return True
        if self._paying or len(self._others) < _TIMES_NEEDED:
            return False
        extra = 0.0
        if len(self._costs) == self._costs.maxlen:  # until then, nothing is known about the cost
            extra = min(self._costs) - _STEPS_SLOWED * statistics.median(self._others)
        return now - self._looked >= max(_SECONDS_BETWEEN, extra / _COST_SHARE)

    @property
    def typical(self) -> float:
        """The seconds of a step that is not watched; 0 if none is known."""
        return statistics.median(self._others) if self._others else 0.0

    def looks(self, now: float) -> None:
        """Note that the step that begins at ``now`` is watched."""
        self._looked, self._paying, self._paid = now, _STEPS_SLOWED, 0.0

    def disturbed(self) -> None:
        """Ignore the time of the step under way, and the cost of watching it: the user pauses, steps or resumes it."""
        self._began, self._paying = None, 0
