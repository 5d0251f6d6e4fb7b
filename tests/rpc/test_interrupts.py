"""The watch for Ctrl-C wakes the main thread, and leaves the process as it found it, whoever closes what, and when."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest

from nbdist.rpc.calls import keyboard_interrupts
from nbdist.rpc.calls.keyboard_interrupts import InterruptWatch


@pytest.fixture(autouse=True)
def wakeup_file():
    before = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(before)


def current() -> int:
    found = signal.set_wakeup_fd(-1)
    if found != -1:
        signal.set_wakeup_fd(found)
    return found


def watch() -> InterruptWatch:
    found = InterruptWatch.start(lambda: None)
    assert found is not None
    return found


def test_what_was_there_is_put_back():
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    with mine, theirs:
        signal.set_wakeup_fd(mine.fileno())
        watch().close()
        assert current() == mine.fileno()
        signal.set_wakeup_fd(-1)


def test_what_was_there_may_be_gone_by_then():
    read, write = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(write)
    opened = watch()
    os.close(read)
    os.close(write)
    opened.close()
    assert current() == -1


def test_one_closed_in_another_thread_leaves_no_dangling_file():
    opened = watch()
    thread = threading.Thread(target=opened.close)
    thread.start()
    thread.join()
    os.fstat(current())  # what `signal` will write to is still a file
    watch().close()
    os.fstat(current())


def test_signals_still_reach_who_was_there():
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    theirs.settimeout(5)
    with mine, theirs:
        signal.set_wakeup_fd(mine.fileno())
        opened = watch()
        handler = signal.signal(signal.SIGUSR1, lambda *_: None)
        try:
            signal.raise_signal(signal.SIGUSR1)
            assert theirs.recv(8) == bytes([signal.SIGUSR1])
        finally:
            signal.signal(signal.SIGUSR1, handler)
            opened.close()
            signal.set_wakeup_fd(-1)


def test_only_the_main_thread_can_watch():
    found: list[InterruptWatch | None] = []
    thread = threading.Thread(target=lambda: found.append(InterruptWatch.start(lambda: None)))
    thread.start()
    thread.join()
    assert found == [None]


def test_a_main_thread_that_the_kernel_does_not_tell_is_woken():
    """Here the main thread blocks the signal, so the watch's thread is told; a busy machine does so now and then."""
    opened = watch()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    begun = time.monotonic()
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(20)
        assert time.monotonic() - begun < 15
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, before)
        opened.close()
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL


def test_a_handler_of_the_users_is_neither_replaced_nor_called():
    called: list[int] = []
    before = signal.signal(signal.SIGURG, lambda number, frame: called.append(number))
    opened = watch()
    try:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(5)
        opened.close()
        assert signal.getsignal(signal.SIGURG) is not signal.SIG_DFL
        assert not called
    finally:
        signal.signal(signal.SIGURG, before)


def test_ctrl_c_in_a_forked_process_wakes_nobody_here(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[bool] = []
    monkeypatch.setattr(keyboard_interrupts, "wake_main_thread", lambda: woken.append(True))
    found = watch()
    try:
        child = os.fork()
        if not child:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                os._exit(current() != -1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        time.sleep(0.2)
        assert not woken
    finally:
        found.close()
