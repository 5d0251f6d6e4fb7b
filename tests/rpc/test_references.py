"""Remote references between real processes."""

from __future__ import annotations

import copy
import gc
import operator
import pickle

import pytest
import torch
from helpers.processes import workers
from helpers.waiting import wait_until

import nbdist
from nbdist import rpc, trace


@pytest.fixture(scope="module")
def others():
    with workers.world(4) as others:
        yield others


@pytest.fixture
def calls_begun():
    """The callees of the calls that this process has sent since, in order."""
    callees = []
    unsubscribe = trace.subscribe(lambda event, fields: event == "call.sent" and callees.append(fields["to"]))
    yield callees
    unsubscribe()


def owned_by(worker: str) -> int:
    return rpc.rpc_sync(worker, workers.statistics)["owned_values"]


def all_quiet() -> bool:
    gc.collect()
    everywhere = [rpc.rpc_sync(f"worker{n}", workers.statistics) for n in range(4)]
    return all(not s["owned_values"] and not s["forks_of_owned"] and not s["used_references"] for s in everywhere)


def test_create_fetch_and_drop(others):
    rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
    assert rref.to_here().tolist() == [2, 2]
    assert not rref.is_owner()
    assert rref.owner() == rpc.WorkerInfo("worker1", 1)
    assert rref.owner_name() == "worker1"
    assert rref.confirmed_by_owner()
    assert owned_by("worker1") == 1
    del rref
    wait_until(all_quiet)


def test_a_local_one(others):
    value = [1]
    rref = rpc.RRef(value)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.to_here() is value
    assert rref.local_value() is value
    assert rpc.rpc_sync("worker1", workers.fetch, args=(rref,)) == [1]


def test_remote_to_oneself(others):
    rref = rpc.remote("worker0", workers.Counter, args=(3,))
    assert rref.is_owner()
    assert rref.local_value().value == 3
    assert rref.rpc_sync().add(4) == 7
    assert rref.remote().add(1).to_here() == 8


def test_shared_through_a_third(others):
    rref = rpc.remote("worker1", torch.ones, args=(3,))
    assert rpc.rpc_sync("worker2", workers.pass_on, args=("worker3", rref)).tolist() == [1, 1, 1]
    assert rpc.rpc_sync("worker1", workers.fetch, args=(rref,)).tolist() == [1, 1, 1]
    rpc.rpc_sync("worker2", workers.keep, args=({"deep": [rref]},))
    del rref
    gc.collect()
    assert owned_by("worker1") == 1  # worker2 keeps it
    rpc.rpc_sync("worker2", workers.unkeep)
    wait_until(all_quiet)


def test_returned_ones(others):
    made = rpc.rpc_sync("worker1", workers.make, args=("value",))
    assert made.owner_name() == "worker1"
    assert made.to_here() == "value"
    listed = rpc.rpc_sync("worker2", workers.identity, args=([made, made, {"again": made}],))
    assert [entry.to_here() for entry in listed[:2]] == ["value", "value"]
    del made, listed
    wait_until(all_quiet)


def test_confirmed_before_a_function_sees_it(others):
    rref = rpc.remote("worker1", workers.sleep, args=(0.2,))
    assert rpc.rpc_sync("worker2", rpc.RRef.confirmed_by_owner, args=(rref,))


def test_what_is_known_without_a_call(others, calls_begun):
    rref = rpc.remote("worker1", torch.zeros, args=(2, 3))
    rref.to_here()
    begun = len(calls_begun)
    state = rref.state
    assert (state.qualname, state.shape, state.dtype, state.device) == ("Tensor", [2, 3], "float32", "cpu")
    assert state.nbytes == 24
    assert "Tensor float32(2, 3)" in repr(rref)
    assert "on worker1" in repr(rref)
    assert "view" in dir(rref.rpc_sync())
    assert len(calls_begun) == begun  # G7
    # One that was passed on before its value came to be is told later.
    slow = rpc.remote("worker1", workers.sleep, args=(0.3,))
    rpc.rpc_sync("worker2", workers.keep, args=(slow,))
    wait_until(lambda: "float" in rpc.rpc_sync("worker2", workers.repr_kept))
    rpc.rpc_sync("worker2", workers.unkeep)


def test_proxies_take_one_round_trip(others, calls_begun):
    rref = rpc.remote("worker1", workers.Counter)
    rref.to_here()
    calls_begun.clear()
    assert rref.rpc_sync().add(2) == 2
    assert rref.rpc_async().add(2).wait() == 4
    assert rref.remote().add(2).to_here() == 6
    assert calls_begun == ["worker1"] * 4  # the last is a call and a fetch
    with pytest.raises(AttributeError, match="subtract"):
        rref.rpc_sync().subtract(1)
    with pytest.raises(AttributeError, match="subtract"):
        rref.remote().subtract(1)
    module = rpc.remote("worker1", torch.nn.Linear, args=(2, 2))
    assert module.rpc_sync()(torch.ones(1, 2)).shape == (1, 2)


