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

It does so with ``try`` and ``finally`` in its own function, also after an error: Ctrl-C could keep a context manager
from restoring it.
"""

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
"""The guarded locks, all of them reentrant, which other threads need to make progress."""


def guard(lock: Any) -> Callable[[], bool]:
    """Register a reentrant lock that other threads need; return a function that tells if the calling thread holds it.

    `may_wait` is False in a thread that holds the lock: a call that a finaliser makes there is sent, but waiting for
    the answer raises UsageError. The caller uses the function for its own decisions. The lock stays registered until it
    is collected; a second call changes nothing.
    """
    _locks.add(lock)
    is_held: Callable[[], bool] = lock._is_owned
    return is_held


def may_wait() -> bool:
    """Return whether the calling thread may wait for other threads.

    The result is False in a closed thread (see the module's docstring), and while the thread holds a lock of `guard`.
    Code that is about to wait calls this first. If the result is False, it raises UsageError or hands the work over to
    another thread.
    """
    return not this_thread.is_closed and not any(lock._is_owned() for lock in list(_locks))


class _Jobs:
    """The calls that are handed over and have not been sent, and the thread that sends them."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._is_running = False

    def hand_over(self, job: Callable[[], None]) -> None:
        """Run ``job`` in another thread, as a rule one job after the other. Errors of a job are logged.

        This takes no lock, and starts a thread of the simplest kind, because `threading.Thread` takes locks. ``job``
        may start before this returns.
        """
        self._queue.append(job)
        if not self._is_running:
            self._is_running = True
            threads.start_new_thread(self._run, ())

    def _run(self) -> None:
        """Run the queued jobs until none is left; `hand_over` starts this thread.

        Two threads may do so for a moment, if one starts while the other is about to end.
        """
        while True:
            try:
                job = self._queue.popleft()
            except IndexError:
                self._is_running = False
                if not self._queue:
                    return
                self._is_running = True
                continue
            try:
                job()
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
