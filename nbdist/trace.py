"""Emits the package's events, for views and tests; and shows the lines of long operations.

While nobody listens, `emit` costs one test of an empty list. A listener runs in the thread that emits, so it must not
block. If it raises an error, it is dropped: a broken view must not break a call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["Listener", "Steps", "emit", "show_steps", "steps", "subscribe"]

Listener = Callable[[str, dict[str, Any]], None]
"""A function that is called with the event's name and its fields."""

Steps = Callable[[str], None]
"""A function that shows a line about an operation which takes seconds, in place of the line before."""

_show: Callable[[], Steps] | None = None
listeners: list[Listener] = []
"""The present listeners. Code that runs with each call emits only if this is not empty."""
_lock = threading.Lock()
_log = logging.getLogger("nbdist.trace")


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call ``listener(event, fields)`` for every later event, in the thread in which it happens.

    ``fields`` is a dict, the same one for all listeners. A listener that raises an Exception, or cannot be called, gets
    no further events; the error is logged. KeyboardInterrupt passes through `emit`. RPC need not run. The events and
    their fields include:

    =================  ===========================================================================
    ``call.sent``      agent, to, function, id, started: this process has sent a call that began then
    ``call.ended``     agent, to, function, id: the answer has arrived, or the call has failed
    ``call.run``       agent, function, id, caller, callee, args: this process begins to run a function
    ``call.ran``       agent, function, id: the function has returned, or raised an error
    ``call.failed``    agent, function, error, note: the function has raised an error
    ``pass.ran``       start: a backward pass of torch's own has ended in this thread
    ``cell.ran``       agent, start, cell: a worker's cell has ended
    ``peer.suspect``   name, silent: a worker has been silent for some seconds
    ``peer.lost``      name, why: a worker is gone
    ``agent.closed``   agent, why: an agent of this process has ended
    =================  ===========================================================================

    Returns:
        A function that ends the subscription. Calling it twice is harmless. A listener that is subscribed twice is
        called twice, and the end of either subscription ends both.

    Example:
        >>> seen = []
        >>> end = subscribe(lambda event, fields: seen.append((event, fields["function"])))
        >>> rpc.rpc_sync("worker1", max, args=(1, 2))
        2
        >>> end()
        >>> ("call.sent", "max") in seen
        True
    """
    with _lock:
        listeners.append(listener)
    return partial(_drop, listener)


def emit(event: str, **fields: Any) -> None:
    """Call the listeners with ``event`` and its ``fields``. A listener that raises an error is logged and dropped.

    Returns after all listeners have run, in this thread; at once without listeners. Names are not checked, but a field
    named ``event`` raises TypeError.

    Example:
        >>> end = subscribe(print)
        >>> emit("epoch.ended", loss=0.5)
        epoch.ended {'loss': 0.5}
        >>> end()
    """
    for listener in tuple(listeners):  # a copy, because subscriptions may end meanwhile
        try:
            listener(event, fields)
        except Exception:  # a listener is a user's function, or a view's: neither may break a call
            _log.exception("a trace listener failed and is dropped")
            _drop(listener)


def _drop(listener: Listener) -> None:
    with _lock:
        listeners[:] = [other for other in listeners if other is not listener]


def show_steps(show: Callable[[], Steps] | None) -> None:
    """Set ``show()``, which returns the function that shows an operation's lines. With None, no lines are shown.

    The notebook's magics set it. It holds for the process; a second call replaces the first. ``show`` is not checked:
    its errors, or that it is not callable, come out of `steps`.

    Example:
        >>> show_steps(lambda: print)
        >>> steps()("loading worker1")
        loading worker1
        >>> show_steps(None)
    """
    global _show
    _show = show


def steps() -> Steps:
    """Return the function that shows the lines of an operation that begins now.

    The function does nothing unless `show_steps` has set another one. Errors of the function given there, and of
    the one that it returns, are raised where they are called.

    Example:
        >>> show = steps()
        >>> show("loading worker1")
    """
    return _show() if _show is not None else lambda line: None
