"""When a world may end: the leader's view of it, look by look."""

import itertools
import logging
import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from helpers.waiting import wait_until

import nbdist
from nbdist import rpc
from nbdist.rpc.world import shutdown as ending
from nbdist.rpc.world.shutdown import REMIND_AFTER, Reminder
from nbdist.rpc.world.survey import CLOSING, DRAINING, RELEASING, RUNNING, Survey
from nbdist.testing import Faults, World
from nbdist.wire.messages import ShutdownState

ALL = {1, 2, 3}


def state(round=DRAINING, sent=0, active=0):
    return ShutdownState(round, sent, active)


def quiet(round=DRAINING):
    return dict.fromkeys(ALL, state(round))


def test_a_quiet_world_ends_after_two_looks_a_round():
    survey = Survey(set(ALL))
    assert [survey.look(quiet()), survey.look(quiet())] == [False, True]
    assert survey.round == RELEASING
    assert [survey.look(quiet(RELEASING)), survey.look(quiet(RELEASING))] == [False, True]
    assert survey.round == CLOSING


@pytest.mark.parametrize("late", [{1}, {2}, {3}, {1, 2}, {1, 2, 3}])
def test_nobody_goes_before_all_want_to(late):
    survey = Survey(set(ALL))
    states = quiet() | dict.fromkeys(late, state(RUNNING))
    for _ in range(5):
        assert not survey.look(states)
        assert survey.missing() == late
    assert survey.round == DRAINING
    survey.look(quiet())
    assert survey.look(quiet())


def test_who_has_not_answered_is_missing():
    survey = Survey(set(ALL))
    assert survey.missing() == ALL
    survey.look({1: state(), 2: state()})
    assert survey.missing() == {3}
    assert not survey.look({3: state()})  # the first whole look
    assert survey.look({1: state()})


@pytest.mark.parametrize("where", sorted(ALL))
def test_nobody_goes_while_something_is_under_way(where):
    survey = Survey(set(ALL))
    for _ in range(5):
        assert not survey.look(quiet() | {where: state(active=1)})
    assert survey.round == DRAINING


@pytest.mark.parametrize("where", sorted(ALL))
def test_nobody_goes_while_messages_are_sent(where):
    """Each look sees a member that has nothing under way, and has sent a message since the look before."""
    survey = Survey(set(ALL))
    for sent in range(5):
        assert not survey.look(quiet() | {where: state(sent=sent)})
    assert survey.round == DRAINING


def test_two_looks_must_see_the_same():
    """A call was sent and answered between the looks: what it set off may have been missed."""
    survey = Survey(set(ALL))
    assert not survey.look(quiet())
    moved = quiet() | {1: state(sent=1), 2: state(sent=1)}
    assert not survey.look(moved)
    assert survey.look(moved)


def test_a_busy_look_in_between_starts_over():
    survey = Survey(set(ALL))
    survey.look(quiet())
    survey.look(quiet() | {1: state(active=1)})
    assert not survey.look(quiet())
    assert survey.look(quiet())


def test_a_new_round_starts_over():
    survey = Survey(set(ALL))
    survey.look(quiet())
    survey.look(quiet())
    assert not survey.look(quiet())  # they have not heard of it yet
    assert survey.missing() == ALL
    assert not survey.look(quiet(RELEASING))
    assert survey.look(quiet(RELEASING))


@pytest.mark.parametrize("gone", sorted(ALL))
def test_a_lost_member_is_not_waited_for(gone):
    survey = Survey(set(ALL))
    rest = {member: answer for member, answer in quiet().items() if member != gone}
    survey.look(rest)
    assert survey.missing() == {gone}
    survey.forget(gone)
    assert survey.missing() == set()
    assert not survey.look(rest)
    assert survey.look(rest)


def test_a_loss_between_two_looks_starts_over():
    survey = Survey(set(ALL))
    survey.look(quiet() | {1: state(sent=1), 2: state(sent=1)})
    survey.forget(3)
    rest = {1: state(sent=1), 2: state(sent=1)}
    assert not survey.look(rest)
    assert survey.look(rest)


