"""One place where the package says what it does, and where views listen.

Emitting costs one test of an empty tuple while nobody listens (G7). A listener must not block
and must not raise; one that raises is dropped, because a broken view must not break a call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Listener", "Steps", "emit", "show_steps", "steps", "subscribe"]

Listener = Callable[[str, dict[str, Any]], None]

Steps = Callable[[str], None]
"""Shows the newest line about an operation that takes seconds, in place of the line before."""

_show: Callable[[], Steps] | None = None
listeners: tuple[Listener, ...] = ()
"""The listeners. Code that runs with each call looks here first, and emits only if there is one."""
_lock = threading.Lock()
_log = logging.getLogger("nbdist.trace")


def subscribe(listener: Listener) -> Callable[[], None]:
    """Send every later event to ``listener``; returns a function that ends that."""
    global listeners
    with _lock:
        listeners = (*listeners, listener)

    def unsubscribe() -> None:
        global listeners
        with _lock:
            listeners = tuple(other for other in listeners if other is not listener)

    return unsubscribe


def emit(event: str, **fields: Any) -> None:
    """Tell the listeners that ``event`` happened."""
    for listener in listeners:
        try:
            listener(event, fields)
        except Exception:
            _log.exception("a trace listener failed and is dropped")
            _drop(listener)


def _drop(listener: Listener) -> None:
    global listeners
    with _lock:
        listeners = tuple(other for other in listeners if other is not listener)


def show_steps(show: Callable[[], Steps] | None) -> None:
    """Have ``show()`` called at the begin of each operation that takes seconds; None ends that."""
    global _show
    _show = show


def steps() -> Steps:
    """Return what shows the steps of an operation that begins now; it does nothing where nobody watches."""
    return _show() if _show is not None else _skip


def _skip(line: str) -> None:
    """Show nothing."""
