"""The threads of an agent: they take turns at reading, and whoever read a request runs it.

So a request is executed without being handed from one thread to another; what is handed over is the
turn at reading. Up to ``size`` threads may run user code. One that blocks in a wait for another call
does not count, so nested and recursive calls cannot use the pool up; and when nothing has finished for a
while although work is queued (a handler sleeping in a lock that another call must release), the pool
grows as well.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nbdist.rpc.futures import set_blocking_hook

__all__ = ["Job", "Pool"]

Job = Callable[[], None]

STUCK_AFTER = 0.1
"""Seconds without a finished job, with jobs queued, after which one more thread starts."""

_log = logging.getLogger("nbdist.rpc")


class Pool:
    """An elastic pool of threads around one reader.

    ``read(timeout)`` is called by one thread at a time, and returns a job, or None. It must return when
    ``wake()`` is called.
    """

    def __init__(
        self, size: int, read: Callable[[float | None], Job | None], wake: Callable[[], None], name: str
    ) -> None:
        self._size = max(1, size)
        self._read = read
        self._wake = wake
        self._name = name
        self._condition = threading.Condition(threading.Lock())
        self._queue: deque[Job] = deque()
        self._reading = False
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._running = 0
        self._blocked = 0
        self._extra = 0
        self._finished_at = time.monotonic()
        self._closed = False
        self._count = 0

    def start(self) -> None:
        """Start reading."""
        with self._condition:
            self._spawn()

    @property
    def threads(self) -> int:
        """How many threads there are."""
        return len(self._threads)

    @property
    def active(self) -> int:
        """How many jobs are running or queued."""
        return self._running + len(self._queue)

    def submit(self, job: Job) -> None:
        """Run ``job`` on a thread of the pool."""
        with self._condition:
            self._queue.append(job)
            self._provide()

    def close(self, timeout: float) -> bool:
        """End all threads that are not in user code; whether that was all of them."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            threads = self._threads - {threading.current_thread()}
        self._wake()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # -- threads ------------------------------------------------------------------------------

    def _spawn(self) -> None:
        self._count += 1
        thread = threading.Thread(target=self._run, name=f"{self._name}-{self._count}", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _capacity(self) -> bool:
        """Whether one more job may run."""
        return self._running - self._blocked < self._size + self._extra

    def _provide(self) -> None:
        """With the lock held: see that queued work, and reading, have threads."""
        if self._idle:
            self._condition.notify()
        elif self._queue and self._capacity():
            self._spawn()

    def _run(self) -> None:
        set_blocking_hook(self._blocking)
        thread = threading.current_thread()
        try:
            while (job := self._next()) is not None:
                try:
                    job()
                except BaseException:
                    _log.exception("a job of the pool failed")
                del job
                with self._condition:
                    self._running -= 1
                    self._finished_at = time.monotonic()
        finally:
            with self._condition:
                self._threads.discard(thread)

    def _next(self) -> Job | None:
        """The next job for this thread, which it may have to read itself; None to end."""
        while True:
            with self._condition:
                while True:
                    if self._closed:
                        return None
                    if self._queue and self._capacity():
                        self._running += 1
                        if not self._reading:
                            self._provide_reader()
                        queued = self._queue.popleft()
                        if self._queue:
                            self._provide()  # two jobs may have been announced to one sleeper
                        return queued
                    self._extra = 0 if not self._queue else self._extra
                    if not self._reading:
                        self._reading = True
                        break
                    if self._idle > self._size:
                        return None
                    self._idle += 1
                    self._condition.wait()
                    self._idle -= 1
            job = self._lead()
            if job is not None:
                return job

    def _provide_reader(self) -> None:
        if self._idle:
            self._condition.notify()
        else:
            self._spawn()

    def _lead(self) -> Job | None:
        """Read until there is a job for this thread; somebody else reads on."""
        while True:
            timeout = STUCK_AFTER if self._queue else None
            try:
                job = self._read(timeout)
            except BaseException:
                _log.exception("reading failed")
                job = None
            with self._condition:
                if self._closed:
                    self._reading = False
                    return None
                if job is None:
                    if self._queue:
                        self._unstick()
                    continue
                if not self._capacity():
                    self._queue.append(job)
                    continue
                if self._queue:
                    self._queue.append(job)
                    job = self._queue.popleft()
                self._running += 1
                self._reading = False
                self._provide_reader()
                return job

    def _unstick(self) -> None:
        if time.monotonic() - self._finished_at >= STUCK_AFTER:
            self._extra += max(1, self._extra // 2)
        self._provide()

    # -- blocking -----------------------------------------------------------------------------

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        with self._condition:
            self._blocked += 1
            if self._queue:
                self._provide()
        try:
            yield
        finally:
            with self._condition:
                self._blocked -= 1
