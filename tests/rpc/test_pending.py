"""The table of awaited calls, and when to stop awaiting."""

import itertools
import math
import threading
import tracemalloc
from typing import ClassVar

import pytest

from nbdist.rpc.core.pending import Pending, PendingCalls
from nbdist.rpc.futures import Future


def call(table, *, to=1, started=0.0, timeout=10.0):
    pending = Pending(next(table.numbers), to, "worker1", "f", Future(), started, timeout, 0)
    table.add(pending)
    return pending


def test_an_answered_call_is_awaited_no_longer():
    table = PendingCalls(threading.Lock())
    one = call(table)
    assert table.get(one.id) is one
    assert table.pop(one.id) is one
    assert table.pop(one.id) is None
    assert table.get(one.id) is None
    assert len(table) == 0


def test_calls_are_found_by_their_callee():
    table = PendingCalls(threading.Lock())
    here, there = call(table, to=1), call(table, to=2)
    assert table.to(1) == [here]
    assert table.to(2) == [there]
    assert table.to(3) == []
    assert table.all() == [here, there]


def test_a_call_is_asked_after_at_half_time_and_over_at_the_end():
    table = PendingCalls(threading.Lock())
    one = call(table, started=100.0, timeout=10.0)
    assert table.next_due() == 105.0
    assert table.due(104.9) == ([], [])
    assert table.due(105.0) == ([one], [])
    assert table.next_due() == 110.0
    assert table.due(109.9) == ([], [])
    assert table.due(110.0) == ([], [one])
    assert len(table) == 0
    assert table.next_due() == math.inf


def test_who_looks_too_late_finds_it_over():
    table = PendingCalls(threading.Lock())
    one = call(table, started=0.0, timeout=1.0)
    assert table.due(50.0) == ([], [one])


def test_a_call_without_a_time_limit_is_never_due():
    table = PendingCalls(threading.Lock())
    one = call(table, timeout=0.0)
    assert one.deadline == math.inf
    assert table.next_due() == math.inf
    assert table.due(1e12) == ([], [])
    assert len(table) == 1


@pytest.mark.parametrize("timeouts", list(itertools.permutations([1.0, 2.0, 4.0, 0.0])))
def test_calls_end_in_the_order_of_their_deadlines(timeouts):
    table = PendingCalls(threading.Lock())
    calls = {timeout: call(table, timeout=timeout) for timeout in timeouts}
    ended = []
    for now in range(10):
        ended += table.due(float(now))[1]
    assert ended == [calls[1.0], calls[2.0], calls[4.0]]
    assert table.all() == [calls[0.0]]


def test_an_answered_call_is_never_over():
    table = PendingCalls(threading.Lock())
    one, other = call(table, timeout=4.0), call(table, timeout=4.0)
    table.pop(one.id)
    assert table.due(2.0) == ([other], [])
    table.pop(other.id)
    assert table.due(100.0) == ([], [])


def test_a_call_that_is_repeated_keeps_its_deadline():
    table = PendingCalls(threading.Lock())
    one = call(table, timeout=4.0)
    assert table.due(3.0) == ([one], [])
    table.pop(one.id)
    table.add(one)
    assert table.due(3.5) == ([], [])
    assert table.due(4.0) == ([], [one])
    assert table.due(100.0) == ([], [])


def test_deadlines_of_answered_calls_do_not_pile_up():
    table = PendingCalls(threading.Lock())
    kept = call(table, timeout=1e9)
    tracemalloc.start()
    try:
        for _ in range(20_000):
            table.pop(call(table, timeout=1e9).id)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 50 * 20_000, "less than a deadline takes for each call"
    assert table.due(2e9) == ([], [kept])


class Collecting(Pending):
    """A call during whose looking at a finaliser of the user's runs, which makes a call."""

    __slots__ = ()
    made: ClassVar[list[Pending]] = []
    table: ClassVar[PendingCalls]

    def next_due(self) -> float:
        if not self.made:
            self.made.append(call(self.table, started=3.0, timeout=4.0))
        return super().next_due()


def test_a_call_that_a_finaliser_makes_while_deadlines_are_sorted_has_one():
    Collecting.table = table = PendingCalls(threading.RLock())
    table.add(Collecting(next(table.numbers), 1, "worker1", "f", Future(), 0.0, 100.0, 0))
    table.freeze(7, 1.0)
    table.thaw(7, 2.0)
    assert Collecting.made
    assert table.next_due() == 5.0
    assert table.due(7.0) == ([], Collecting.made)


def test_ids_are_unique_over_threads():
    table, ids, lock = PendingCalls(threading.Lock()), [], threading.Lock()

    def take():
        mine = [next(table.numbers) for _ in range(1000)]
        with lock:
            ids.extend(mine)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 8000
