"""One place where the package says what it does, and where views listen.

Emitting costs one test of an empty tuple while nobody listens (G7). A listener must not block
and must not raise; one that raises is dropped, because a broken view must not break a call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Listener", "emit", "subscribe"]

Listener = Callable[[str, dict[str, Any]], None]

_listeners: tuple[Listener, ...] = ()
_lock = threading.Lock()
_log = logging.getLogger("nbdist.trace")


def subscribe(listener: Listener) -> Callable[[], None]:
    """Send every later event to ``listener``; returns a function that ends that."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)

    def unsubscribe() -> None:
        global _listeners
        with _lock:
            _listeners = tuple(other for other in _listeners if other is not listener)

    return unsubscribe


def emit(event: str, **fields: Any) -> None:
    """Tell the listeners that ``event`` happened."""
    for listener in _listeners:
        try:
            listener(event, fields)
        except Exception:
            _log.exception("a trace listener failed and is dropped")
            _drop(listener)


def _drop(listener: Listener) -> None:
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other is not listener)
