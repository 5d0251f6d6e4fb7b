"""nbdist.testing as its users use it, and what can only be seen with several agents and faults."""

import queue
import threading

import pytest
import torch
from helpers.waiting import wait_until

from nbdist import NbdistError, RendezvousError, RRefError, UnknownWorker, UsageError, WorkerLost, rpc
from nbdist.rpc import RpcBackendOptions
from nbdist.testing import Faults, ManualClock, World

SOON = 30.0


def my_name():
    return rpc.get_worker_info().name


def ask(to, function, *args):
    return rpc.rpc_sync(to, function, args=args)


def value_of(rref):
    return rref.to_here()


def own_value(rref):
    return rref.local_value()


NOTED = queue.SimpleQueue()
GO = threading.Event()


def note(number):
    NOTED.put(number)
    return number


def note_value_of(rref):
    try:
        NOTED.put(rref.to_here())
    except Exception as error:
        NOTED.put(error)


def wait_for_go():
    return GO.wait(SOON)


# --- the clock ------------------------------------------------------------------------------------


def test_a_manual_clock_moves_when_it_is_told():
    clock = ManualClock(10.0)
    assert clock.now() == clock.now() == 10.0
    assert clock.advance(2.5) == clock.now() == 12.5
    with pytest.raises(UsageError):
        clock.advance(-1)
    with pytest.raises(UsageError):
        clock.advance(float("nan"))
    assert clock.now() == 12.5


# --- worlds ---------------------------------------------------------------------------------------


@pytest.fixture(params=["inprocess", "zeromq"])
def channel(request):
    return request.param


def test_the_agents_of_a_world_call_each_other(channel):
    with World(3, channel=channel) as world:
        assert len(world) == 3
        assert [agent.me.name for agent in world] == ["worker0", "worker1", "worker2"]
        for agent in world:
            with agent.activate():
                assert my_name() == agent.me.name
                for to in range(3):
                    assert rpc.rpc_sync(f"worker{to}", my_name) == f"worker{to}"
                assert rpc.rpc_sync("worker1", ask, args=("worker2", my_name)) == "worker2"
        world.shutdown(SOON)
        assert all(agent.closed for agent in world)


def test_references_between_the_agents_of_a_world(channel):
    with World(3, channel=channel) as world:
        with world[0].activate():
            rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
            assert rpc.rpc_sync("worker2", value_of, args=(rref,)).tolist() == [2.0, 2.0]
            assert rpc.rpc_sync("worker1", own_value, args=(rref,)).tolist() == [2.0, 2.0]
            del rref
        world.shutdown(SOON)
        for agent in world:
            forks = agent.references.forks
            assert (forks.owners, len(forks.users), forks.pending) == (0, 0, 0)


@pytest.mark.parametrize(
    "faults",
    [
        Faults(duplicate={"*": 1.0}),
        Faults(reorder={"*": 1.0}),
        Faults(drop={"*": 0.1}, duplicate={"*": 0.3}, reorder={"*": 0.3}, seed=5),
    ],
    ids=["double", "reorder", "all"],
)
def test_a_world_on_a_bad_network_is_slower_and_not_wrong(faults):
    with World(2, faults=faults) as world, world[0].activate():
        futures = [rpc.rpc_async("worker1", note, args=(number,)) for number in range(30)]
        assert [future.wait(SOON) for future in futures] == list(range(30))
    ran = [NOTED.get(timeout=SOON) for _ in range(30)]
    assert sorted(ran) == list(range(30)), "a function runs once, however often its call arrives"
    assert NOTED.empty()


def test_faults_may_change_while_the_world_runs():
    with World(2, faults=Faults()) as world, world[0].activate():
        assert rpc.rpc_sync("worker1", my_name) == "worker1"
        world.faults.fail = {"call": 1}
        with pytest.raises(NbdistError, match="injected fault"):
            rpc.rpc_sync("worker1", my_name)
        assert rpc.rpc_sync("worker1", my_name) == "worker1"


def test_a_killed_agent_fails_what_waits_for_it():
    GO.clear()
    try:
        with World(3) as world, world[0].activate():
            future = rpc.rpc_async("worker1", wait_for_go)
            rref = rpc.remote("worker1", my_name)
            assert rref.to_here() == "worker1"
            world.kill(1, "died on purpose")
            for failing in (lambda: future.wait(SOON), rref.to_here, lambda: rpc.rpc_sync("worker1", my_name)):
                with pytest.raises(WorkerLost, match="worker1"):
                    failing()
            assert rpc.rpc_sync("worker2", my_name) == "worker2"
    finally:
        GO.set()


