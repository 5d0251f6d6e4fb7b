"""Agents over a channel that loses, doubles, delays and reorders: every call runs once, and nothing leaks."""

from __future__ import annotations

import gc
import threading

import pytest
from helpers.processes import workers
from helpers.waiting import wait_until

import nbdist
from nbdist import rpc
from nbdist.testing import Faults, World
from nbdist.wire.messages import GiveBack

BAD = Faults(drop={"*": 0.1}, duplicate={"*": 0.2}, reorder={"*": 0.3}, seed=7)


@pytest.fixture
def world():
    with World(3, faults=BAD) as world:
        yield world
        world.faults.drop = world.faults.duplicate = world.faults.reorder = {}


def quiet(world: World) -> bool:
    gc.collect()
    numbers = [agent.statistics() for agent in world]
    return all(
        not n["owned_values"] and not n["used_references"] and not n["unacknowledged"] and not n["pending_references"]
        for n in numbers
    )


def test_every_call_runs_once(world):
    with world[0].activate():
        futures = [rpc.rpc_async(f"worker{1 + n % 2}", workers.count, args=(f"faulty {n}",)) for n in range(300)]
        assert rpc.wait_all(futures, timeout=60) == [1] * 300
    assert [workers.count(f"faulty {n}") for n in range(300)] == [2] * 300
    assert sum(agent.statistics()["messages_resent"] for agent in world) > 0
    assert sum(agent.statistics()["duplicates_dropped"] for agent in world) > 0


def test_references_survive_and_end(world):
    with world[0].activate():
        rrefs = [rpc.remote("worker1", workers.Counter, args=(n,)) for n in range(30)]
        passed = [rpc.rpc_async("worker2", workers.pass_on, args=("worker0", rref)) for rref in rrefs]
        assert [counter.value for counter in rpc.wait_all(passed, timeout=60)] == list(range(30))
        made = rpc.rpc_sync("worker1", workers.call_there, args=("worker2", workers.make, "there"))
        assert made.to_here() == "there"
    del rrefs, passed, made
    world.faults.drop = {}
    wait_until(lambda: quiet(world), within=60)


def test_a_send_that_fails():
    with World(2, faults=Faults(fail={"remote": 1, "user_delete": 3})) as world, world[0].activate():
        rref = rpc.remote("worker1", workers.Counter)
        with pytest.raises(nbdist.RRefError, match="RRef creation"):
            rref.to_here()
        with pytest.raises(nbdist.RRefError, match="RRef creation"):
            rpc.rpc_sync("worker1", workers.identity, args=(rref,))
        again = rpc.remote("worker1", workers.Counter)
        assert again.rpc_sync().add(2) == 2
        del rref, again
        wait_until(lambda: quiet(world))  # the delete was tried until it went


def test_a_control_message_that_never_goes_is_given_up(caplog):
    options = rpc.RpcBackendOptions(retries=2)
    with World(2, faults=Faults(fail={"user_delete": 10**6}), options=options) as world, world[0].activate():
        rref = rpc.remote("worker1", workers.Counter)
        rref.to_here()
        del rref
        wait_until(lambda: "given up" in caplog.text)
        assert rpc.rpc_sync("worker1", workers.identity, args=(1,)) == 1


def test_a_call_that_is_always_lost_fails_in_the_end():
    options = rpc.RpcBackendOptions(retries=1)
    with World(2, faults=Faults(drop={"call": 1.0}), options=options) as world, world[0].activate():
        with pytest.raises(nbdist.WorkerLost, match="did not acknowledge the call"):
            rpc.rpc_sync("worker1", workers.identity, args=(1,))
        with pytest.raises(nbdist.RpcTimeout, match="has not acknowledged"):
            rpc.rpc_sync("worker1", workers.identity, args=(1,), timeout=0.2)
        world.faults.drop = {}
        ending = threading.Thread(target=world.shutdown, daemon=True)
        ending.start()
        ending.join(20)
        assert not ending.is_alive()  # it does not wait for the callee to take them


def test_silence(caplog):
    options = rpc.RpcBackendOptions(suspect_after=0.5, lost_after=1.2)
    with World(2, faults=Faults(), options=options, apart=True) as world, world[0].activate():
        assert rpc.rpc_sync("worker1", workers.identity, args=(1,)) == 1
        world.faults.drop = {"*": 1.0}
        call = rpc.rpc_async("worker1", workers.identity, args=(1,))
        with pytest.raises(nbdist.WorkerLost, match="silent"):
            call.wait(20)
        assert "calls to it wait" in caplog.text
        # The one that was given up learns of it when it speaks again.
        world.faults.drop = {}
        wait_until(lambda: len(world[1].membership.members()) == 1)


def test_members_come_and_go():
    with World(2, dynamic=True) as world:
        for round in range(5):
            late = world.add(f"late{round}", id=10 + round)
            with late.activate():
                assert (
                    rpc.rpc_sync("worker0", workers.call_there, args=(f"late{round}", workers.name)) == f"late{round}"
                )
            rref = None
            with world[0].activate():
                rref = rpc.remote(f"late{round}", workers.Counter)
                assert rref.rpc_sync().add(1) == 1
            late.close("has left")
            wait_until(lambda: len(world[0].membership.members()) == 2)
            with world[0].activate(), pytest.raises(nbdist.WorkerLost, match="has left"):
                rref.to_here()
        assert world[0].statistics()["used_references"] <= 1


def test_an_orderly_end_waits_for_calls_that_calls_have_made():
    workers.unkeep()
    world = World(3)
    with world[0].activate():
        for _ in range(10):
            rpc.rpc_async("worker1", workers.chain, args=(30,))
    world.shutdown()
    assert len(workers.kept) == 10
    workers.unkeep()


def test_blocks_of_an_agent_that_is_gone_are_owed_to_nobody():
    """They were put back after each message that could not go out, so the reader tried again for ever."""
    with World(2) as world:
        gone = world[1].me.incarnation
        world[1].close("is gone")
        wait_until(lambda: gone not in world[0].links.connections)
        world[0].sharing.owe(gone, [(1, 0)])
        with pytest.raises(nbdist.WorkerLost):
            world[0].post(gone, GiveBack([(1, 0)]))
        assert not world[0].sharing.owing
