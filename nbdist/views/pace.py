"""How often one of many steps is looked at: so seldom that looking takes a small part of the time.

To look at a backward pass costs what it costs: notes of lines, hooks on each node, norms, a drawing. That is known once
it has been done, from how much longer the step took, and the one after it, than those at which nobody looked. Pure.
"""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["Pace"]

_LEAST = 1.0
"""Seconds between two looks, at least."""
_SHARE = 0.03
_KEPT = 16
_KNOWN = 3
"""So many steps at which nobody looks must be known to say what a look has cost."""
_PAYS = 2
"""So many steps pay for a look: the one that is looked at, and that during which it is drawn."""


class Pace:
    """Decides for each step whether it is looked at."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._looked = float("-inf")
        self._paying = 0
        self._paid = 0.0
        self._costs: deque[float] = deque(maxlen=2)
        """Of the last two looks; the smaller is believed: the first may have warmed up, another met with a pause."""
        self._others: deque[float] = deque(maxlen=_KEPT)
        self._looks = 0

    def begins(self, now: float) -> None:
        """A step begins; so the one before is over."""
        began, self._began = self._began, now
        if began is not None:
            self._took(now - began)

    def _took(self, seconds: float) -> None:
        if not self._paying:
            self._others.append(seconds)
            return
        self._paid += seconds
        self._paying -= 1
        if not self._paying:
            self._costs.append(self._paid)

    def is_due(self, now: float) -> bool:
        """Whether the step that begins is to be looked at."""
        if not self._looks:
            return True
        if self._paying or len(self._others) < _KNOWN:
            return False
        extra = 0.0
        if len(self._costs) == self._costs.maxlen:
            extra = min(self._costs) - _PAYS * statistics.median(self._others)
        return now - self._looked >= max(_LEAST, extra / _SHARE)

    def looks(self, now: float) -> None:
        """It is."""
        self._looks += 1
        self._looked, self._paying, self._paid = now, _PAYS, 0.0

    def disturbed(self) -> None:
        """Somebody holds it up, or lets it go on: how long it takes says nothing."""
        self._began, self._paying = None, 0
