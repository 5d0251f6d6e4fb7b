"""The computing thread of a server: the only thread that runs blocks. All other threads queue requests and wait.

The first request or session starts the thread. It ends after some seconds without work and sessions. The next request
or session starts a new one::

    run(), any thread ─► queue ─► computing thread: take ─► compute ─► outcomes ─► run() returns or raises
                                        └─ about once a second: look, which drops what has timed out
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nbdist.rpc.waits import blocking_wait
from nbdist.swarm.server.queues import QueuedRequest, RequestQueues

_log = logging.getLogger("nbdist.swarm")
_LOOK_SECONDS = 1.0
"""Seconds between two calls of ``look``."""
_IDLE_SECONDS = 5.0
"""Seconds without work after which the thread ends, if ``look`` does not need it."""


class _Job(NamedTuple):
    """The work of a request, and a list for its outcome, which gets one result or error."""

    work: Any
    outcome: list[Any]
    done: threading.Event


class Runtime:
    """Computes the requests of its queue on one thread."""

    def __init__(
        self, queue: RequestQueues, compute: Callable[[Sequence[Any]], Sequence[Any]], look: Callable[[], bool]
    ) -> None:
        """Store how to compute; the first call of `run` or `keep` starts the thread.

        Args:
            queue: the queue of requests.
            compute: takes the works of requests that `RequestQueues.take` returned together, and returns a result or an
                error for each. If it raises an error, all of them fail with it.
            look: called about once a second; returns whether the thread is still needed.
        """
        self._queue = queue
        self._compute = compute
        self._look = look
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._kept = False
        """True if `keep` was called since the last call of ``look``."""
        self.busy = 0.0
        """Seconds spent on computing so far."""

    def run(self, request: QueuedRequest) -> Any:
        """Let the computing thread compute a request, and wait; return its result or raise its error.

        If the request has too many tokens, raises `TooLarge` at once. If the wait is interrupted, the request is
        withdrawn, unless it is being computed.
        """
        job = request.work = _Job(request.work, [], threading.Event())
        with self._changed:
            self._queue.submit(request)
            self.keep()
            self._changed.notify_all()
        try:
            with blocking_wait():
                job.done.wait()
        except BaseException:
            with self._changed:
                self._queue.withdraw(request)
            raise
        outcome = job.outcome.pop()
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        finally:
            del outcome  # an error's traceback has this frame, so the error would keep itself and the server alive

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._queue)

    def keep(self) -> None:
        """Start the thread if there is none, and do not let it end before the next call of ``look``.

        ``look`` is the server's function that drops what has timed out. Call this when there is something new for it,
        such as a session that may expire.
        """
        with self._changed:
            self._kept = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="swarm computes", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        """Run `_run_loop`. This is the body of the computing thread."""
        try:
            self._run_loop()
        except BaseException:
            with self._changed:
                self._thread = None  # so that the next request starts a new thread
            raise

    def _run_loop(self) -> None:
        """Compute requests, and call ``look`` about once a second, until the thread is not needed any more."""
        used = looked = time.monotonic()
        while True:
            with self._changed:
                if not len(self._queue):
                    self._changed.wait(_LOOK_SECONDS)
                requests = self._queue.take()
            now = time.monotonic()
            if requests:
                self._run([request.work for request in requests])
                requests.clear()  # they refer to the server, which this thread must not keep alive while it waits
                used = time.monotonic()
            if now - looked >= _LOOK_SECONDS:
                looked = now
                self._kept = False
                # If `keep` is called meanwhile, this thread must continue, because `keep` has started no new one.
                if not self._is_needed() and now - used >= _IDLE_SECONDS:
                    with self._changed:
                        if not self._kept:
                            self._thread = None
                            return

    def _is_needed(self) -> bool:
        """Call ``look``; return whether the thread is still needed. It is, if ``look`` raises an error.

        ``look`` is the server's function that drops what has timed out. Its errors are logged.
        """
        try:
            return self._look()
        except Exception:  # an error must not end the thread: then nothing would be computed any more
            _log.exception("a swarm's server failed to drop what has timed out")
            return True

    def _run(self, jobs: Sequence[_Job]) -> None:
        """Compute the work of several requests together, and wake the threads that wait for it.

        Each request gets a result or an error. Runs on the computing thread.
        """
        began = time.perf_counter()
        try:
            outcomes: Sequence[Any] = self._compute([job.work for job in jobs])
        except BaseException as error:
            outcomes = [error] * len(jobs)
        self.busy += time.perf_counter() - began
        for job, outcome in zip(jobs, outcomes, strict=True):
            job.outcome.append(outcome)
            job.done.set()
        del outcomes, outcome, job  # for the reason given in `run`
