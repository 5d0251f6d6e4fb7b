"""Several workers are asked at once: their answers, errors and silence are told apart, and no call stays pending."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref

import pytest
from helpers.waiting import wait_until

from nbdist.errors import EncodeError, RemoteError, RpcTimeout, UnknownWorker, WorkerLost
from nbdist.rpc.agent import active_agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.latch import Latch
from nbdist.rpc.waits import set_interrupt_hook
from nbdist.testing import World

meeting = threading.Barrier(2)
begun = threading.Semaphore(0)
release = threading.Event()


@pytest.fixture
def world():
    release.clear()
    while begun.acquire(blocking=False):
        pass
    with World(4) as world, world[0].activate():
        yield world
        release.set()


def pending(world):
    return world[0].statistics()["pending_calls"]


def name():
    return active_agent().me.name


def refuse(*workers):
    if name() in workers:
        raise ValueError(f"no, says {name()}")
    return name()


def hang(*workers):
    """Wait until the test releases it, on these workers."""
    if name() in workers:
        begun.release()
        release.wait(30)
    return name()


def spin():
    begun.release()
    while not release.is_set():
        pass


def meet():
    meeting.wait(30)


def time_out():
    raise RpcTimeout("what I asked has not answered")


def test_each_worker_gets_its_own_arguments(world):
    answers = ask_each(world[0], max, {"worker3": (3, 0), "worker1": (1, 0), "worker0": (5, 7)})
    assert list(answers.values.items()) == [("worker3", 3), ("worker1", 1), ("worker0", 7)]
    assert not answers.errors
    assert not answers.silent
    assert answers.or_raise() == answers.values
    assert ask_each(world[0], max, {}).or_raise() == {}


def test_all_calls_are_sent_before_the_first_is_waited_for(world):
    assert ask_each(world[0], meet, dict.fromkeys(["worker1", "worker2"], ())).or_raise()


def test_one_error_is_itself_and_the_others_have_answered(world):
    answers = ask_each(world[0], refuse, dict.fromkeys(["worker1", "worker2", "worker3"], ("worker2",)))
    assert answers.values == {"worker1": "worker1", "worker3": "worker3"}
    assert list(answers.errors) == ["worker2"]
    with pytest.raises(ValueError, match="no, says worker2") as raised:
        answers.or_raise()
    [note] = raised.value.__notes__
    assert note.startswith("raised on worker2, in refuse:")


def test_the_first_error_in_the_order_of_the_workers_has_a_note_of_the_others(world):
    answers = ask_each(world[0], refuse, dict.fromkeys(["worker3", "worker1", "worker2"], ("worker1", "worker3")))
    with pytest.raises(ValueError, match="no, says worker3") as raised:
        answers.or_raise()
    assert raised.value.__notes__[1:] == ["1 more worker failed:\n  worker1: ValueError: no, says worker1"]


def test_errors_that_are_expected_are_left_out(world):
    answers = ask_each(world[0], refuse, dict.fromkeys(["worker1", "worker7"], ()))
    assert answers.or_raise(but=UnknownWorker) == {"worker1": "worker1"}
    with pytest.raises(UnknownWorker, match="worker7"):
        answers.or_raise(but=WorkerLost)


def test_a_dead_worker_counts_at_once(world):
    world.kill(2)
    answers = ask_each(world[0], refuse, dict.fromkeys(["worker1", "worker2"], ()), timeout=0)
    assert answers.values == {"worker1": "worker1"}
    assert isinstance(answers.errors["worker2"], WorkerLost)
    assert not answers.silent
    assert not pending(world)


def test_a_worker_that_dies_meanwhile_counts_at_once(world):
    def kill():
        begun.acquire(timeout=30)
        world.kill(2)

    thread = threading.Thread(target=kill)
    thread.start()
    answers = ask_each(world[0], hang, dict.fromkeys(["worker1", "worker2", "worker3"], ("worker2",)), timeout=0)
    thread.join()
    assert sorted(answers.values) == ["worker1", "worker3"]
    assert isinstance(answers.errors["worker2"], WorkerLost)


def test_a_silent_worker_is_named_and_its_call_is_not_pending(world):
    answers = ask_each(world[0], hang, dict.fromkeys(["worker1", "worker2"], ("worker2",)), timeout=2)
    assert answers.values == {"worker1": "worker1"}
    assert answers.silent == ["worker2"]
    assert not pending(world)
    with pytest.raises(RpcTimeout, match=r"RPC ran for more than 2 s .*hang on worker2"):
        answers.or_raise()


def test_the_limit_is_kept_while_the_clocks_of_calls_stand_still(world):
    world[0].freeze(world[1].me.incarnation)
    answers = ask_each(world[0], hang, dict.fromkeys(["worker1", "worker2"], ("worker1", "worker2")), timeout=0.1)
    assert answers.silent == ["worker1", "worker2"]
    assert "worker1 did not answer within 0.1 s, and may still do" in str(answers.errors["worker1"])
    assert not pending(world)
    release.set()  # the answers that come now are dropped
    assert ask_each(world[0], name, {"worker1": ()}, timeout=30).or_raise() == {"worker1": "worker1"}


def test_a_worker_whose_function_waited_in_vain_is_not_silent(world):
    answers = ask_each(world[0], time_out, {"worker1": ()})
    assert isinstance(answers.errors["worker1"], RpcTimeout)
    assert not answers.silent


def test_an_argument_that_cannot_be_sent_leaves_no_call_pending(world):
    with pytest.raises(EncodeError, match="a lock, which cannot be sent"):
        ask_each(world[0], hang, {"worker1": ("worker1",), "worker2": ("worker2", threading.Lock())})
    assert not pending(world)


def interrupted(world, function, args=()):
    """Ask two workers, which never answer, and interrupt the wait once both have begun; return the error."""
    main = threading.get_ident()

    def interrupt():
        for _ in range(2):
            begun.acquire(timeout=30)
        wait_until(lambda: sys._current_frames()[main].f_code is Latch.wait.__code__)
        signal.pthread_kill(main, signal.SIGINT)
        while not over.wait(0.05):  # the signal may have come right before the thread fell asleep
            signal.pthread_kill(main, signal.SIGURG)

    before = signal.signal(signal.SIGURG, lambda *_: None)
    over = threading.Event()
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as raised:
        ask_each(world[0], function, dict.fromkeys(["worker1", "worker2"], args))
    over.set()
    thread.join()
    signal.signal(signal.SIGURG, before)
    assert not pending(world)
    return raised.value


def test_ctrl_c_ends_the_wait(world):
    interrupted(world, hang, ("worker1", "worker2"))
    release.set()  # the answers that come now are dropped
    assert ask_each(world[0], name, {"worker1": ()}).or_raise() == {"worker1": "worker1"}


def test_ctrl_c_in_a_notebook_stops_all_calls_and_names_those_that_run_on(world):
    set_interrupt_hook(world[0].stopping.on_interrupt)
    try:
        assert not hasattr(interrupted(world, spin), "__notes__")
        world[0].stopping.patience = 0.1
        notes = interrupted(world, hang, ("worker1", "worker2")).__notes__
        assert ["worker1 has not stopped" in notes[0], "worker2 has not stopped" in notes[1]] == [True, True]
    finally:
        set_interrupt_hook(None)


def test_an_error_does_not_keep_itself_alive(world):
    gc.collect()
    gc.disable()
    try:
        try:
            ask_each(world[0], exit, {"worker1": ()}).or_raise()
        except RemoteError as error:
            gone = weakref.ref(error)
        wait_until(lambda: gone() is None)  # once the thread that brought the answer has forgotten it
    finally:
        gc.enable()
