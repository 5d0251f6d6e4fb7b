"""The threads of an agent: they take turns at reading, and whoever read a request runs it.

So a request is executed without being handed from one thread to another. What is handed over is the turn at
reading; or not even that, where two threads may wait for messages at once, of which one is woken for each: then the
other one is there already for what comes while the first is busy.

Up to ``size`` threads may run user code. One that blocks in a wait for another call does not count, so nested and
recursive calls cannot use the pool up; and when nothing has finished for a while although work is queued (a handler
sleeping in a lock that another call must release), the pool grows as well.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nbdist.finalisers import this_thread
from nbdist.rpc.futures import set_blocking_hook

__all__ = ["Job", "Pool"]

Job = Callable[[], object]

BRISK = 0.005
"""Seconds within which jobs must end for the other reader to leave what is at hand to the thread that runs them; as
long as Python lets a thread keep the GIL, so that one which had to wait for it is not taken for a slow one."""

STUCK_AFTER = 0.1
"""Seconds without a finished job, with jobs queued, after which one more thread starts."""

_log = logging.getLogger("nbdist.rpc")


class _PoolThread(threading.Thread):
    """A thread that is closed to the calls of finalisers from its first step on: it is started under a lock."""

    def _bootstrap(self) -> None:
        this_thread.is_closed = True
        super()._bootstrap()  # type: ignore[misc]


class Pool:
    """An elastic pool of threads, of which one or two read.

    ``read(timeout, soon)`` is called by up to ``readers`` threads at a time, and returns a job, or None. ``soon`` says
    that the thread has just done what came last, and no other has anything to do. One must return
    when ``wake()`` is called; that is done where ``has_more()`` says that those who wait will not be woken otherwise.
    Each thread calls ``begin()`` first.
    """

    def __init__(
        self,
        size: int,
        read: Callable[[float | None, bool], Job | None],
        wake: Callable[[], None],
        name: str,
        *,
        readers: int = 1,
        has_more: Callable[[], bool] = lambda: False,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._size = max(1, size)
        self._read = read
        self._wake = wake
        self._name = name
        self._condition = threading.Condition(threading.Lock())
        self._queue: deque[Job] = deque()
        self._readers = readers
        self._has_more = has_more
        self._begin = begin
        self._reading = 0
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._running = 0
        self._blocked = 0
        self._extra = 0
        self._finished_at = time.monotonic()
        self._brisk = False
        self._watching = False
        self._needed = threading.Event()
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

    def resize(self, size: int) -> None:
        """Let up to ``size`` threads run jobs from now on; jobs that run already end first."""
        with self._condition:
            self._size = max(1, size)
            self._provide()

    def submit(self, job: Job) -> None:
        """Run ``job`` on a thread of the pool."""
        was_closed = this_thread.is_closed
        try:
            this_thread.is_closed = True
            with self._condition:
                self._queue.append(job)
                self._provide()
        finally:
            this_thread.is_closed = was_closed

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
        thread = _PoolThread(target=self._run, name=f"{self._name}-{self._count}", daemon=True)
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
        """Run jobs, and read messages in between. What a finaliser calls in between is made by another thread."""
        set_blocking_hook(self._blocking)
        self._begin()
        thread = threading.current_thread()
        try:
            while (job := self._next()) is not None:
                started = time.monotonic()
                this_thread.is_closed = False
                try:
                    job()
                except BaseException:
                    _log.exception("a job of the pool failed")
                del job
                this_thread.is_closed = True
                with self._condition:
                    self._running -= 1
                    self._finished_at = time.monotonic()
                    self._brisk = self._finished_at - started < BRISK
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
                        self._provide_reader()
                        queued = self._queue.popleft()
                        if self._queue:
                            self._provide()  # two jobs may have been announced to one sleeper
                        return queued
                    self._extra = 0 if not self._queue else self._extra
                    if self._reading < self._readers:
                        self._reading += 1
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
        """With the lock held: see that somebody reads on."""
        if self._reading:
            if self._has_more() and not self._watching:
                self._wake()
        elif self._idle:
            self._condition.notify()
        else:
            self._spawn()

    def _lead(self) -> Job | None:
        """Read until there is a job for this thread; somebody else reads on."""
        is_first = True
        while True:
            self._leave_to_the_other()
            timeout = STUCK_AFTER if self._queue else None
            soon = is_first and not self._running and not self._queue
            is_first = False
            try:
                job = self._read(timeout, soon)
            except BaseException:
                _log.exception("reading failed")
                job = None
            with self._condition:
                if self._closed:
                    self._reading -= 1
                    self._wake()  # it has woken one of those who read, and that was this one
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
                self._reading -= 1
                self._provide_reader()
                return job

    def _leave_to_the_other(self) -> None:
        """While jobs end briskly, let the thread that runs them take what is at hand: waking others costs more.

        Many small calls that come at once then run one after the other, on one thread; a longer one is noticed here,
        and the rest goes on beside it.
        """
        while self._brisk and self._reading < self._readers and self._has_more() and not self._closed:
            finished = self._finished_at
            self._watching = True
            self._needed.wait(BRISK)
            self._needed.clear()
            self._watching = False
            if self._finished_at == finished:
                self._brisk = False

    def _unstick(self) -> None:
        if time.monotonic() - self._finished_at >= STUCK_AFTER:
            self._extra += max(1, self._extra // 2)
        self._provide()

    # -- blocking -----------------------------------------------------------------------------

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        try:
            this_thread.is_closed = True  # a thread of the pool comes here from a job, where it is not
            with self._condition:
                self._blocked += 1
                self._brisk = False
                if self._watching:
                    self._needed.set()
                if self._queue:
                    self._provide()
        finally:
            this_thread.is_closed = False
        try:
            yield
        finally:
            with self._condition:
                self._blocked -= 1