def test_a_proxy_waits_for_a_slow_value_without_a_thread(others):
    rref = rpc.remote("worker1", workers.sleep, args=(0.5,))
    futures = [rref.rpc_async().hex() for _ in range(40)]
    assert rpc.rpc_sync("worker1", workers.name) == "worker1"
    assert set(rpc.wait_all(futures)) == {(0.5).hex()}


def test_errors(others):
    failed = rpc.remote("worker1", workers.fail, args=("no",))
    with pytest.raises(ValueError, match="no") as caught:
        failed.to_here()
    assert "raised on worker1, in fail" in caught.value.__notes__[0]
    assert "raise ValueError(message)" in caught.value.__notes__[0]
    assert "error" in repr(failed)
    with pytest.raises(ValueError, match="no"):
        rpc.rpc_sync("worker2", workers.fetch, args=(failed,))
    with pytest.raises(ValueError, match="no"):
        failed.rpc_sync().anything()
    rref = rpc.remote("worker1", workers.Counter)
    with pytest.raises(nbdist.RRefError, match="worker1"):
        rref.local_value()
    wait_until(rref.confirmed_by_owner)  # before, its repr changes
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        if attempt is pickle.dumps:
            with pytest.raises(RuntimeError, match="Can not pickle rref"):
                attempt(rref)
        else:
            assert repr(attempt(rref)) == repr(rref)


def test_creation_that_times_out(others):
    rref = rpc.remote("worker1", workers.sleep, args=(0.6,), timeout=0.1)
    wait_until(lambda: rref.creation_failure() is not None)
    for attempt in (rref.to_here, lambda: rpc.rpc_sync("worker2", workers.fetch, args=(rref,)), rref.rpc_sync().hex):
        with pytest.raises(nbdist.RRefError, match="RRef creation"):
            attempt()
    slow = rpc.remote("worker1", workers.sleep, args=(0.3,))
    with pytest.raises(nbdist.RpcTimeout):
        slow.to_here(0.05)
    assert slow.to_here() == 0.3


def test_ids_of_a_reference(others):
    rref = rpc.remote("worker1", workers.Counter)
    assert rpc.rpc_sync("worker1", operator.attrgetter("id"), args=(rref,)) == rref.id
    assert rpc.rpc_sync("worker2", operator.attrgetter("id"), args=(rref,)) == rref.id
    assert rpc.rpc_sync("worker2", operator.attrgetter("fork_id"), args=(rref,)) != rref.fork_id
    assert rpc.rpc_sync("worker1", operator.attrgetter("fork_id"), args=(rref,)) is None
    mine = rpc.RRef(1)
    assert mine.fork_id is None
    assert rref.holder == mine.holder == mine.owner_incarnation
    assert rref.owner_incarnation == rpc.rpc_sync("worker1", operator.attrgetter("holder"), args=(rref,))


def test_a_reference_that_is_released_is_forgotten(others):
    rref, mine = rpc.remote("worker1", workers.Counter), rpc.RRef(1)
    rref.to_here()
    assert (rref.standing, mine.standing) == ("confirmed", "here")
    assert rref.keep() is rref.hold
    for each in (rref, mine):
        assert not each.is_forgotten()
        assert not each.has_ended()
        each.release()
        assert each.hold is None
        assert each.standing == "released"
    wait_until(rref.is_forgotten)
    assert not mine.is_forgotten()


def test_creation_failure_is_the_error_of_the_call(others):
    rref = rpc.remote("worker1", workers.sleep, args=(0.3,), timeout=0.05)
    wait_until(lambda: rref.creation_failure() is not None)
    assert isinstance(rref.creation_failure(), nbdist.RpcTimeout)
    assert rref.standing == "failed"
    assert rpc.RRef(1).creation_failure() is None
    made = rpc.remote("worker1", workers.Counter)
    made.to_here()
    assert made.creation_failure() is None


def test_nothing_is_left_in_the_end(others):
    wait_until(all_quiet)
    futures = [rpc.rpc_async(f"worker{1 + n % 3}", workers.make, args=(n,)) for n in range(300)]
    rrefs = rpc.wait_all(futures)
    passed = [rpc.rpc_async(f"worker{1 + n % 3}", workers.fetch, args=(rref,)) for n, rref in enumerate(rrefs)]
    assert rpc.wait_all(passed) == list(range(300))
    del futures, rrefs, passed
    wait_until(all_quiet)


def test_a_reference_that_is_given_twice_is_one_object_there(others):
    rref = rpc.remote("worker1", workers.make, args=(1,))
    assert rpc.rpc_sync("worker2", workers.is_one_object, args=(rref, rref), kwargs={"third": rref})
    assert rpc.rpc_sync("worker2", workers.are_one_object, args=([rref, rref],))
