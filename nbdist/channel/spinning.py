"""Decides whether a thread that waits for a message looks for it again and again at first, instead of sleeping at once.

To wake a thread that sleeps takes 5 to 50 µs, the most in virtual machines, and costs the side that wakes it time as
well. A core that was idle runs slower at first, too. Where messages follow each other as quickly as calls and their
answers, it is cheaper not to sleep, also in CPU time. So a wait begins with a look of `MOST` seconds if the one before
was short. Between two looks the thread lets others have its core (``sched_yield``).

Where that look is in vain several times in a row, a few waits go by without one. A long wait costs one look at most.

A look that takes much longer than `MOST` had to share its core with a thread that computes. There it is better to
sleep: the kernel lets a thread that wakes up go first, and one that yields go last. So the next `_REST_STALLED` waits
begin with sleep. Pure.
"""

from __future__ import annotations

__all__ = ["MOST", "Spinning"]

MOST = 1e-3
"""Seconds for which a thread looks before it sleeps: more than a quick function or a small backward pass takes."""

_SHORT = 2 * MOST
"""A look is worth while after a wait of so many seconds at most: the next may be shorter, the more so without sleep."""

_STALLED = 2 * MOST
"""A look that took more seconds shared its core with a thread that computes."""

_TOLERATED = 2
"""The number of looks in vain in a row after which a thread still looks: the machine may have been busy for once."""

_REST_MOST = 8
"""The number of waits that begin with sleep, at most, before a look is tried again."""

_REST_STALLED = 64
"""The number of waits that begin with sleep after a look that was stalled."""


class Spinning:
    """Decides, from how long earlier waits took, whether the next one begins with a look."""

    def __init__(self) -> None:
        self.is_worth_while = False
        """Whether the thread that waits next should look for `MOST` seconds before it sleeps."""
        self._in_vain = 0
        self._rest = 0

    def waited(self, seconds: float, looked: float = 0.0) -> None:
        """Note how many seconds a wait took, and for how many of them, at its beginning, the thread looked."""
        if looked:
            if seconds < MOST:
                self._in_vain = 0
                return
            self._in_vain += 1
            if looked > _STALLED:
                self._rest = _REST_STALLED
            elif self._in_vain > _TOLERATED:
                self._rest = min(1 << (self._in_vain - _TOLERATED - 1), _REST_MOST)
        elif self._rest:
            self._rest -= 1
        self.is_worth_while = not self._rest and seconds < _SHORT
