"""Who is woken by news, and who is not while the gate is shut."""

import os
import select
import threading
import time
from types import SimpleNamespace

import pytest

from nbdist.channel.gate import OPEN_AFTER, Gate


@pytest.fixture
def file():
    number = os.eventfd(0, os.EFD_NONBLOCK)
    yield number
    os.close(number)


class Epoll:
    """An epoll. Once each, `before` and `after` run just before and after the gate moves, as signal handlers do."""

    def __init__(self):
        self._epoll = select.epoll()
        self.before = self.after = lambda: None

    def modify(self, *arguments):
        before, self.before = self.before, lambda: None
        before()
        self._epoll.modify(*arguments)
        after, self.after = self.after, lambda: None
        after()

    def __getattr__(self, name):
        return getattr(self._epoll, name)


@pytest.fixture
def epolls(monkeypatch):
    """The epolls that gates are made of; the last one is moved by the last gate."""
    made = []
    monkeypatch.setattr(
        "nbdist.channel.gate.select",
        SimpleNamespace(epoll=lambda: made.append(Epoll()) or made[-1], EPOLLIN=select.EPOLLIN),
    )
    return made


@pytest.fixture
def gate(file, epolls):
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
    assert gate.owner == me()
    gate.open(me())
    assert gate.owner != me()
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
    assert gate.owner == me()


@pytest.mark.parametrize("method", ["shut", "open"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_while_it_moves_does_not_jam_it(gate, epolls, file, method, moment):
    def interrupt():
        raise KeyboardInterrupt

    if method == "open":
        gate.shut()
    setattr(epolls[-1], moment, interrupt)
    with pytest.raises(KeyboardInterrupt):
        gate.shut() if method == "shut" else gate.open(me())
    gate.open(me())
    os.eventfd_write(file, 1)
    assert gate.wait(5)
    assert gate.shut()
    assert not gate.wait(0)


def test_while_a_signal_handler_runs_in_the_middle_others_read(gate, epolls, file):
    """The handler may make a call, and wait until another thread reads the answer."""
    heard = []

    def handler():
        others = threading.Thread(target=lambda: heard.extend([gate.shut(), gate.wait(0)]), daemon=True)
        time.sleep(2 * OPEN_AFTER)
        others.start()
        others.join(20)

    epolls[-1].before = handler
    assert gate.shut()
    assert heard == [False, True]
    gate.open(me())
    os.eventfd_write(file, 1)
    assert gate.wait(5)


def test_a_signal_handler_in_the_middle_may_shut_and_open_it(gate, epolls, file):
    shut = []

    def handler():
        shut.append(gate.shut())
        gate.open(me())

    epolls[-1].before = handler
    assert not gate.shut()
    assert shut == [False]
    os.eventfd_write(file, 1)
    assert gate.wait(5)


def test_opening_after_the_end_does_nothing(gate):
    gate.shut()
    gate.close()
    gate.open(me())
    gate.shut()


def test_in_a_child_process_nobody_is_waited_for(gate, epolls):
    moving, forked = threading.Event(), threading.Event()
    epolls[-1].before = lambda: (moving.set(), forked.wait(20))
    mover = threading.Thread(target=gate.shut)
    mover.start()
    assert moving.wait(20)
    child = os.fork()
    if not child:
        try:
            gate.forked()
            os._exit(0 if gate.shut() else 1)
        finally:
            os._exit(2)
    forked.set()
    mover.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
