"""When handlers of signals run that come in the midst of something."""

import os
import signal
import threading

import pytest

from nbdist.signals import Deferral


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
        with Deferral() as deferral:
            assert not deferral.is_due
            strike()
            assert deferral.is_due
            assert came == []

    with pytest.raises(Struck):
        act()
    assert came == [signal.SIGUSR1]


def test_within_another_it_runs_at_the_end_of_the_outer_one(came):
    def act():
        with Deferral() as outer:
            with Deferral():
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

    with Deferral(sleep.__code__) as deferral:
        with pytest.raises(Struck):
            sleep()
        assert not deferral.is_due
    assert came == [signal.SIGUSR1]


def test_in_another_thread_nothing_is_deferred():
    before = signal.getsignal(signal.SIGINT)
    found = []

    def look():
        with Deferral():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_child_process_has_the_handlers_that_were_there_before(came):
    with Deferral(), Deferral():
        child = os.fork()
        if not child:
            os._exit(0 if signal.getsignal(signal.SIGUSR1).__name__ == "note" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
