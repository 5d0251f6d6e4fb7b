"""Decides whether a thread that waits for a message looks for it again and again at first, instead of sleeping at once.

To wake a thread that sleeps takes 5 to 50 µs, the most in virtual machines, and costs the side that wakes it time as
well. Where messages follow each other as quickly as a call and its answer, it is cheaper not to sleep, also in CPU
time. So a wait begins with a look of `MOST` seconds if the one before was short. Where that look is in vain several
times in a row, because the other side has no core of its own, a few waits go by without one. A long wait costs one look
at most. Pure.
"""

from __future__ import annotations

__all__ = ["MOST", "Spinning"]

MOST = 150e-6
"""Seconds for which a thread looks before it sleeps: more than most calls of a quick function take."""

_SHORT = 4 * MOST
"""A look is worth while after a wait of so many seconds at most: two threads that sleep take longer than `MOST`."""

_TOLERATED = 2
"""The number of looks in vain in a row after which a thread still looks: the machine may have been busy for once."""

_REST_MOST = 8
"""The number of waits that begin with sleep, at most, before a look is tried again."""


class Spinning:
    """Decides, from how long earlier waits took, whether the next one begins with a look."""

    def __init__(self) -> None:
        self.is_worth_while = False
        """Whether the thread that waits next should look for `MOST` seconds before it sleeps."""
        self._in_vain = 0
        self._rest = 0

    def waited(self, seconds: float, looked: bool) -> None:
        """Note how long a wait took, and whether it began with a look."""
        if looked:
            if seconds < MOST:
                self._in_vain = 0
                return
            self._in_vain += 1
            if self._in_vain > _TOLERATED:
                self._rest = min(1 << (self._in_vain - _TOLERATED - 1), _REST_MOST)
        elif self._rest:
            self._rest -= 1
        self.is_worth_while = not self._rest and seconds < _SHORT
