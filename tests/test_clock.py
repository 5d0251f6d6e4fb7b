"""The clock of the day jumps, as when it is set by the network or by hand: nothing is late, lost or out of order."""

import itertools
import time

import pytest
import torch

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.testing import World

HOUR = 3600.0


@pytest.fixture
def jump(monkeypatch):
    """Call this, and the clock of the day is an hour ahead, right and an hour behind, in turn."""

    def begin():
        plain, jumps = time.time, itertools.cycle([HOUR, 0.0, -HOUR])
        monkeypatch.setattr(time, "time", lambda: plain() + next(jumps))

    return begin


def slow(seconds):
    time.sleep(seconds)
    return seconds


def test_calls_and_their_limits_follow_another_clock(jump):
    jump()
    with World(3) as world, world[0].activate():
        for number in range(50):
            assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), number), timeout=30).item() == number + 1
        started = time.monotonic()
        with pytest.raises(nbdist.RpcTimeout):
            rpc.rpc_sync("worker1", slow, args=(1.0,), timeout=0.3)
        assert time.monotonic() - started >= 0.3
        assert rpc.rpc_sync("worker2", slow, args=(0.1,), timeout=30) == 0.1


def test_the_events_of_a_watched_pass_stay_in_order(jump):
    with World(2) as world, world[0].activate(), dist_autograd.context() as context_id:
        y = torch.ones(3, requires_grad=True)
        for _ in range(5):
            y = rpc.rpc_sync("worker1", torch.mul, args=(y, 2.0))
        watch = dist_autograd.watch(context_id, paused=True)
        handle = dist_autograd.backward_async(context_id, [y.sum()])
        watch.step(2)
        jump()
        watch.run()
        handle.wait()
        (seen,) = watch.passes
        times = [event.time for event in seen.events]
        assert len(times) > 20
        assert max(times) - min(times) < 60.0
        for worker in ("worker0", "worker1"):
            told = [(event.what, event.node) for event in seen.events if event.worker == worker]
            for node in {node for what, node in told if what == "ran"}:
                assert told.index(("running", node)) < told.index(("ran", node))
