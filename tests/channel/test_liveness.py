"""Hearing at once that a process has ended."""

import os
import signal
import subprocess
import threading

import pytest
from helpers.processes import file_table

from nbdist.channel.process_watch import ProcessWatch, is_alive, started_at

SOON = 30.0


class Ended:
    """Hears of the ends, and lets a test wait for them."""

    def __init__(self):
        self.pids = []
        self._changed = threading.Condition()

    def __call__(self, pid):
        with self._changed:
            self.pids.append(pid)
            self._changed.notify_all()

    def wait_for(self, *pids):
        with self._changed:
            assert self._changed.wait_for(lambda: set(pids) <= set(self.pids), SOON), f"only {self.pids} ended"


@pytest.fixture(params=["pidfd", "polling"])
def watch(request, monkeypatch):
    """A watch, by the kernel's way and by the way for kernels without."""
    if request.param == "polling":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    ended = Ended()
    watch = ProcessWatch(ended)
    watch.ended = ended
    yield watch
    watch.close()


@pytest.fixture
def start():
    processes = []

    def start_one():
        process = subprocess.Popen(["sleep", "600"])
        processes.append(process)
        return process

    yield start_one
    for process in processes:
        process.kill()
        process.wait(SOON)


def test_a_process_is_known_by_its_pid_and_its_start(start):
    process = start()
    started = started_at(process.pid)
    assert started > 0
    assert started_at(os.getpid()) != 0
    assert is_alive(process.pid, started)
    assert not is_alive(process.pid, started + 1), "a pid that was used again"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process.pid, started), "a zombie has ended"
    process.wait(SOON)
    assert not is_alive(process.pid, started)
    assert started_at(process.pid) == 0


def test_where_the_start_is_not_known_the_pid_must_do(start):
    process = start()
    assert is_alive(process.pid, 0)
    assert is_alive(1, 0)
    process.kill()
    process.wait(SOON)
    assert not is_alive(process.pid, 0)


@pytest.mark.parametrize("reaped", [False, True])
def test_a_killed_process_is_reported_once(watch, start, reaped):
    process, other = start(), start()
    for one in (process, other):
        watch.watch(one.pid, started_at(one.pid))
    process.send_signal(signal.SIGKILL)
    if reaped:
        process.wait(SOON)
    watch.ended.wait_for(process.pid)
    other.kill()
    watch.ended.wait_for(other.pid)
    assert watch.ended.pids == [process.pid, other.pid]


def test_a_process_that_has_ended_already_is_reported(watch, start):
    process = start()
    started = started_at(process.pid)
    process.kill()
    process.wait(SOON)
    watch.watch(process.pid, started)
    watch.ended.wait_for(process.pid)


def test_a_reused_pid_is_reported(watch, start):
    """The process that was meant has ended; another one has its pid."""
    process = start()
    watch.watch(process.pid, started_at(process.pid) - 1)
    watch.ended.wait_for(process.pid)
    assert process.poll() is None


def test_watching_twice_is_watching_once(watch, start):
    process, last = start(), start()
    for _ in range(3):
        watch.watch(process.pid, started_at(process.pid))
    process.kill()
    watch.ended.wait_for(process.pid)
    watch.watch(last.pid, started_at(last.pid))
    last.kill()
    watch.ended.wait_for(last.pid)
    assert watch.ended.pids.count(process.pid) == 1


def test_a_full_file_table_is_no_reason_to_take_a_process_for_dead(watch, start):
    living, dead = start(), start()
    begun = started_at(living.pid), started_at(dead.pid)
    dead.kill()
    dead.wait(SOON)
    with file_table.full():
        assert is_alive(living.pid, begun[0])
        assert not is_alive(dead.pid, begun[1])  # the process table says so without a file
        watch.watch(living.pid, begun[0])  # there is no pidfd to be had, nor can its state be read
        watch.watch(dead.pid, begun[1])
        watch.ended.wait_for(dead.pid)  # in the same look the living one was taken for alive
    living.kill()
    watch.ended.wait_for(living.pid)
    assert watch.ended.pids == [dead.pid, living.pid]


def test_many_processes_at_once(watch, start):
    processes = [start() for _ in range(20)]
    for process in processes:
        watch.watch(process.pid, started_at(process.pid))
    for process in processes:
        process.kill()
    watch.ended.wait_for(*(process.pid for process in processes))


def test_a_listener_that_fails_hears_of_the_next_one(start, caplog):
    ended = Ended()

    def fail_first(pid):
        ended(pid)
        if len(ended.pids) == 1:
            raise ValueError("on purpose")

    watch = ProcessWatch(fail_first)
    try:
        for process in (start(), start()):
            watch.watch(process.pid, started_at(process.pid))
            process.kill()
            ended.wait_for(process.pid)
    finally:
        watch.close()
    assert "on purpose" in caplog.text


def test_a_listener_may_close_the_watch(start):
    closed = threading.Event()

    def close(_):
        watch.close()
        closed.set()

    watch, process = ProcessWatch(close), start()
    watch.watch(process.pid, started_at(process.pid))
    process.kill()
    assert closed.wait(SOON)


def test_a_closed_watch_leaves_nothing(start):
    before = len(os.listdir("/proc/self/fd"))
    process = start()
    for _ in range(5):
        watch = ProcessWatch(lambda pid: None)
        watch.watch(process.pid, started_at(process.pid))
        watch.close()
        watch.close()
        watch.watch(process.pid, started_at(process.pid))  # too late
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "nbdist-liveness" and thread.is_alive()]
