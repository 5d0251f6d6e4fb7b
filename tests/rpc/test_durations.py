"""Every place that takes a number of seconds refuses what is none, and takes what is too large for a clock.

None of them leaves a call behind: `shutdown` would wait for that.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.processes import workers
from helpers.waiting import wait_until

import nbdist
from nbdist import durations, rpc
from nbdist.cluster.cluster import Cluster
from nbdist.cluster.kernels.cells import Cell
from nbdist.cluster.spec import Spec
from nbdist.compat import gathering
from nbdist.compat.references import _get_type, release_users
from nbdist.compat.rpc import _set_rpc_timeout
from nbdist.nn import Pipeline
from nbdist.rpc.api import current_agent
from nbdist.rpc.futures import Future
from nbdist.swarm.serving import serve
from nbdist.testing import World

SOON = 20.0
HUGE = [10**400, 1e300, math.inf]
NOT_SECONDS = ["3", b"3", None, [1], object()]


@pytest.fixture
def world() -> Iterator[World]:
    with World(2) as world, world[0].activate():
        yield world


def settled() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(1)
    return future


CALLS: dict[str, Callable[[Any], Any]] = {
    "rpc_sync": lambda timeout: rpc.rpc_sync("worker1", max, (1, 2), timeout=timeout),
    "rpc_async": lambda timeout: rpc.rpc_async("worker1", max, (1, 2), timeout=timeout).wait(),
    "remote": lambda timeout: rpc.remote("worker1", max, (1, 2), timeout=timeout).to_here(),
    "remote to itself": lambda timeout: rpc.remote("worker0", max, (1, 2), timeout=timeout).to_here(),
    "to_here": lambda timeout: rpc.remote("worker1", max, (1, 2)).to_here(timeout),
    "to_here of one's own": lambda timeout: rpc.RRef(2).to_here(timeout),
    "RRef.rpc_sync": lambda timeout: rpc.remote("worker1", max, (1, 2)).rpc_sync(timeout).conjugate(),
    "RRef.rpc_async": lambda timeout: rpc.remote("worker1", max, (1, 2)).rpc_async(timeout).conjugate().wait(),
    "RRef.remote": lambda timeout: rpc.remote("worker1", max, (1, 2)).remote(timeout).conjugate().to_here(),
    "peek": lambda timeout: rpc.remote("worker1", max, (1, 2)).peek(timeout),
    "the type of an RRef": lambda timeout: _get_type(rpc.remote("worker1", max, (1, 2)), timeout),
    "rpc_timeout": lambda timeout: rpc.RpcBackendOptions(rpc_timeout=timeout),
    "torch's function for the default": lambda timeout: _set_rpc_timeout(timeout),
}
"""0 is for no limit."""

WAITS: dict[str, Callable[[Any], Any]] = {
    "Future.wait": lambda timeout: settled().wait(timeout),
    "wait_all": lambda timeout: rpc.wait_all([settled()], timeout=timeout),
}
"""0 is for not waiting."""

OTHERS: dict[str, Callable[[Any], Any]] = {
    "shutdown": lambda timeout: rpc.shutdown(timeout=timeout),
    "all_gather": lambda timeout: gathering.all_gather(1, None, timeout),
    "release_users": lambda timeout: release_users(current_agent(), timeout),
    "suspect_after": lambda seconds: rpc.RpcBackendOptions(suspect_after=seconds),
    "lost_after": lambda seconds: rpc.RpcBackendOptions(lost_after=seconds),
    "switch_interval": lambda seconds: rpc.RpcBackendOptions(switch_interval=seconds),
    "Cluster": lambda timeout: Spec(2, timeout=timeout).check(),
    "Cell.wait": lambda timeout: Cell.wait(Cell.__new__(Cell), timeout),
    "step_timeout": lambda seconds: serve("", [], step_timeout=seconds),
    "cache_timeout": lambda seconds: serve("", [], cache_timeout=seconds),
    "route_timeout": lambda seconds: serve("", [], route_timeout=seconds),
    "session_timeout": lambda seconds: serve("", [], session_timeout=seconds),
}


@pytest.mark.parametrize("place", [*CALLS, *WAITS, *OTHERS])
def test_what_is_no_number_of_seconds_is_refused(world: World, place: str) -> None:
    take = {**CALLS, **WAITS, **OTHERS}[place]
    with pytest.raises(nbdist.UsageError, match="must be a number of seconds, not nan"):
        take(math.nan)
    for value in NOT_SECONDS:
        if value is None and place in (*WAITS, "Cell.wait"):
            continue  # there it is for no limit
        with pytest.raises(TypeError, match="must be a number of seconds, not"):
            take(value)
    wait_until(lambda: not len(world[0].pending))
    world.shutdown(SOON)


@pytest.mark.parametrize("place", [*CALLS, *WAITS])
def test_what_is_too_long_for_a_clock_has_no_limit(world: World, place: str) -> None:
    for value in HUGE:
        {**CALLS, **WAITS}[place](value)
    world.shutdown(SOON)


@pytest.mark.parametrize("value", HUGE, ids=["int", "float", "infinity"])
def test_a_wait_without_a_limit_ends_with_its_future(value: float) -> None:
    future: Future[int] = Future()
    begun = threading.Event()
    found: list[int] = []

    def wait() -> None:
        begun.set()
        found.append(rpc.wait_all([future], timeout=value)[0])

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert begun.wait(SOON)
    future.set_result(3)
    thread.join(SOON)
    assert found == [3]


def test_a_negative_wait_is_refused_and_none_is_not_waited_for() -> None:
    for wait in (Future[int]().wait, lambda timeout: rpc.wait_all([Future()], timeout=timeout)):
        with pytest.raises(nbdist.UsageError, match="0 s or more, not -1"):
            wait(-1)
        with pytest.raises(nbdist.RpcTimeout):
            wait(0)


def test_a_call_with_a_negative_limit_has_the_default_one(world: World) -> None:
    world[0].rpc_timeout = 0.05
    for timeout in (-1, -0.5, -math.inf, -(10**400)):
        with pytest.raises(nbdist.RpcTimeout, match=r"0\.05 s"):
            rpc.rpc_sync("worker1", workers.hold, timeout=timeout)
    workers.release()


def test_a_default_limit_that_is_assigned_is_checked_when_the_agent_starts() -> None:
    options = rpc.RpcBackendOptions()
    options.rpc_timeout = math.nan
    with pytest.raises(nbdist.UsageError, match="nan"):
        World(1, options=options)


def test_a_cell_is_not_sent_with_a_limit_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster.__new__(Cluster)
    monkeypatch.setattr(Cluster, "start", lambda self: pytest.fail("it started"))
    for value, error in (
        (math.nan, nbdist.UsageError),
        (0, nbdist.UsageError),
        (-1, nbdist.UsageError),
        ("1", TypeError),
    ):
        with pytest.raises(error):
            cluster.execute("1", timeout=value)


def test_seconds_may_be_any_number() -> None:
    for value in (2, 2.0, True + 1, torch.tensor(2.0), torch.tensor(2)):
        assert durations.seconds(value) == 2.0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_pipeline_may_have_more_micro_batches_than_memory(world: World, schedule: Any) -> None:
    model = [torch.nn.Identity() for _ in range(4 if schedule == "interleaved" else 2)]
    pipe = Pipeline(model, ["worker0", "worker1"], micro_batches=10**9, schedule=schedule)
    assert pipe(torch.arange(6.0).reshape(3, 2)).tolist() == [[0, 1], [2, 3], [4, 5]]
    for wrong in (2.5, "2", math.nan, 0):
        with pytest.raises(nbdist.UsageError, match="whole number"):
            Pipeline(model, ["worker0", "worker1"], micro_batches=wrong, schedule=schedule)
