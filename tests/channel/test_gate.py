"""Who is woken by news, and who is not while the gate is shut."""

import os
import select
import threading
import time

import pytest

from nbdist.channel.gate import OPEN_AFTER, Gate


@pytest.fixture
def file():
    number = os.eventfd(0, os.EFD_NONBLOCK)
    yield number
    os.close(number)


@pytest.fixture
def gate(file):
    gate = Gate()
    gate.news.register(file, select.EPOLLIN | select.EPOLLET)
    yield gate
    gate.close()


def me():
    return threading.get_ident()


def elsewhere(function):
    """Return what a function returns in another thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_news_wake(gate, file):
    assert not gate.wait(0)
    os.eventfd_write(file, 1)
    assert gate.wait(5)
    assert gate.news.poll(0) == [(file, select.EPOLLIN)]
    assert not gate.wait(0)


def test_while_it_is_shut_only_its_owner_hears_of_news(gate, file):
    assert gate.shut()
    os.eventfd_write(file, 1)
    assert not gate.wait(0)
    assert gate.news.poll(0) == [(file, select.EPOLLIN)]
    gate.open(me())
    os.eventfd_write(file, 1)
    assert gate.wait(5)


def test_news_that_the_owner_leaves_wake_when_it_opens(gate, file):
    gate.shut()
    os.eventfd_write(file, 1)
    gate.open(me())
    assert gate.wait(5)


def test_news_that_the_owner_takes_wake_nobody(gate, file):
    gate.shut()
    os.eventfd_write(file, 1)
    os.eventfd_read(file)
    gate.open(me())
    assert not gate.wait(0.05)


def test_it_has_one_owner_who_alone_opens_it(gate):
    assert gate.shut()
    assert not gate.shut()
    assert not elsewhere(gate.shut)
    elsewhere(lambda: gate.open(me()))
    assert gate.is_shut_by(me())
    gate.open(me())
    assert not gate.is_shut_by(me())
    gate.open(me())
    assert elsewhere(gate.shut)


def test_who_sleeps_opens_a_gate_that_its_owner_has_left_shut(gate, file):
    elsewhere(gate.shut)
    os.eventfd_write(file, 1)
    time.sleep(2 * OPEN_AFTER)
    assert not gate.wait(0)
    assert gate.wait(5)


def test_a_gate_that_has_just_been_shut_is_left_shut(gate):
    gate.shut()
    gate.wait(0)
    assert gate.is_shut_by(me())


@pytest.mark.parametrize("method", ["shut", "open"])
@pytest.mark.parametrize("is_done", [False, True])
def test_ctrl_c_while_it_moves_does_not_jam_it(gate, file, method, is_done):
    inner = gate._gate

    class Interrupted:
        """The epoll, whose method Ctrl-C cuts short before or after the fact."""

        def __getattr__(self, name):
            def interrupt(*arguments):
                if is_done:
                    getattr(inner, name)(*arguments)
                raise KeyboardInterrupt

            return interrupt

    if method == "open":
        gate.shut()
    gate._gate = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        gate.shut() if method == "shut" else gate.open(me())
    gate._gate = inner
    gate.open(me())
    os.eventfd_write(file, 1)
    assert gate.wait(5)
    assert gate.shut()
    assert not gate.wait(0)


class SignalledEpoll:
    """The epoll, with a signal handler that runs just before the gate moves for the first time."""

    def __init__(self, inner, handler):
        self._inner, self._handler = inner, handler

    def modify(self, *arguments):
        handler, self._handler = self._handler, lambda: None
        handler()
        self._inner.modify(*arguments)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_while_a_signal_handler_runs_in_the_middle_others_read(gate, file):
    """The handler may make a call, and wait until another thread reads the answer."""
    heard = []

    def handler():
        others = threading.Thread(target=lambda: heard.extend([gate.shut(), gate.wait(0)]), daemon=True)
        time.sleep(2 * OPEN_AFTER)
        others.start()
        others.join(20)

    gate._gate = SignalledEpoll(gate._gate, handler)
    assert gate.shut()
    assert heard == [False, True]
    gate.open(me())
    os.eventfd_write(file, 1)
    assert gate.wait(5)


def test_a_signal_handler_in_the_middle_may_shut_and_open_it(gate, file):
    shut = []

    def handler():
        shut.append(gate.shut())
        gate.open(me())

    gate._gate = SignalledEpoll(gate._gate, handler)
    assert not gate.shut()
    assert shut == [False]
    os.eventfd_write(file, 1)
    assert gate.wait(5)


def test_opening_after_the_end_does_nothing(gate):
    gate.shut()
    gate.close()
    gate.open(me())
    gate.shut()


def test_in_a_child_process_nobody_is_waited_for(gate):
    elsewhere(gate._lock.acquire)
    elsewhere(lambda: setattr(gate, "_owner", me()))
    child = os.fork()
    if not child:
        try:
            gate.forked()
            os._exit(0 if gate.shut() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
