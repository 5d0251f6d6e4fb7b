"""The one thread of a server that computes. All others only bring it work and wait, so that a busy server answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nbdist.rpc.futures import blocking_wait
from nbdist.swarm.pools import Pools, Request

__all__ = ["Runtime"]

_log = logging.getLogger("nbdist.swarm")
_LOOKS = 1.0
_IDLE = 5.0
"""Seconds after which a thread without work ends; the next request starts another."""


class _Job(NamedTuple):
    """The work of a request, and where its outcome goes."""

    work: Any
    outcome: list[Any]
    done: threading.Event


class Runtime:
    """Computes what its pools hand out."""

    def __init__(
        self, pools: Pools, compute: Callable[[Sequence[Any]], Sequence[Any]], look: Callable[[], bool]
    ) -> None:
        """``compute`` has an outcome for each work; ``look`` sees to what is due, and says whether to go on."""
        self._pools = pools
        self._compute = compute
        self._look = look
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._kept = False
        """Whether there is something new since it was looked last."""
        self.busy = 0.0
        """Seconds for which it has computed."""

    def run(self, request: Request) -> Any:
        """Have it computed; its result, or its error."""
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
            del outcome  # or an error, by its traceback and this frame, would hold itself, and with it the server

    @property
    def waiting(self) -> int:
        """How many requests have not been begun."""
        return len(self._pools)

    def keep(self) -> None:
        """There is something to do, or to look after."""
        with self._changed:
            self._kept = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="swarm computes", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        try:
            self._work()
        except BaseException:
            with self._changed:
                self._thread = None  # the next request has another
            raise

    def _work(self) -> None:
        used = looked = time.monotonic()
        while True:
            with self._changed:
                if not len(self._pools):
                    self._changed.wait(_LOOKS)
                requests = self._pools.take()
            now = time.monotonic()
            if requests:
                self._run([request.work for request in requests])
                requests.clear()  # their server is not to be kept by this thread while it waits
                used = time.monotonic()
            if now - looked >= _LOOKS:
                looked = now
                self._kept = False
                if not self._is_needed() and now - used >= _IDLE:
                    with self._changed:
                        if not self._kept:
                            self._thread = None
                            return

    def _is_needed(self) -> bool:
        try:
            return self._look()
        except Exception:  # without this thread, nothing would be computed any more
            _log.exception("a swarm's server could not be looked after")
            return True

    def _run(self, jobs: Sequence[_Job]) -> None:
        began = time.perf_counter()
        try:
            outcomes: Sequence[Any] = self._compute([job.work for job in jobs])
        except BaseException as error:
            outcomes = [error] * len(jobs)
        self.busy += time.perf_counter() - began
        for job, outcome in zip(jobs, outcomes, strict=True):
            job.outcome.append(outcome)
            job.done.set()
        del outcomes, outcome, job  # as in `run`
