"""A process whose table of open files is full: nobody is taken for dead, and every accepted call ends."""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers.processes import full_files, workers

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.rpc.api import current_agent

SOON = 30.0
LARGE = 1 << 20  # elements: four bytes each, well above the threshold from which tensors travel in shared memory


@pytest.fixture(scope="module")
def world():
    with workers.world(3, options={"arena_threshold": 1 << 16}) as others:
        yield others


@contextlib.contextmanager
def full(*names):
    """The files of these workers are used up while the block runs."""
    try:
        for name in names:
            full_files.fill() if name == "worker0" else rpc.rpc_sync(name, full_files.fill)
        yield
    finally:
        for name in names:
            full_files.free() if name == "worker0" else rpc.rpc_sync(name, full_files.free, timeout=SOON)


def nobody_is_lost():
    for name in ("worker1", "worker2"):
        assert rpc.rpc_sync(name, workers.statistics, timeout=SOON)["members"] == 3
    assert current_agent().statistics()["members"] == 3


def test_a_call_whose_memory_the_callee_cannot_map_is_answered_with_an_error(world):
    for count in (LARGE, LARGE + 1):
        with full("worker1"):
            future = rpc.rpc_async("worker1", full_files.total, args=(torch.ones(count),), timeout=SOON)
            with pytest.raises(nbdist.DecodeError, match="files open, its limit"):
                future.wait()
    assert rpc.rpc_sync("worker1", full_files.total, args=(torch.ones(LARGE),), timeout=SOON) == LARGE
    nobody_is_lost()


def test_an_answer_whose_memory_the_caller_cannot_map_is_an_error(world):
    with full("worker0"):
        future = rpc.rpc_async("worker1", full_files.ones, args=(LARGE,), timeout=SOON)
        with pytest.raises(nbdist.DecodeError, match="files open, its limit"):
            future.wait()
        with pytest.raises(nbdist.DecodeError, match="files open, its limit"):
            rpc.rpc_sync("worker2", full_files.ones, args=(LARGE,), timeout=SOON)
    assert rpc.rpc_sync("worker1", full_files.ones, args=(LARGE,), timeout=SOON).sum() == LARGE
    nobody_is_lost()


@pytest.mark.parametrize("who", ["worker0", "worker1"])
def test_a_backward_pass_whose_gradients_cannot_be_mapped_fails(world, who):
    """The gradient goes by a message that nobody answers: whoever cannot read it has to tell the root."""
    with dist_autograd.context() as context:
        inputs = torch.ones(LARGE, requires_grad=True)
        kept = torch.ones(LARGE, requires_grad=True)
        loss = (rpc.rpc_sync("worker1", full_files.grow, args=(inputs,), timeout=SOON) * kept).sum()
        with full(who), pytest.raises(nbdist.DecodeError, match="files open, its limit"):
            dist_autograd.backward(context, [loss])
    nobody_is_lost()


def test_calls_without_shared_memory_go_on(world):
    with full("worker0", "worker1", "worker2"):
        for name in ("worker1", "worker2"):
            assert rpc.rpc_sync(name, workers.identity, args=([1, torch.ones(3)],), timeout=SOON)[0] == 1
            large = rpc.rpc_sync(name, workers.identity, args=(b"x" * (3 << 20),), timeout=SOON)
            assert len(large) == 3 << 20
    nobody_is_lost()
