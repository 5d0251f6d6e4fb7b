"""How calls and references meet: each transition of the drawing in nbdist/rpc/core/exchange.py."""

import threading

import pytest

from nbdist.ids import GlobalId, IdSource
from nbdist.rpc.core.arrivals import Arrival, ArrivalStage
from nbdist.rpc.core.exchange import Exchange
from nbdist.rpc.core.forks import Drop
from nbdist.rpc.core.pending import Pending
from nbdist.rpc.promise import Promise
from nbdist.wire.messages import Call, Fork, ForkConfirm, Mode, Payload, UserDelete

ME, CALLER, OTHER = 100, 101, 102
VALUE, FORK, CHILD = (GlobalId(1, number, CALLER) for number in range(3))


@pytest.fixture
def exchange():
    return Exchange(ME, IdSource(0, ME))


def call(id=1, *, result=None, target=None, sender=CALLER):
    return Arrival(Call(id, Mode.CALL, "f", Payload(), result, target), sender)


def creation(id=1, *, sender=CALLER):
    return call(id, result=Fork(VALUE, FORK, ME, sender), sender=sender)


def lent(exchange):
    """A fork of somebody else's value that has come from a third agent, and that its owner has not confirmed."""
    exchange.forks.accept(Fork(GlobalId(2, 0, OTHER), CHILD, OTHER, CALLER))
    return CHILD


def confirm(exchange, fork):
    exchange.forks.on_fork_confirm(ForkConfirm(GlobalId(2, 0, OTHER), fork))
    return exchange.confirmed(fork)


def test_a_call_that_refers_to_nothing_is_ready_and_counted_once_answered(exchange):
    arrival = call()
    exchange.came_alone(arrival)
    assert arrival.stage is ArrivalStage.READY
    assert exchange.doing() == [arrival]
    assert exchange.answered(arrival) == []
    assert (exchange.active, exchange.served) == (0, 1)


def test_a_call_waits_until_all_its_forks_are_confirmed(exchange):
    arrival, fork = call(), lent(exchange)
    assert exchange.came(arrival, [fork]) == []
    assert arrival.stage is ArrivalStage.CONFIRMING
    assert confirm(exchange, fork) == [arrival]
    assert (arrival.stage, arrival.is_heard) == (ArrivalStage.READY, True)


def test_a_call_waits_for_the_call_that_makes_its_target_and_then_for_the_value(exchange):
    maker, user = creation(), call(2, target=VALUE)
    assert exchange.came(user, []) == []
    assert user.stage is ArrivalStage.SEEKING
    assert exchange.came(maker, []) == [maker]
    assert user.stage is ArrivalStage.AWAITING
    assert exchange.made(VALUE) == [user]
    assert user.stage is ArrivalStage.READY


def test_a_call_on_a_value_that_is_there_is_ready_and_keeps_it(exchange):
    maker, user = creation(), call(2, target=VALUE)
    exchange.came(maker, [])
    exchange.made(VALUE)
    assert exchange.came(user, []) == [user]
    assert exchange.answered(maker) == []
    assert exchange.forks.on_user_delete(UserDelete(VALUE, FORK), CALLER) == []  # the call works on it
    assert exchange.answered(user) == [Drop(VALUE)]


def test_a_call_on_a_value_that_is_gone_is_ready_at_once(exchange):
    maker = creation()
    exchange.came(maker, [])
    exchange.made(VALUE)
    exchange.answered(maker)
    assert exchange.forks.on_user_delete(UserDelete(VALUE, FORK), CALLER) == [Drop(VALUE)]
    first, second = call(2, target=VALUE), call(3, target=VALUE)
    assert exchange.came(first, []) == [first]
    assert exchange.came(second, []) == [second]  # and does not wait for what the first has brought back


def test_a_refused_creation_is_as_if_it_had_not_come(exchange):
    maker, user = creation(), call(2, target=VALUE)
    exchange.came(maker, [])
    assert exchange.refused(maker) == [Drop(VALUE)]
    assert exchange.came(user, []) == []
    assert user.stage is ArrivalStage.SEEKING
    again = creation()
    assert exchange.came(again, []) == [again]
    exchange.made(VALUE)
    assert user.stage is ArrivalStage.READY
    assert exchange.abandoned(CALLER, 1) == (None, [])  # it is not refused any more


def test_a_refused_creation_that_is_given_up_lets_those_go_on_who_seek_it(exchange):
    maker, user = creation(), call(2, target=VALUE)
    exchange.came(maker, [])
    exchange.refused(maker)
    exchange.came(user, [])
    assert exchange.abandoned(CALLER, 1) == (VALUE, [user])


@pytest.mark.parametrize("stage", [ArrivalStage.CONFIRMING, ArrivalStage.SEEKING, ArrivalStage.AWAITING])
def test_a_lost_caller_ends_its_calls_that_wait(exchange, stage):
    if stage is ArrivalStage.AWAITING:
        exchange.came(creation(sender=ME), [])
    target = (
        GlobalId(0, 0, OTHER) if stage is ArrivalStage.SEEKING else VALUE if stage is ArrivalStage.AWAITING else None
    )
    arrival, forks = call(target=target), [lent(exchange)] if stage is ArrivalStage.CONFIRMING else []
    assert exchange.came(arrival, forks) == []
    assert arrival.stage is stage
    _, going_on = exchange.lost(CALLER)
    assert going_on == [arrival]
    assert not arrival.is_heard
    if stage is ArrivalStage.CONFIRMING:
        assert confirm(exchange, CHILD) == []  # it is not told twice
    exchange.answered(arrival)
    assert exchange.awaited() == set()
    assert confirm(exchange, CHILD) == exchange.made(VALUE) == []


def test_a_call_goes_on_once_the_creator_of_its_target_is_lost(exchange):
    arrival = call(target=VALUE, sender=OTHER)
    assert exchange.came(arrival, []) == []
    _, going_on = exchange.lost(CALLER)
    assert going_on == [arrival]
    assert arrival.is_heard


def test_a_call_goes_on_once_the_owner_of_its_fork_is_lost(exchange):
    arrival = call()
    exchange.came(arrival, [lent(exchange)])
    _, going_on = exchange.lost(OTHER)
    assert going_on == [arrival]
    assert arrival.is_heard


def test_others_wait_on_when_an_agent_is_lost(exchange):
    awaiting, confirming = call(1, target=VALUE), call(2)
    exchange.came(creation(3), [])
    exchange.came(awaiting, [])
    exchange.came(confirming, [lent(exchange)])
    assert exchange.lost(999) == ([], [])
    assert (awaiting.stage, confirming.stage) == (ArrivalStage.AWAITING, ArrivalStage.CONFIRMING)
    assert confirm(exchange, CHILD) == [confirming]
    assert exchange.made(VALUE) == [awaiting]


def test_an_answer_of_somebody_else_ends_no_call(exchange):
    calls = exchange.calls
    asked = Pending(next(calls.numbers), OTHER, "worker2", "f", Promise(), 0.0, 0.0, threading.get_ident())
    calls.add(asked)
    assert calls.answered(asked.id, CALLER) is None
    assert calls.answered(asked.id, OTHER) is asked
    assert calls.answered(asked.id, OTHER) is None
