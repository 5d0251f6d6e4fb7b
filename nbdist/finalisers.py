"""Lets a finaliser or a signal's handler make a call, although Python runs it in the middle of this package.

Python runs a user's finaliser (a ``__del__``, or the callback of a weak reference) wherever it happens to collect
garbage, and the handler of a signal between any two steps of the main thread. That thread may hold a lock of the
package at this moment, or be the one that reads messages. A call made there would wait for ever: for the lock, or for
an answer that nobody reads.

So while a thread runs code of the package, it is *closed*: it sets ``this_thread.is_closed``. There, the user's code
can run only as a finaliser or as a signal's handler. A call that is made in a closed thread is handed over to another
thread, which sends it. Waiting for the answer in a closed thread raises UsageError.

======================================  ================================  =======================  ==========
the calling thread                      ``rpc_async``, ``remote``         ``rpc_sync``             ``wait``
======================================  ================================  =======================  ==========
runs the user's code                    sent by this thread               sent by it; waits        waits
is closed                               handed over (`hand_over`)         handed over; UsageError  UsageError
holds a guarded lock (`guard`)          sent by this thread               handed over; UsageError  UsageError
======================================  ================================  =======================  ==========
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

_log = logging.getLogger("nbdist.rpc")


class _PerThread(threading.local):
    is_closed = False


this_thread = _PerThread()
"""The state of the calling thread. Code that sets ``this_thread.is_closed`` restores the earlier value afterwards.

It does so with ``try`` and ``finally`` in its own function: Ctrl-C could keep a context manager from restoring it.
"""

# The guarded locks, all of them reentrant, which other threads need to make progress. Not a WeakSet: a thread that adds
# to one ends another thread's iteration with an error. `list` copies the keys of a dict in one operation.
_locks: dict[weakref.ref[Any], None] = {}


def guard(lock: Any) -> Callable[[], bool]:
    """Register a reentrant lock that other threads need; return a function that tells if the calling thread holds it.

    `may_wait` is False in a thread that holds the lock. The lock stays registered until it is collected; a second call
    changes nothing.
    """
    _locks[weakref.ref(lock, _locks.pop)] = None
    is_held: Callable[[], bool] = lock._is_owned
    return is_held


def may_wait() -> bool:
    """Return whether the calling thread may wait for other threads: it is not closed, and holds no lock of `guard`.

    Code that is about to wait calls this first. If the result is False, it raises UsageError or hands the work over to
    another thread.
    """
    return not this_thread.is_closed and not any(
        lock._is_owned() for each in list(_locks) if (lock := each()) is not None
    )


class _Jobs:
    """The calls that are handed over and have not been sent, and the thread that sends them."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._is_running = False

    def hand_over(self, job: Callable[[], None]) -> None:
        """Run ``job`` in another thread, as a rule one job after the other; it may start before this returns.

        Errors of a job are logged.
        """
        # First: a thread that is about to end looks into the queue again after it has set `_is_running` to False.
        self._queue.append(job)
        if not self._is_running:
            self._is_running = True
            # No lock, and no `threading.Thread`, which takes some: the interrupted code may hold it.
            threads.start_new_thread(self._run, ())

    def _run(self) -> None:
        """Run the queued jobs until none is left. Two threads may do so for a moment."""
        while True:
            try:
                job = self._queue.popleft()
            except IndexError:
                self._is_running = False
                # A job that came just before saw a running thread, and `hand_over` started none for it.
                if not self._queue:
                    return
                self._is_running = True
                continue
            try:
                job()
            # A job sends a call of the user's, whatever that raises. If this thread died, `_is_running` would stay
            # True, and no later job would run.
            except BaseException:
                _log.exception("a call of a finaliser failed")
            del job

    def forget(self) -> None:
        """Forget the queued jobs in a forked child, where their thread does not exist."""
        self._queue.clear()
        self._is_running = False


_jobs = _Jobs()
hand_over = _jobs.hand_over
os.register_at_fork(after_in_child=_jobs.forget)
