"""A function forks, or uses `multiprocessing`, while it holds tensors that came in shared memory."""

import os
import threading

import pytest
import torch
from helpers.processes import forking, workers
from helpers.waiting import wait_until

from nbdist import rpc
from nbdist.testing import World

SOON = 60.0
COUNT = 1 << 18  # elements of four bytes: well above the threshold from which tensors travel in shared memory


@pytest.fixture(scope="module")
def world():
    with workers.world(2):
        yield


def all_is_given_back():
    def clean():
        ours, theirs = workers.statistics(), rpc.rpc_sync("worker1", workers.statistics)
        return not ours["arena_blocks_held"] and not theirs["arena_blocks_held"] and theirs["running_calls"] == 1

    wait_until(clean)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pool_of_processes(world, method):
    tensor = torch.ones(COUNT)
    found, after = rpc.rpc_sync("worker1", forking.pool, args=(tensor, method), timeout=SOON)
    assert found == ([COUNT, COUNT + 1.0, COUNT + 2.0] if method == "fork" else []) + [COUNT, COUNT]
    assert after == COUNT
    all_is_given_back()


@pytest.mark.parametrize(("then", "code"), [("returns", 0), ("raises", 1), ("exits", 3), ("drops", 0)])
def test_a_forked_process_that_comes_back_from_the_function_ends(world, then, code):
    tensor = torch.ones(COUNT)
    assert rpc.rpc_sync("worker1", forking.fork, args=(tensor, then), timeout=SOON) == (code, COUNT)
    all_is_given_back()


def test_a_tensor_of_a_forked_process_is_not_overwritten_by_later_ones(world):
    rpc.rpc_sync("worker1", forking.keep_in_child, args=(torch.ones(COUNT),), timeout=SOON)
    for number in range(2, 40):
        assert rpc.rpc_sync("worker1", torch.add, args=(torch.full((COUNT,), float(number)), 1))[0] == number + 1
    assert rpc.rpc_sync("worker1", forking.sum_in_child, timeout=SOON) == COUNT


def test_a_lock_that_another_thread_holds_is_free_in_a_forked_process():
    with World(1) as alone:
        lock, held, let_go = alone[0].exchange.lock, threading.Event(), threading.Event()

        def hold():
            with lock:
                held.set()
                let_go.wait(20)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(20)
        child = os.fork()
        if not child:
            os._exit(not lock.acquire(timeout=5))
        _, status = os.waitpid(child, 0)
        let_go.set()
        holder.join(20)
        assert status == 0