def test_a_member_alone_may_go():
    survey = Survey({1})
    assert [survey.look({1: state()}) for _ in range(2)] == [False, True]


def test_in_any_order_of_answers_a_chain_of_calls_is_seen():
    """Worker 1 has called 2, which calls 3, does not wait for it, and answers; then 3 runs.

    A look sees each member at some moment, in any order; those of the next look come after them. Whatever
    they are, the world is not over before the chain is.
    """
    history = [  # what each member would answer at each moment
        {1: state(sent=1, active=2), 2: state(), 3: state()},  # it awaits the answer; the call is not acknowledged
        {1: state(sent=1, active=1), 2: state(active=1), 3: state()},
        {1: state(sent=1, active=1), 2: state(sent=1, active=2), 3: state()},
        {1: state(sent=1, active=1), 2: state(sent=2, active=2), 3: state()},
        {1: state(sent=1), 2: state(sent=2, active=1), 3: state()},
        {1: state(sent=1), 2: state(sent=2, active=1), 3: state(active=1)},
        {1: state(sent=1), 2: state(sent=2), 3: state(active=1)},
        {1: state(sent=1), 2: state(sent=2), 3: state(sent=1, active=1)},  # its answer, not acknowledged
        {1: state(sent=1), 2: state(sent=2), 3: state(sent=1)},
    ]
    last = len(history) - 1
    moments = range(last)
    for first in itertools.product(moments, repeat=3):
        for second in itertools.product(range(max(first), last), repeat=3):
            survey = Survey(set(ALL))
            for look in (first, second):
                over = survey.look({member: history[look[member - 1]][member] for member in ALL})
            assert not over, (first, second)
    survey.look(history[last])
    assert survey.look(history[last])


def test_an_answer_to_an_earlier_look_is_no_part_of_a_later_one():
    """The member answered before the other members' answers of that look came, and has run a call since."""
    asked = queue.SimpleQueue()
    me, first, second = (SimpleNamespace(incarnation=number, name=f"worker{number}") for number in (1, 2, 3))
    members = SimpleNamespace(me=me, members=lambda: [me, first, second], others=lambda: [first, second])
    members.name_of = lambda incarnation: f"worker{incarnation}"
    links = SimpleNamespace(
        post=lambda to, ask: asked.put((to, ask)), post_waiting=lambda: None, traffic=lambda: (0, 0)
    )
    exchange = SimpleNamespace(active=0, served=0, calls=SimpleNamespace(unended=0))
    references = SimpleNamespace(release_all=lambda: None, reap=lambda: None, forks=SimpleNamespace(pending=0))
    leader = ending.Shutdown(members, links, exchange, references, threading.RLock(), lambda: "")
    end = threading.Thread(target=leader.end, args=(20.0,))
    end.start()

    def answer(member, look, round=DRAINING):
        leader.on_state(ShutdownState(round, 0, 0, look), member.incarnation, [])

    def asks(look, round):
        """Wait until the leader asks this in this look of its, in this round."""
        while (ask := asked.get(timeout=20)[1]).look != look:
            pass
        return ask.round == round

    assert asks(1, DRAINING)
    answer(first, 1)
    answer(second, 1)
    assert asks(2, DRAINING)
    answer(first, 1)
    answer(second, 2)
    time.sleep(0.3)
    while not asked.empty():
        assert asked.get()[1].look == 2, "the answer to look 1 counts for look 2"
    answer(first, 2)
    assert asks(3, RELEASING)
    for look in (3, 4):
        for member in (first, second):
            answer(member, look, RELEASING)
        assert asks(look + 1, RELEASING if look == 3 else CLOSING)
    for member in (first, second):
        answer(member, 0, CLOSING)
    end.join(20)
    assert leader.completed


# --- what a shutdown that waits tells -------------------------------------------------------------


def test_a_shutdown_that_waits_tells_each_reason_once():
    reminder = Reminder(0.0)
    told = [(at, reason) for at, reason in TICKS if reminder.is_due(at, 0, 0, reason)]
    assert told == [(REMIND_AFTER + 1, "members"), (4 * REMIND_AFTER + 1, "calls")]


