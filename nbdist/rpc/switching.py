"""How long a thread may run Python while another one wants to: shorter than Python's own 5 ms, while there is an agent.

Whoever answers a call has to be given its turn several times, after each wait and each operation of torch's. On a
worker whose main thread is busy in Python an empty call then takes 10 ms, and a sum of two numbers 20.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

__all__ = ["shorten"]

_lock = threading.Lock()
_wanted: list[float] = []
_before = _ours = 0.0


def shorten(seconds: float) -> Callable[[], None]:
    """Let no turn be longer, unless it is 0; what is returned ends that. What the user sets meanwhile stays."""
    if not seconds:
        return lambda: None
    global _before, _ours
    with _lock:
        if not _wanted:
            _before = _ours = sys.getswitchinterval()
        _wanted.append(seconds)
        _apply()

    def end() -> None:
        with _lock:
            _wanted.remove(seconds)
            _apply()

    return end


def _apply() -> None:
    global _ours
    if sys.getswitchinterval() == _ours:  # or the user has set another
        sys.setswitchinterval(min((_before, *_wanted)))
        _ours = sys.getswitchinterval()
