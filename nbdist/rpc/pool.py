"""The thread pool of an agent: threads take turns at reading messages, and the thread that reads a request runs it.

So a request never passes from one thread to another; only the turn at reading passes. To wake a thread for each message
would take longer than to run a small function, so the turn rarely passes:

- Some channels let two threads wait for messages at once, and wake one of them for each message. While one thread runs
  a request, the other one already waits for the next.
- With other channels only one thread may wait for messages, and wakes another one before it runs a request.

The life of a thread of the pool::

    start ─> idle: sleep until there is work ──> take a queued job ────────────┐
              ^        │                                                       v
              │        └── fewer than `readers` read? ──> read until a job  ─> run the job
              │                                           comes              │
              └──────────────────────────────────────────────────────────────┘

A *job* is a function for the pool, such as one that runs a request. Up to ``size`` threads may run jobs. A thread that
waits for another call does not count, so nested and recursive calls cannot use up the pool. The pool also grows when
jobs are queued and no job has finished for a while: a job may wait for a lock that another call must release. An idle
thread ends if more than ``size`` others are idle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nbdist.finalisers import this_thread
from nbdist.rpc.waits import set_blocking_hook

Job = Callable[[], object]
"""A function without arguments that a thread of the pool runs once; its result is ignored."""

# Python's default time for a thread to keep the GIL, so a job that has waited for the GIL once is not slow.
QUICK_JOB_SECONDS = 0.005
"""While jobs end within this time, the second reader leaves waiting messages to the thread that runs jobs."""

STUCK_AFTER_SECONDS = 0.1
"""Seconds after which the pool may start more threads, if jobs are queued and none has finished for that long."""

_log = logging.getLogger("nbdist.rpc")


class _PoolThread(threading.Thread):
    """A thread in which finalisers may not wait for calls, from its first step on: the pool's lock is held then."""

    def _bootstrap(self) -> None:
        this_thread.is_closed = True
        super()._bootstrap()  # type: ignore[misc]


