"""The pool: it grows while its threads are blocked, and goes on reading whatever they do."""

import contextlib
import queue
import sys
import threading
import time

import pytest

from nbdist.rpc.calls.collecting import wait_all
from nbdist.rpc.futures import Future
from nbdist.rpc.pool import Pool
from nbdist.rpc.waits import blocking_wait

SOON = 20.0  # seconds; only a failing test waits that long


class Inbox:
    """What a pool reads from: jobs, as messages that are run by whoever reads them."""

    def __init__(self, patience=0.02):
        self.messages = queue.SimpleQueue()
        self.patience = patience  # as the agent's reader, which looks up now and then
        self.readers = 0
        self.most_readers = 0

    def read(self, timeout, soon):
        self.readers += 1
        self.most_readers = max(self.most_readers, self.readers)
        try:
            return self.messages.get(timeout=self.patience)
        except queue.Empty:
            return None
        finally:
            self.readers -= 1

    def put(self, job):
        self.messages.put(job)

    def put_all(self, jobs):
        for job in jobs:
            self.messages.put(job)

    def wake(self):
        self.messages.put(None)


@contextlib.contextmanager
def pool_of(size, inbox=None):
    inbox = inbox or Inbox()
    pool = Pool(size, inbox.read, inbox.wake, "test")
    pool.start()
    try:
        yield pool, inbox
    finally:
        assert pool.close(SOON)
        assert pool.threads == 0


def call(put, function):
    """Run `function` as a job; the future of its outcome."""
    future = Future()

    def job():
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    put(job)
    return future


@pytest.mark.parametrize("way", ["read", "submitted"])
def test_jobs_run(way):
    with pool_of(2) as (pool, inbox):
        put = inbox.put if way == "read" else pool.submit
        futures = [call(put, lambda number=number: number * 2) for number in range(500)]
        assert [future.wait(SOON) for future in futures] == [number * 2 for number in range(500)]
        assert inbox.most_readers == 1


@pytest.fixture
def nothing_is_stuck(monkeypatch):
    """The pool does not grow for a job that takes long."""
    monkeypatch.setattr("nbdist.rpc.pool.STUCK_AFTER_SECONDS", 1000.0)


def test_no_more_jobs_run_at_a_time_than_the_size_says(nothing_is_stuck):
    lock, running, most = threading.Lock(), 0, 0
    together = threading.Barrier(3)

    def job():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(SOON)  # three do run at the same time
        with lock:
            running -= 1

    with pool_of(3) as (_, inbox):
        for future in [call(inbox.put, job) for _ in range(9)]:
            future.wait(SOON)
        assert most == 3


@pytest.mark.parametrize("way", ["read", "submitted"])
@pytest.mark.parametrize("size", [1, 2, 16])
def test_nested_calls_200_deep_do_not_block_each_other(size, way):
    with pool_of(size) as (pool, inbox):
        put = inbox.put if way == "read" else pool.submit

        def nested(depth):
            return 0 if depth == 0 else 1 + call(put, lambda: nested(depth - 1)).wait(SOON)

        assert call(put, lambda: nested(200)).wait(SOON) == 200


def test_a_wait_for_several_futures_lets_the_pool_grow_too():
    with pool_of(1) as (_, inbox):

        def nested(depth):
            return 1 if depth == 0 else sum(wait_all([call(inbox.put, lambda: nested(depth - 1)) for _ in range(2)]))

        assert call(inbox.put, lambda: nested(5)).wait(SOON) == 32


def test_what_blocks_in_its_own_way_can_say_so():
    with pool_of(1) as (_, inbox):
        inner = threading.Event()

        def outer():
            inbox.put(inner.set)
            with blocking_wait():
                return inner.wait(SOON)

        assert call(inbox.put, outer).wait(SOON)


def test_jobs_that_block_unknown_to_the_pool_make_it_grow_after_a_while():
    """Each sleeps in a lock that the last one releases."""
    with pool_of(2) as (_, inbox):
        go = threading.Event()
        stuck = [call(inbox.put, lambda: go.wait(SOON)) for _ in range(12)]
        last = call(inbox.put, go.set)
        last.wait(SOON)
        assert all(future.wait(SOON) for future in stuck)


