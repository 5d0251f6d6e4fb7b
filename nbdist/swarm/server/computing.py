"""The computing thread of a server: the only thread that runs blocks. All others queue requests and wait.

The first request or session starts the thread. It ends after some seconds without work and sessions; the next request
or session starts another::

    run(), any thread ─► pools ─► computing thread: take ─► compute ─► outcomes ─► run() returns or raises
                                        └─ about once a second: look, which drops what has timed out
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nbdist.rpc.futures import blocking_wait
from nbdist.swarm.server.queues import Pools, QueuedRequest

__all__ = ["Runtime"]

_log = logging.getLogger("nbdist.swarm")
_LOOK_SECONDS = 1.0
"""Seconds between two calls of ``look``."""
_IDLE_SECONDS = 5.0
"""Seconds without work after which the thread ends, if ``look`` finds nothing to look after."""


class _Job(NamedTuple):
    """The work of a request, and the place for its outcome: a list, which gets one result or error."""

    work: Any
    outcome: list[Any]
    done: threading.Event


class Runtime:
    """Computes the requests of its pools on one thread."""

    def __init__(
        self, pools: Pools, compute: Callable[[Sequence[Any]], Sequence[Any]], look: Callable[[], bool]
    ) -> None:
        """Store how to compute; the first call of `run` or `keep` starts the thread.

        Args:
            pools: the queue of requests.
            compute: takes the works of requests that `Pools.take` returned together, and returns a result or an error
                for each; if it raises, all of them fail with that error.
            look: called about once a second; returns whether the thread is still needed.
        """
        self._pools = pools
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

        Raises `TooLarge` at once for a request with too many tokens. If the wait is interrupted, the request is
        withdrawn, unless it is being computed.
        """
        job = request.work = _Job(request.work, [], threading.Event())
        with self._changed:
            self._pools.submit(request)
            self.keep()
            self._changed.notify_all()
        try:
            with blocking_wait():
                job.done.wait()
        except BaseException:
            with self._changed:
                self._pools.withdraw(request)
            raise
        outcome = job.outcome.pop()
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        finally:
            del outcome  # otherwise an error, whose traceback has this frame, would refer to itself and to the server

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._pools)

    def keep(self) -> None:
        """Start the thread if there is none, and do not let it end before the next call of ``look``.

        ``look`` is the server's function that ends what has expired. Called when there is something new for it, such as
        a session that may expire.
        """
        with self._changed:
            self._kept = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="swarm computes", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        """Run `_run_loop` as the body of the computing thread."""
        try:
            self._run_loop()
        except BaseException:
            with self._changed:
                self._thread = None  # so that the next request starts another
            raise

    def _run_loop(self) -> None:
        """Compute requests, and call ``look`` about once a second, until the thread is not needed any more."""
        used = looked = time.monotonic()
        while True:
            with self._changed:
                if not len(self._pools):
                    self._changed.wait(_LOOK_SECONDS)
                requests = self._pools.take()
            now = time.monotonic()
            if requests:
                self._run([request.work for request in requests])
                requests.clear()  # their works refer to the server, which this thread must not keep while it waits
                used = time.monotonic()
            if now - looked >= _LOOK_SECONDS:
                looked = now
                self._kept = False
                # `keep` may be called meanwhile; then this thread has to go on, because `keep` starts none.
                if not self._is_needed() and now - used >= _IDLE_SECONDS:
                    with self._changed:
                        if not self._kept:
                            self._thread = None
                            return

    def _is_needed(self) -> bool:
        """Call ``look``; return whether the thread is still needed, which it is after an error.

        ``look`` is the server's function that ends what has expired; its errors are logged.
        """
        try:
            return self._look()
        except Exception:  # an error must not end the thread: nothing would be computed any more
            _log.exception("a swarm's server failed to drop what has timed out")
            return True

    def _run(self, jobs: Sequence[_Job]) -> None:
        """Compute the work of several requests as one, and wake the threads that wait for it.

        Each gets a result or an error. Runs on the computing thread.
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
