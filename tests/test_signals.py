"""When handlers of signals run that come in the midst of something."""

import contextlib
import gc
import os
import signal
import threading
import weakref

import pytest
from helpers.abuse.interrupts import Interrupts

from nbdist.signals import DeferredSignals


class Struck(BaseException):
    """What the handler raises."""


@pytest.fixture
def came():
    """The signals whose handler has run, which raises `Struck` each time."""
    numbers = []

    def note(number, frame):
        numbers.append(number)
        raise Struck

    before = signal.signal(signal.SIGUSR1, note)
    yield numbers
    assert signal.getsignal(signal.SIGUSR1) is note
    signal.signal(signal.SIGUSR1, before)


def strike():
    signal.raise_signal(signal.SIGUSR1)


def test_a_handler_runs_at_the_end(came):
    def act():
        with DeferredSignals() as deferral:
            assert not deferral.is_due
            strike()
            assert deferral.is_due
            assert came == []

    with pytest.raises(Struck):
        act()
    assert came == [signal.SIGUSR1]


def test_within_another_it_runs_at_the_end_of_the_outer_one(came):
    def act():
        with DeferredSignals() as outer:
            with DeferredSignals():
                strike()
            assert outer.is_due
            assert came == []

    with pytest.raises(Struck):
        act()
    assert came == [signal.SIGUSR1]


def test_while_the_thread_sleeps_a_handler_runs_at_once(came):
    def sleep():
        signal.raise_signal(signal.SIGUSR1)
        raise AssertionError("slept on")

    with DeferredSignals(sleep.__code__) as deferral:
        with pytest.raises(Struck):
            sleep()
        assert not deferral.is_due
    assert came == [signal.SIGUSR1]


def test_two_that_came_run_both_though_the_first_raises(came):
    seen = []
    before = signal.signal(signal.SIGUSR2, lambda *_: seen.append("second"))

    def act():
        with DeferredSignals():
            strike()
            signal.raise_signal(signal.SIGUSR2)

    try:
        with pytest.raises(Struck):
            act()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert came == [signal.SIGUSR1]
    assert seen == ["second"]


def test_a_handler_that_raises_at_any_moment_leaves_all_others_as_they_were(came):
    """As a user's timeout with `signal.setitimer` does: for a time Ctrl-C was deaf for good after some of them."""

    def act():
        for _ in range(4):
            with DeferredSignals():
                pass

    numbers = (signal.SIGINT, signal.SIGUSR1)  # one is deferred before SIGALRM, one after it
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    before = [signal.getsignal(number) for number in numbers]
    interrupts = Interrupts()
    raises = signal.getsignal(signal.SIGALRM)
    gc.disable()  # Python swallows what is raised inside hypothesis's callback of the collector
    try:
        for _ in range(3000):
            interrupts.during(act, 4e-5)
            assert [signal.getsignal(number) for number in numbers] == before
            assert signal.getsignal(signal.SIGALRM) is raises
    finally:
        gc.enable()
        interrupts.close()
    assert interrupts.came > 1500


@pytest.mark.parametrize("name", ["SIGCHLD", "SIGXCPU", "SIGWINCH"])
def test_signals_of_all_kinds_are_deferred(name):
    """Torch's DataLoader has a handler of SIGCHLD that raises."""
    number, came = getattr(signal, name), []
    before = signal.signal(number, lambda *_: came.append(number))
    try:
        with DeferredSignals():
            signal.raise_signal(number)
            assert came == []
        assert came == [number]
    finally:
        signal.signal(number, before)


def test_very_many_may_come():
    came = []
    before = signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
    try:
        with DeferredSignals():
            for _ in range(2000):
                strike()
        assert len(came) == 2000
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_a_handler_sets_stays():
    """Such as one for the first Ctrl-C, after which a second one is to kill."""
    before = signal.signal(signal.SIGUSR1, lambda *_: signal.signal(signal.SIGUSR1, signal.SIG_IGN))
    try:
        with DeferredSignals():
            strike()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_error_at_the_end_keeps_nothing_alive(came):
    class Local:
        """What a function has while it is cut short."""

    kept = []

    def act():
        local = Local()
        kept.append(weakref.ref(local))
        with DeferredSignals():
            strike()

    gc.disable()
    try:
        with contextlib.suppress(Struck):
            act()
        assert kept[0]() is None
    finally:
        gc.enable()


def test_in_another_thread_nothing_is_deferred():
    before = signal.getsignal(signal.SIGINT)
    found = []

    def look():
        with DeferredSignals():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_child_process_has_the_handlers_that_were_there_before(came):
    with DeferredSignals(), DeferredSignals():
        child = os.fork()
        if not child:
            os._exit(0 if signal.getsignal(signal.SIGUSR1).__name__ == "note" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