def test_reading_goes_on_while_all_threads_are_busy(nothing_is_stuck):
    """A reply, say, is acted on by the reader itself, whatever the pool's threads do."""
    inbox = Inbox()
    acted, read = threading.Event(), inbox.read

    def acting(timeout, soon):
        message = read(timeout, soon)
        if message == "reply":
            acted.set()
            return None
        return message

    inbox.read = acting
    with pool_of(1, inbox):
        busy, go = threading.Event(), threading.Event()

        def job():
            busy.set()
            return go.wait(SOON)

        first = call(inbox.put, job)
        assert busy.wait(SOON)
        later = call(inbox.put, lambda: "later")
        inbox.put("reply")
        assert acted.wait(SOON)
        assert not later.done()
        go.set()
        assert first.wait(SOON)
        assert later.wait(SOON) == "later"


def test_a_job_is_run_by_the_thread_that_read_it():
    inbox = Inbox()
    read_by, read = [], inbox.read

    def remembering(timeout, soon):
        job = read(timeout, soon)
        if job is not None:
            read_by.append(threading.get_ident())
        return job

    inbox.read = remembering
    with pool_of(20, inbox):  # room for those whose jobs are done and that have not noted it yet
        ran_by = [call(inbox.put, threading.get_ident).wait(SOON) for _ in range(20)]
    assert ran_by == read_by


def test_two_jobs_for_one_sleeping_thread_both_start():
    """The first one waits for the second, while reading sees nothing: its wake-up must not get lost."""
    asleep, done = threading.Event(), threading.Event()

    def read(timeout, soon):  # nothing comes, ever
        asleep.set()
        done.wait(10 * SOON)
        return None

    pool = Pool(4, read, done.set, "test")
    pool.start()
    assert asleep.wait(SOON)
    try:
        call(pool.submit, lambda: None).wait(SOON)  # makes a second thread, which falls asleep
        time.sleep(0.2)
        assert pool.threads == 2
        second = threading.Event()
        before = sys.getswitchinterval()
        sys.setswitchinterval(SOON)  # both are queued before the sleeper gets the GIL
        try:
            outcome = call(pool.submit, lambda: second.wait(SOON))
            pool.submit(second.set)
        finally:
            sys.setswitchinterval(before)
        assert outcome.wait(SOON)
        assert not done.is_set()
    finally:
        done.set()
        assert pool.close(SOON)


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_no_exception_in_a_job_ends_a_thread(error, caplog):
    with pool_of(1) as (pool, inbox):

        def fail():
            raise error("on purpose")

        for _ in range(20):
            inbox.put(fail)
            pool.submit(fail)
        assert call(inbox.put, lambda: "alive").wait(SOON) == "alive"
        assert "a job of the pool failed" in caplog.text
        call(inbox.put, lambda: None).wait(SOON)
    assert pool.active == 0


def test_no_exception_in_reading_ends_a_thread(caplog):
    inbox = Inbox()
    read, failures = inbox.read, iter(range(5))

    def failing(timeout, soon):
        if next(failures, None) is not None:
            raise KeyError("on purpose")
        return read(timeout, soon)

    inbox.read = failing
    with pool_of(1, inbox):
        assert call(inbox.put, lambda: "alive").wait(SOON) == "alive"
        assert "reading failed" in caplog.text


def test_a_grown_pool_shrinks_again():
    with pool_of(2) as (pool, inbox):

        def nested(depth):
            return 0 if depth == 0 else 1 + call(inbox.put, lambda: nested(depth - 1)).wait(SOON)

        call(inbox.put, lambda: nested(50)).wait(SOON)
        for _ in range(1000):
            if pool.threads <= 5:
                break
            call(inbox.put, lambda: None).wait(SOON)
        assert pool.threads <= 5


def test_closing_does_not_wait_for_a_job_that_goes_on_for_ever():
    inbox = Inbox()
    pool = Pool(2, inbox.read, inbox.wake, "test")
    pool.start()
    started, go = threading.Event(), threading.Event()

    def busy():
        started.set()
        go.wait(SOON)

    inbox.put(busy)
    assert started.wait(SOON)
    assert not pool.close(0.01)
    go.set()
    assert pool.close(SOON)


def test_a_job_may_close_its_own_pool():
    inbox = Inbox()
    pool = Pool(2, inbox.read, inbox.wake, "test")
    pool.start()
    assert call(inbox.put, lambda: pool.close(SOON)).wait(SOON)
    assert pool.close(SOON)