def test_a_name_can_be_taken_again_in_a_dynamic_world(channel):
    with World(2, channel=channel, dynamic=True) as world, world[0].activate():
        old = rpc.remote("worker1", my_name)
        assert old.to_here() == "worker1"
        with pytest.raises(RendezvousError, match="not unique"):
            world.add("worker1", 1)
        world.kill(1)
        again = world.add("worker1", 1)
        assert rpc.rpc_sync("worker1", my_name) == "worker1"
        assert world[0].membership.find("worker1") == again.me
        with pytest.raises(WorkerLost):
            old.to_here()
        late = world.add("late", 7)
        assert rpc.rpc_sync("late", ask, args=("worker1", my_name)) == "worker1"
        assert {record.name for record in late.membership.members()} == {"worker0", "worker1", "late"}


def test_silence_is_judged_between_agents_that_are_apart():
    options = RpcBackendOptions(suspect_after=1.0, lost_after=4.0)
    with World(2, apart=True, faults=Faults(), options=options) as world, world[0].activate():
        lost = threading.Event()
        world[0].on_lost(lambda record, why: lost.set())
        assert rpc.rpc_sync("worker1", my_name) == "worker1"
        world.faults.drop = {"*": 1.0}
        assert lost.wait(SOON)
        with pytest.raises(WorkerLost, match="silent"):
            rpc.rpc_sync("worker1", my_name)


def test_a_world_that_cannot_be_is_refused():
    with pytest.raises(UsageError):
        World(0)
    with pytest.raises(UsageError):
        World(2, channel="carrier pigeon")
    with World(1) as world, pytest.raises(UsageError):
        world.add()
    with World(1, dynamic=True) as world, pytest.raises(UsageError, match="must match"):
        world.add("two words")
    with World(2, dynamic=True) as world, world[0].activate(), pytest.raises(UnknownWorker):
        rpc.rpc_sync("worker9", my_name)


def test_a_world_that_does_not_form_leaves_no_thread():
    before = set(threading.enumerate())
    with pytest.raises(NbdistError):
        World(2, faults=Faults(drop={"*": 1.0}), timeout=0.05)
    left = [thread for thread in set(threading.enumerate()) - before if "faults" not in thread.name]
    for thread in left:
        thread.join(SOON)
    assert not [thread for thread in left if thread.is_alive()]


# --- overtaking -----------------------------------------------------------------------------------


def late_creations(size=3):
    """A world in which the calls that create values are slow."""
    return World(size, faults=Faults(delay={"remote": 0.15}))


def test_a_reference_can_be_used_elsewhere_before_its_value_is_created():
    with late_creations() as world, world[0].activate():
        rref = rpc.remote("worker1", my_name)
        assert rpc.rpc_sync("worker2", value_of, args=(rref,)) == "worker1"


def test_a_reference_can_come_home_before_its_value_is_created():
    with late_creations() as world, world[0].activate():
        rref = rpc.remote("worker1", my_name)
        assert rpc.rpc_sync("worker1", own_value, args=(rref,)) == "worker1"


def test_a_reference_can_be_passed_on_and_let_go_before_its_value_is_created():
    with late_creations() as world:
        with world[0].activate():
            future = rpc.rpc_async("worker2", value_of, args=(rpc.remote("worker1", my_name),))
            assert future.wait(SOON) == "worker1"
            del future
        world.shutdown(SOON)
        assert not any(agent.references.forks.owners for agent in world)


def test_a_value_whose_creator_died_before_creating_it_is_an_error_and_not_a_wait():
    """The call that creates it never arrives; whoever holds a reference must be told."""
    with World(3, faults=Faults(drop={"remote": 1.0})) as world:
        with world[0].activate():
            rref = rpc.remote("worker1", my_name)
            rpc.rpc_async("worker2", note_value_of, args=(rref,))
        wait_until(lambda: world[1].references.forks.owns(rref.id))  # worker2's request has come
        world.kill(0)
        outcome = NOTED.get(timeout=SOON)
        assert isinstance(outcome, RRefError), outcome
        assert "lost" in str(outcome)