TICKS = [(float(at), "members" if at < 3 * REMIND_AFTER else "calls") for at in range(int(6 * REMIND_AFTER))]


def test_a_shutdown_tells_nothing_while_it_serves_calls():
    reminder = Reminder(0.0)
    often = [reminder.is_due(at, int(at // (0.9 * REMIND_AFTER)), 0, "members") for at, _ in TICKS]
    one_long = [reminder.is_due(6 * REMIND_AFTER + at, 7, 1, "members") for at, _ in TICKS]
    assert not any(often)
    assert not any(one_long)
    assert not reminder.is_due(13 * REMIND_AFTER - 1, 8, 0, "members")
    assert reminder.is_due(14 * REMIND_AFTER, 8, 0, "members")


@pytest.fixture
def told(monkeypatch, caplog):
    """The lines that shutdowns have logged, which count a fifth of a second as a long silence."""
    monkeypatch.setattr(ending, "REMIND_AFTER", 0.2)
    caplog.set_level(logging.WARNING, "nbdist.rpc")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_worker_that_called_shutdown_and_serves_is_silent_until_the_calls_stop(told):
    """torch's usual program: worker1 has nothing to do but to serve, and calls shutdown at once."""
    with World(2) as world:
        waiting = threading.Thread(target=world[1].ending.end, args=(60,))
        waiting.start()
        begun = time.monotonic()
        with world[0].activate():
            while time.monotonic() < begun + 1.5:
                assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2
            assert told() == []
            rpc.rpc_sync("worker1", time.sleep, args=(1.0,))
            assert told() == []
            time.sleep(1.5)
            assert told() == ["worker1: shutdown is waiting for worker0 to call shutdown"]
            world[0].ending.end(60)
        waiting.join(10)
        assert not waiting.is_alive()


def test_a_call_whose_answer_has_come_and_is_not_read_yet_ends_with_its_agent(monkeypatch):
    """A wait without a limit did not end: the answer was awaited no more, and the job to read it never ran."""
    monkeypatch.setattr("nbdist.rpc.pool.STUCK_AFTER_SECONDS", 1000.0)  # no other thread reads it
    with World(2, options=rpc.RpcBackendOptions(num_worker_threads=1)) as world, world[0].activate():
        busy, go_on = threading.Event(), threading.Event()
        world[0].submit(lambda: (busy.set(), go_on.wait(20)))
        assert busy.wait(20)
        future = rpc.rpc_async("worker1", torch.arange, args=(3,), timeout=0)
        wait_until(lambda: len(world[0].pending) == 0)
        assert not future.done()
        closing = threading.Thread(target=world[0].close, args=("was closed",))
        closing.start()
        with pytest.raises(nbdist.WorkerLost, match="was closed before worker1 had answered"):
            future.wait(20)
        go_on.set()
        closing.join(20)


NOTED: list[int] = []


def note(number):
    NOTED.append(number)


def test_a_world_does_not_end_while_a_call_is_on_its_way_that_nobody_waits_for():
    NOTED.clear()
    with World(2, faults=Faults(delay={"call": 0.5})) as world, world[0].activate():
        with pytest.raises(nbdist.RpcTimeout):
            rpc.rpc_sync("worker1", note, args=(1,), timeout=0.05)
        assert world[0].pending.unended == 0
        world.shutdown()
    assert NOTED == [1]


class ReadSlowly:
    """Comes as 7, once `go_on` is set."""

    reading, go_on = threading.Event(), threading.Event()

    def __reduce__(self):
        return ReadSlowly.read, ()

    @staticmethod
    def read():
        ReadSlowly.reading.set()
        assert ReadSlowly.go_on.wait(20)
        return 7


def test_a_world_does_not_end_while_an_answer_is_being_read():
    with World(2) as world, world[0].activate():
        future = rpc.rpc_async("worker1", ReadSlowly)
        assert ReadSlowly.reading.wait(20)
        ending = threading.Thread(target=world.shutdown)
        ending.start()
        ending.join(0.3)  # where it does not wait for the answer, it is over now
        ReadSlowly.go_on.set()
        assert future.wait(20) == 7
        ending.join(20)
        assert not ending.is_alive()
