"""Shortens the time for which a thread may run Python while another thread wants to, while somebody waits for an agent.

A thread that answers a call needs the GIL several times. By default, Python lets another thread keep it for 5 ms each
time: on a worker whose main thread is busy in Python, an empty call takes 10 ms, and a sum of two numbers 20 ms.
"""
# With an interval of 0.1 ms, threads of the user's own that run Python side by side switch fifty times as often, which
# cost them up to 12 % of their time. So it ends when nobody waits any more:
#
#                         `shorten`, `hurry`: a message came that must arrive
#     the interval     ──────────────────────────────────────────────────────> the interval that the agent wants
#     from before      <──────────────────────────────────────────────────────
#                         `look`: none came since the last look, and no call runs
#
# So the first call after a pause to a worker that is busy in Python waits once, up to 5 ms, for its GIL. With 1 ms in
# place of Python's 5, several threads would still lose some percent of their time.

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

# Seconds; calls that follow each other more closely all find the short interval. Not much longer: a notebook asks each
# worker every 2 s where its cell is, which should not count as a series of calls.
_LOOK_EVERY = 0.1


class ThreadSwitching:
    """The switch interval of this process, `sys.setswitchinterval`: a short one while somebody waits for an agent.

    It holds for all agents of the process. An interval that the user sets meanwhile stays.
    """

    def __init__(self) -> None:
        # `is_relaxed`: nobody waits, so a message that must arrive has to call `hurry`. `is_used`: set with each such
        # message, cleared by `look` and `hurry`: the first of a series alone keeps the interval short for one look.
        self.is_relaxed = self.is_used = False
        self.look_at = float("inf")
        """The moment at which a reader has to call `look`, as of `time.monotonic`."""
        self._lock = threading.Lock()
        self._wanted: list[float] = []  # one for each call of `shorten` that has not ended
        self._before = 0.0
        self._ours: set[float] = set()  # the interval from before, and those that were set here; others are the user's

    def shorten(self, seconds: float) -> Callable[[], None]:
        """Let threads run Python for ``seconds`` while somebody waits for an agent; return a function to end this."""
        if not seconds:
            return lambda: None
        with self._lock:
            if not self._wanted:
                self._before = sys.getswitchinterval()
                self._ours = {self._before}
            # Of several wishes, the shortest counts.
            self._wanted.append(seconds)
            self.hurry()

        def end() -> None:
            with self._lock:
                self._wanted.remove(seconds)
                self.hurry()

        return end

    def hurry(self) -> None:
        """Set the shortest interval that is wanted; without agents, the one from before. Any thread may call this."""
        self.is_relaxed = self.is_used = False
        self._set(min((self._before, *self._wanted)))
        self.look_at = time.monotonic() + _LOOK_EVERY  # last: `look` must find all this done, as it holds no lock

    def look(self, now: float, is_awaited: bool) -> None:
        """Call `relax`, unless a message came since the last look, or ``is_awaited``: a call runs here."""
        if self.is_used or is_awaited:
            self.is_used, self.look_at = False, now + _LOOK_EVERY
        else:
            self.relax()

    def relax(self) -> None:
        """Set the interval from before, until the next `hurry`."""
        self.look_at = float("inf")
        self._set(self._before)
        self.is_relaxed = True  # last, as in `hurry`

    def _set(self, seconds: float) -> None:
        if sys.getswitchinterval() in self._ours:  # else the user has set another one
            sys.setswitchinterval(seconds)
            self._ours.add(sys.getswitchinterval())  # Python rounds it


switching = ThreadSwitching()
