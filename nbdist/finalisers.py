"""Makes calls in another thread where a finaliser or a signal's handler makes them in the midst of the package.

Python runs a user's finaliser (a ``__del__``, or what a weak reference calls) wherever it happens to collect garbage,
and the handler of a signal between any two steps of the main thread. That thread may hold a lock of the package then,
or be the one that reads messages. A call made there would wait for ever, for that lock or for an answer that nobody
reads.

So a thread sets ``this_thread.is_closed`` where no other code of the user's can run. What is called there is handed
over to another thread, which sends it. To wait for the answer is refused.
"""

from __future__ import annotations

import _thread as threads
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["guard", "hand_over", "may_wait", "this_thread"]

_log = logging.getLogger("nbdist.rpc")


class _PerThread(threading.local):
    is_closed = False


this_thread = _PerThread()
"""Where the calling thread is. Whoever sets ``this_thread.is_closed`` puts back what it was, also after an error.

In a ``try`` and a ``finally`` of its own function: Ctrl-C could keep a context manager from putting it back.
"""

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
"""Locks, all of them reentrant, without which no other thread gets on."""

_jobs: deque[Callable[[], None]] = deque()
_is_running = False


def guard(lock: Any) -> Callable[[], bool]:
    """Note a reentrant lock that other threads need; return what tells whether the calling thread holds it.

    In a thread that holds it, a finaliser may send a call, but not wait for the answer.
    """
    _locks.add(lock)
    is_held: Callable[[], bool] = lock._is_owned
    return is_held


def may_wait() -> bool:
    """Return whether the calling thread may wait for others; it may not in the midst of the package."""
    return not this_thread.is_closed and not any(lock._is_owned() for lock in list(_locks))


def hand_over(job: Callable[[], None]) -> None:
    """Have ``job`` run by another thread, one after the other. It must deal with its errors; others are logged.

    This takes no lock, and starts a thread of the simplest kind: `threading.Thread` would take locks.
    """
    global _is_running
    _jobs.append(job)
    if not _is_running:
        _is_running = True
        threads.start_new_thread(_run, ())


def _run() -> None:
    """Run what there is. Two threads may do so for a moment, where one comes while the other is about to end."""
    global _is_running
    while True:
        try:
            job = _jobs.popleft()
        except IndexError:
            _is_running = False
            if not _jobs:
                return
            _is_running = True
            continue
        try:
            job()
        except BaseException:
            _log.exception("a call of a finaliser failed")
        del job


def _after_fork() -> None:
    global _is_running
    _jobs.clear()
    _is_running = False


os.register_at_fork(after_in_child=_after_fork)
