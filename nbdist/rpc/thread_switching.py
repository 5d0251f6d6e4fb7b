"""Shortens the time for which a thread may run Python while another thread wants to, as long as there is an agent.

A thread that answers a call needs the GIL several times: after each wait, and after each operation of torch. By
default, Python lets another thread keep the GIL for 5 ms each time. So on a worker whose main thread is busy in Python,
an empty call takes 10 ms, and a sum of two numbers 20 ms.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

__all__ = ["shorten"]

_lock = threading.Lock()
_wanted: list[float] = []
"""The intervals in force, one for each call of `shorten` whose limit has not ended."""
_before = _ours = 0.0
"""The interval before the first `shorten`, and the interval that this module set last."""


def shorten(seconds: float) -> Callable[[], None]:
    """Let a thread run Python for ``seconds`` at most while another wants to; return a function that ends the limit.

    0 sets no limit. The limit, `sys.setswitchinterval`, holds for the whole process; of several, the shortest counts.
    An interval that the user sets meanwhile stays. Call the returned function once.
    """
    if not seconds:
        return lambda: None
    global _before, _ours
    with _lock:
        if not _wanted:
            _before = _ours = sys.getswitchinterval()
        _wanted.append(seconds)
        _apply()

    def end() -> None:
        """Remove the limit; the shortest remaining one, or the interval from before, is in force."""
        with _lock:
            _wanted.remove(seconds)
            _apply()

    return end


def _apply() -> None:
    """Set the process's switch interval to the shortest wanted one, or to the one before the first `shorten`.

    The shortest of all these counts. If the user has set an interval meanwhile, that interval stays. The caller holds
    the lock.
    """
    global _ours
    if sys.getswitchinterval() == _ours:  # else the user has set another one
        sys.setswitchinterval(min((_before, *_wanted)))
        _ours = sys.getswitchinterval()
