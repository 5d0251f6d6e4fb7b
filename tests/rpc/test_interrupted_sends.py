"""Ctrl-C at any moment while a call is sent: nothing of the call is left behind, and the world ends."""

from __future__ import annotations

import gc
import logging
import sys
import threading

import pytest
import torch
from helpers.abuse.interrupts import Interrupts
from helpers.processes import workers
from helpers.waiting import wait_until

from nbdist import rpc
from nbdist.testing import World

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="an interrupt may leave a lock taken: CPython issue 148874"
)
TRIES = [100, pytest.param(8000, marks=pytest.mark.soak)]
SENDS = {
    "plain": lambda: rpc.rpc_async("worker1", max, args=(1, 2), timeout=0),
    "tensor": lambda: rpc.rpc_async("worker1", torch.add, args=(torch.ones(3), 1), timeout=0),
    "shared": lambda: rpc.rpc_async("worker1", torch.numel, args=(LARGE,), timeout=0),
    "reference": lambda: rpc.rpc_async("worker1", workers.identity, args=(rpc.RRef(LARGE),), timeout=0),
    "remote": lambda: rpc.remote("worker1", max, args=(1, 2), timeout=0),
    "sync": lambda: rpc.rpc_sync("worker1", max, args=(1, 2), timeout=0),
    "result": lambda: rpc.rpc_sync("worker1", torch.ones, args=(40_000,), timeout=0),
    "to_here": lambda: rpc.remote("worker1", max, args=(1, 2), timeout=0).rpc_async(timeout=0).bit_length(),
}
LARGE = torch.ones(40_000)


@pytest.fixture
def interrupts():
    interrupts = Interrupts()
    gc.disable()  # hypothesis looks on at each collection; what interrupts that is kept, with all frames, by pytest
    try:
        yield interrupts
    finally:
        gc.enable()
        interrupts.close()


@pytest.mark.parametrize("tries", TRIES)
@pytest.mark.parametrize("kind", SENDS)
def test_a_send_that_is_interrupted_leaves_nothing(kind, tries, interrupts, caplog):
    """Over a queue in this process: of all the time most is spent in the layers that number and count."""
    with World(2) as world, world[0].activate():
        interrupts.during_many(SENDS[kind], tries)
        wait_until(lambda: left_by(world[0].statistics()), equals=NOTHING)
        wait_until(lambda: left_by(world[1].statistics()), equals=NOTHING)
        ending = threading.Thread(target=world.shutdown, daemon=True)
        ending.start()
        ending.join(20)
        assert not ending.is_alive()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("tries", TRIES)
@pytest.mark.parametrize("kind", SENDS)
def test_a_send_to_another_process_that_is_interrupted_leaves_nothing(kind, tries, interrupts):
    """Over the local channel, with shared memory."""
    with workers.world(2, options={"arena_threshold": 100_000}):
        interrupts.during_many(SENDS[kind], tries)
        assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2
        wait_until(lambda: left_by(workers.statistics()), equals=NOTHING)
        wait_until(lambda: left_by(rpc.rpc_sync("worker1", workers.statistics)), equals=NOTHING)


LEFT = ("pending_calls", "owned_values", "used_references", "pending_references", "unacknowledged", "arena_blocks_out")
NOTHING = dict.fromkeys(LEFT, 0)


def left_by(statistics: dict[str, int]) -> dict[str, int]:
    gc.collect()
    return {name: statistics[name] for name in LEFT}