class Pool:
    """An elastic pool of threads that run jobs. One or two of them at a time read messages, which bring jobs.

    The caller of a private method holds the lock, except for `_run`, `_next`, `_read_until_job` and
    `_leave_to_the_other`, which are steps of a thread's life, and `_blocking`.
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
        """Make a pool without threads; `start` starts the first thread.

        ``read(timeout, soon)`` waits for a message and returns a job, or None. Up to ``readers`` threads call it at a
        time. ``soon`` is True if the thread has just finished the last job and no other thread has anything to do.
        After ``wake()``, one of the threads in ``read`` must return. ``has_more()`` says that there are messages for
        which the channel will wake no reader. Each new thread calls ``begin()`` first.
        """
        self.size = max(1, size)
        """The most threads that run jobs at a time, beside those that wait for other calls."""
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
        self._starting: set[threading.Thread] = set()  # the threads that were started and have not had the lock yet
        self._running = 0
        self._blocked: list[int] = []
        self._extra = 0  # the number of threads beyond ``size`` that may run jobs, because the others are stuck
        self._finished_at = time.monotonic()
        self._brisk = False  # True while jobs end within `QUICK_JOB_SECONDS` seconds
        self._watching = False  # True while the second reader waits in `_leave_to_the_other`
        self._needed = threading.Event()  # wakes the second reader in `_leave_to_the_other`
        self._closed = False
        self._count = 0

    def start(self) -> None:
        """Start the first thread, which reads."""
        with self._condition:
            self._spawn()

    @property
    def threads(self) -> int:
        """The number of threads."""
        return len(self._threads)

    @property
    def active(self) -> int:
        """The number of jobs that are running or queued."""
        return self._running + len(self._queue)

    def resize(self, size: int) -> None:
        """Let up to ``size`` threads, at least 1, run jobs from now on. Jobs that are running are not stopped."""
        with self._condition:
            self.size = max(1, size)
            self._provide()

    def submit(self, job: Job) -> None:
        """Run ``job`` on a thread of the pool; its errors are logged. After `close` the job may never run."""
        was_closed = this_thread.is_closed
        try:
            this_thread.is_closed = True
            # A finaliser that Python runs in here must not wait for a call: this thread has the pool's lock.
            with self._condition:
                self._queue.append(job)
                self._provide()
        finally:
            this_thread.is_closed = was_closed

    def close(self, timeout: float) -> bool:
        """End all threads, wait ``timeout`` seconds at most; return whether all have ended. Queued jobs do not run."""
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
        self._starting.add(thread)
        try:
            thread.start()
        except BaseException:  # no thread could be started, or Ctrl-C: nothing else takes this one out
            self._starting.discard(thread)
            raise
        self._threads.add(thread)

    def _capacity(self, more: int = 0) -> bool:
        """Return whether ``more`` jobs and another may run now, by the limit."""
        return self._running - len(self._blocked) + more < self.size + self._extra

    def _provide(self) -> None:
        """Wake an idle thread for queued jobs, or start one if the limit allows it."""
        if self._idle:
            self._condition.notify()
        elif self._queue and self._capacity(len(self._starting)):
            self._spawn()

    def _run(self) -> None:
        """Run jobs, and read messages in between, until the pool is closed: the body of each thread."""
        set_blocking_hook(self._blocking)
        thread = threading.current_thread()
        try:
            self._begin()
        finally:
            with self._condition:
                self._starting.discard(thread)
        try:
            started = None
            while (job := self._next(started)) is not None:
                started = time.monotonic()
                this_thread.is_closed = False
                try:
                    job()
                except BaseException:  # a job may raise anything (test_no_exception_in_a_job_ends_a_thread)
                    _log.exception("a job of the pool failed")
                del job  # else the job's values would live until this thread has another one
                this_thread.is_closed = True
        finally:
            with self._condition:
                self._threads.discard(thread)

    def _note_end(self, started: float) -> None:
        self._finished_at = time.monotonic()
        self._brisk = self._finished_at - started < QUICK_JOB_SECONDS
        self._running -= 1

    def _next(self, started: float | None) -> Job | None:
        """Return the next job for this thread, which may read it itself; None if the thread must end."""
        while True:
            with self._condition:
                if started is not None:  # with the lock held until this thread is idle, reads or has a job again
                    self._note_end(started)
                    started = None
                while True:
                    if self._closed:
                        return None
                    if self._queue and self._capacity():
                        self._running += 1
                        self._provide_reader()
                        queued = self._queue.popleft()
                        if self._queue:
                            self._provide()  # one idle thread may have been woken for two jobs
                        return queued
                    # With an empty queue, no job is stuck any more.
                    self._extra = 0 if not self._queue else self._extra
                    if self._reading < self._readers:
                        self._reading += 1
                        break
                    if self._idle > self.size:  # enough others sleep
                        return None
                    self._idle += 1
                    self._condition.wait()
                    self._idle -= 1
            job = self._read_until_job()
            if job is not None:
                return job

    def _provide_reader(self) -> None:
        """Make sure that a thread reads messages while this thread runs a job."""
        if self._reading:
            # All other messages wake a reader themselves.
            if self._has_more() and not self._watching:
                self._wake()
        elif self._idle:
            self._condition.notify()
        elif not self._starting:  # a thread that starts takes a job or reads: on a busy machine it may come late
            self._spawn()

    def _read_until_job(self) -> Job | None:
        """Read until there is a job for this thread, and return it; None once the pool is closed."""
        is_first = True
        while True:
            self._leave_to_the_other()
            timeout = STUCK_AFTER_SECONDS if self._queue else None
            soon = is_first and not self._running and not self._queue
            is_first = False
            try:
                job = self._read(timeout, soon)
            except BaseException:  # whatever it is, the agent reads on (test_no_exception_in_reading_ends_a_thread)
                _log.exception("reading failed")
                job = None
            with self._condition:
                if self._closed:
                    self._reading -= 1
                    self._wake()  # `close` has woken one reader, which was this thread; now it wakes the next
                    return None
                if job is None:
                    if self._queue:
                        self._unstick()
                    continue
                # Enough jobs run already: queue this one, and read on.
                if not self._capacity():
                    self._queue.append(job)
                    continue
                if self._queue:
                    self._queue.append(job)
                    job = self._queue.popleft()
                self._running += 1
                self._reading -= 1
                try:
                    self._provide_reader()
                except RuntimeError:  # this thread reads again after the job
                    _log.exception("no thread could be started to read messages while a job runs")
                return job

    def _leave_to_the_other(self) -> None:
        """Wait while the other thread ends its jobs quickly and there are messages that it can read itself."""
        # For quick jobs, a switch to this thread costs more than it gains: many small calls at once run one after
        # another on the other thread. When a job takes long or waits for another call, this thread reads, and the next
        # calls run beside that job.
        while self._brisk and self._reading < self._readers and self._has_more() and not self._closed:
            finished = self._finished_at
            self._watching = True
            self._needed.wait(QUICK_JOB_SECONDS)
            self._needed.clear()
            self._watching = False
            if self._finished_at == finished:
                self._brisk = False

    def _unstick(self) -> None:
        """Allow more threads if no job has finished for `STUCK_AFTER_SECONDS` seconds; give queued jobs a thread."""
        if time.monotonic() - self._finished_at >= STUCK_AFTER_SECONDS:
            self._extra += max(1, self._extra // 2)  # by half, since many jobs may wait for one another
        self._provide()

    # -- blocking -----------------------------------------------------------------------------

    def is_blocked(self, thread: int) -> bool:
        """Return whether the thread with this ident waits for another call (`blocking_wait`). Needs no lock."""
        return thread in self._blocked

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        """Leave this thread out of the count towards ``size`` during the block, in which it waits for another call."""
        try:
            this_thread.is_closed = True  # the thread comes here from a job, where it is open
            with self._condition:
                self._blocked.append(threading.get_ident())
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
                self._blocked.remove(threading.get_ident())
