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
from typing import Any

from nbdist.rpc.waits import blocking_wait
from nbdist.swarm.server.queues import QueuedRequest, RequestQueues

_log = logging.getLogger("nbdist.swarm")
_LOOK_SECONDS = 1.0  # between two calls of ``look``
_IDLE_SECONDS = 5.0  # without work, after which the thread ends, if ``look`` does not need it


class Runtime:
    """Computes the requests of its queue on one thread.

    ``compute`` takes the works that `RequestQueues.take` returned together, and returns a result or an error for each.
    ``look`` is called about once a second; it drops what has timed out, and returns whether the thread is still needed.
    """

    def __init__(
        self, queue: RequestQueues, compute: Callable[[Sequence[Any]], Sequence[Any]], look: Callable[[], bool]
    ) -> None:
        self._queue = queue
        self._compute = compute
        self._look = look
        self._changed = threading.Condition(threading.RLock())  # reentrant: `run` holds it and calls `keep`
        self._thread: threading.Thread | None = None
        self._kept = False  # True if `keep` was called since the last call of ``look``
        self.busy = 0.0  # seconds spent on computing so far

    def run(self, request: QueuedRequest) -> Any:
        """Let the computing thread compute a request, and wait; return its result or raise its error, or `TooLarge`."""
        with self._changed:
            self._queue.submit(request)
            self.keep()
            self._changed.notify_all()
        try:
            with blocking_wait():
                return request.answer.result()
        # The request's own error, or Ctrl-C: this thread does not wait any more. A request that is being computed
        # stays, and its result is dropped.
        except BaseException:
            with self._changed:
                self._queue.withdraw(request)
            raise
        finally:
            del request  # an error's traceback has this frame, so the error would keep itself and the server alive

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._queue)

    def keep(self) -> None:
        """Start the thread if there is none, and let it call ``look`` once more: something new may time out."""
        with self._changed:
            self._kept = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="swarm computes", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        try:
            self._run_loop()
        # Whatever ends the thread, such as a MemoryError, must not end all later requests with it.
        except BaseException:
            with self._changed:
                self._thread = None  # so that the next request starts a new thread
            raise

    def _run_loop(self) -> None:
        used = looked = time.monotonic()
        while True:
            with self._changed:
                if not len(self._queue):
                    self._changed.wait(_LOOK_SECONDS)
                requests = self._queue.take()
            now = time.monotonic()
            if requests:
                self._run(requests)
                requests.clear()  # they refer to the server, which this thread must not keep alive while it waits
                used = time.monotonic()
            if now - looked >= _LOOK_SECONDS:
                looked = now
                # Before `look`, not after it: a `keep` while `look` runs must count.
                self._kept = False
                # If `keep` is called meanwhile, this thread must continue, because `keep` has started no new one.
                if not self._is_needed() and now - used >= _IDLE_SECONDS:
                    with self._changed:
                        if not self._kept:
                            self._thread = None
                            return

    def _is_needed(self) -> bool:
        try:
            return self._look()
        except Exception:  # an error must not end the thread: then nothing would be computed any more
            _log.exception("a swarm's server failed to drop what has timed out")
            return True

    def _run(self, requests: Sequence[QueuedRequest]) -> None:
        began = time.perf_counter()
        try:
            outcomes: Sequence[Any] = self._compute([request.work for request in requests])
        except BaseException as error:  # the model's code: whatever it raises is the answer of these requests
            outcomes = [error] * len(requests)
        self.busy += time.perf_counter() - began
        for request, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                request.answer.set_exception(outcome)
            else:
                request.answer.set_result(outcome)
        del requests, request, outcomes, outcome  # for the reason given in `run`
