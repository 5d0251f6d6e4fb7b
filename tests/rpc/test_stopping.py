"""Calls are ended where they run, once the user has given up on them."""

import threading
import time

import pytest
from helpers.waiting import wait_until

from nbdist import rpc, testing
from nbdist.errors import Interrupted, RemoteError
from nbdist.rpc.agent import active_agent

begun = threading.Event()
ended = []


@pytest.fixture
def world():
    begun.clear()
    ended.clear()
    with testing.World(3) as world, world[0].activate():
        yield world


def spin():
    begun.set()
    try:
        while True:
            time.sleep(0.001)
    except BaseException as error:
        ended.append((active_agent().me.name, type(error)))
        raise


def stubborn():
    begun.set()
    for _ in range(3):
        try:
            while True:
                time.sleep(0.001)
        except KeyboardInterrupt:
            ended.append("once")
            return "went on"


def call_spin_on(worker):
    try:
        return rpc.rpc_sync(worker, spin)
    except BaseException as error:
        ended.append((active_agent().me.name, type(error)))
        raise


def pending(world):
    return world[0].pending.all()


def test_a_function_is_stopped_in_its_thread(world):
    future = rpc.rpc_async("worker1", spin)
    assert begun.wait(10)
    world[0].stopping.stop(pending(world))
    with pytest.raises(RemoteError, match="KeyboardInterrupt"):
        future.wait(10)
    assert ended == [("worker1", KeyboardInterrupt)]


def test_the_function_may_answer_all_the_same(world):
    future = rpc.rpc_async("worker1", stubborn)
    assert begun.wait(10)
    world[0].stopping.stop(pending(world))
    assert future.wait(10) == "went on"


def test_a_nested_call_is_stopped_with_it(world):
    future = rpc.rpc_async("worker1", call_spin_on, args=("worker2",))
    assert begun.wait(10)
    world[0].stopping.stop(pending(world))
    with pytest.raises((RemoteError, Interrupted)):
        future.wait(10)
    wait_until(lambda: ("worker2", KeyboardInterrupt) in ended)
    assert any(name == "worker1" for name, _ in ended)


def fire_and_spin(worker):
    future = rpc.rpc_async(worker, spin)
    while not begun.is_set():
        time.sleep(0.001)
    computing.set()
    try:
        while True:
            sum(range(1000))
    except KeyboardInterrupt:
        ended.append("computes no more")
        raise
    finally:
        del future


computing = threading.Event()


def test_a_function_that_computes_is_stopped_though_a_call_of_its_own_is_unanswered(world):
    computing.clear()
    future = rpc.rpc_async("worker1", fire_and_spin, args=("worker2",))
    assert computing.wait(10)
    world[0].stopping.stop(pending(world))
    with pytest.raises(RemoteError, match="KeyboardInterrupt"):
        future.wait(10)
    assert "computes no more" in ended
    wait_until(lambda: ("worker2", KeyboardInterrupt) in ended)


def wait_in_turns(worker):
    """Wait for one call after another, while one is never waited for."""
    future = rpc.rpc_async(worker, spin)
    begun.wait(10)
    computing.set()
    while not future.done():
        rpc.rpc_sync(worker, len, args=([1],))
    ended.append("waits no more")


@pytest.mark.parametrize("attempt", range(10))
def test_a_function_that_waits_and_computes_in_turns_is_stopped(world, attempt):
    computing.clear()
    future = rpc.rpc_async("worker1", wait_in_turns, args=("worker2",))
    assert computing.wait(10)
    world[0].stopping.stop(pending(world))
    wait_until(future.done)
    wait_until(lambda: ("worker2", KeyboardInterrupt) in ended)


def test_who_waits_for_a_value_that_is_being_made_stops_its_making(world):
    rref = rpc.remote("worker1", spin)
    assert begun.wait(10)
    waiting = rpc.rpc_async("worker2", len, args=([],))  # somebody else's call goes on
    fetched = []

    def fetch():
        with world[0].activate():
            try:
                rref.to_here()
            except BaseException as error:
                fetched.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    wait_until(lambda: any(call.target is not None for call in pending(world)))
    fetch_call = next(call for call in pending(world) if call.target is not None)
    world[0].stopping.on_interrupt([fetch_call.outcome], KeyboardInterrupt())
    thread.join(10)
    assert ended == [("worker1", KeyboardInterrupt)]
    assert fetched
    assert waiting.wait(10) == 0


def test_a_stop_that_comes_too_late_hits_nobody(world):
    assert rpc.rpc_sync("worker1", len, args=([1],)) == 1
    future = rpc.rpc_async("worker1", len, args=([1, 2],))
    calls = pending(world)
    assert future.wait(10) == 2
    world[0].stopping.stop(calls)
    for _ in range(50):
        assert rpc.rpc_sync("worker1", len, args=([1],)) == 1


def test_fifty_stops_at_any_moment_leave_the_workers_usable(world):
    for number in range(50):
        future = rpc.rpc_async("worker1", spin)
        time.sleep(number * 0.0005)
        world[0].stopping.stop(pending(world))
        with pytest.raises(RemoteError, match="KeyboardInterrupt"):
            future.wait(10)
    assert rpc.rpc_sync("worker1", sum, args=([1, 2, 3],)) == 6


def test_who_does_not_stop_is_named_with_where_it_is(world):
    world[0].stopping.patience = 0.2
    release = threading.Event()
    holding.append(release)
    future = rpc.rpc_async("worker1", hold)
    assert begun.wait(10)
    error = KeyboardInterrupt()
    call = pending(world)[0]
    world[0].stopping.on_interrupt([call.outcome], error)
    release.set()
    assert len(error.__notes__) == 1
    assert "worker1 has not stopped running hold" in error.__notes__[0]
    assert "%dist_restart worker1" in error.__notes__[0]
    with pytest.raises(RemoteError, match="KeyboardInterrupt"):
        future.wait(10)


holding = []


def hold():
    begun.set()
    holding.pop().wait(30)  # a lock: another thread cannot interrupt it


def test_calls_carry_whose_work_they_are(world):
    seen = []

    class around:
        def __init__(self, origin):
            seen.append(origin)

        def __enter__(self):
            pass

        def __exit__(self, *exception):
            pass

    world[0].know_cells(lambda: "cell 7")
    world[1].know_cells(None, around)
    assert rpc.rpc_sync("worker1", len, args=([],)) == 0
    assert seen == ["cell 7"]