# --- two that read --------------------------------------------------------------------------------


class Pile(Inbox):
    """Messages of which more than one may be at hand: who reads one leaves the rest to be asked for."""

    def __init__(self):
        super().__init__()
        self.news = threading.Semaphore(0)

    def read(self, timeout, soon):
        self.readers += 1
        self.most_readers = max(self.most_readers, self.readers)
        try:
            if self.messages.empty():
                self.news.acquire(timeout=self.patience)
            return self.messages.get_nowait()
        except queue.Empty:
            return None
        finally:
            self.readers -= 1

    def put_all(self, jobs):
        for job in jobs:
            self.messages.put(job)
        self.wake()

    def wake(self):
        self.news.release()


@contextlib.contextmanager
def pool_of_two_readers(size):
    pile = Pile()
    pile.patience = SOON  # who reads is woken, or never
    pool = Pool(size, pile.read, pile.wake, "test", readers=2, has_more=lambda: not pile.messages.empty())
    pool.start()
    try:
        yield pool, pile
    finally:
        assert pool.close(SOON)
        assert pool.threads == 0


def pool_of_one_reader(size):
    return pool_of(size, Inbox(patience=SOON))


either = pytest.mark.parametrize("pool_of_either", [pool_of_one_reader, pool_of_two_readers])


@either
def test_many_quick_jobs_at_once_all_run(pool_of_either):
    with pool_of_either(4) as (_, pile):
        for count in (1, 2, 3, 500):
            done = threading.Semaphore(0)
            pile.put_all([done.release] * count)
            for _ in range(count):
                assert done.acquire(timeout=SOON)
        assert pile.most_readers <= 2


@either
def test_slow_jobs_among_quick_ones_hold_up_nobody(pool_of_either):
    with pool_of_either(4) as (_, pile):
        held, done = threading.Event(), threading.Semaphore(0)

        def slow():
            held.wait(SOON)
            done.release()

        for _ in range(3):
            pile.put_all([*[done.release] * 50, slow])
        pile.put_all([done.release] * 50)
        for _ in range(200):
            assert done.acquire(timeout=SOON)
        assert not done.acquire(blocking=False)
        held.set()
        for _ in range(3):
            assert done.acquire(timeout=SOON)


@either
def test_jobs_that_wait_for_jobs_at_hand_do_not_wait_long(pool_of_either):
    with pool_of_either(2) as (_, pile):
        answers = [Future() for _ in range(40)]
        done = [Future() for _ in range(40)]

        def ask(number):
            answers[number].wait()
            done[number].set_result(number)

        jobs = [lambda n=n: ask(n) for n in range(40)] + [lambda n=n: answers[n].set_result(n) for n in range(40)]
        pile.put_all(jobs)
        assert wait_all(done, SOON) == list(range(40))


@pytest.mark.parametrize("way", ["read", "submitted"])
def test_no_thread_is_started_for_what_another_that_starts_will_do(way):
    """On a busy machine a thread may begin long after it was started."""
    inbox, first, slow = Inbox(), threading.Semaphore(1), threading.Event()

    def begin():
        if not first.acquire(blocking=False):
            assert slow.wait(SOON)

    pool = Pool(4, inbox.read, inbox.wake, "test", begin=begin)
    pool.start()
    try:
        put, most = (inbox.put, 2) if way == "read" else (pool.submit, 5)
        ran = [call(put, int) for _ in range(300)]
        if way == "read":  # by the first thread
            assert wait_all(ran, SOON) == [0] * 300
        assert pool.threads <= most
        slow.set()
        assert wait_all(ran, SOON) == [0] * 300
    finally:
        slow.set()
        assert pool.close(SOON)


@pytest.mark.parametrize("blocks", [False, True], ids=["sleeps in a lock", "waits for a call"])
def test_another_thread_reads_while_a_job_lasts_that_comes_after_quick_ones(blocks):
    with pool_of_one_reader(4) as (_, inbox):
        for _ in range(50):
            call(inbox.put, int).wait(SOON)
            freed = threading.Event()
            answer = Future()
            late = call(inbox.put, answer.wait if blocks else lambda freed=freed: freed.wait(SOON))
            call(inbox.put, (lambda answer=answer: answer.set_result(None)) if blocks else freed.set)
            late.wait(SOON)
