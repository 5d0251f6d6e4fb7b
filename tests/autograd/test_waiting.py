"""Waits keep a call of torch's engine going until nodes on several devices have run.

Here all nodes are on the CPU, and only said to be on two devices. With a GPU, tests/gpu/test_cluster.py has nodes
on both.
"""

import threading
import time

import pytest
import torch

from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.autograd.graph import countdown as waiting
from nbdist.autograd.graph.countdown import Countdown, devices_of
from nbdist.autograd.graph.edges import HeldBack
from nbdist.autograd.passes import worker_part


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.register_hook = "the user's, and not the node's method"
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def double(x):
    return x * 2


def program(x, w, call):
    """Has nodes that wait for a gradient of the other worker, behind others that need not wait."""
    h = torch.tanh(x @ w)
    other = call(h)
    own = torch.tanh(Same.apply(h) @ w)
    again = call(own + other)
    return (again * own).sum() + other.sum()


@pytest.fixture
def contested(monkeypatch):
    """Counts the calls of torch's engine that stop at a barrier; all nodes are taken to be on two devices."""
    counted = []

    def count(nodes):
        counted.append(nodes)
        return Countdown(nodes)

    monkeypatch.setattr(worker_part, "Countdown", count)
    two = {torch.device("cpu"), torch.device("meta")}
    monkeypatch.setattr(worker_part, "devices_of", lambda nodes: two)
    return counted


def pass_over_two_workers():
    torch.manual_seed(0)
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    with dist_autograd.context() as context_id:
        loss = program(x, w, lambda h: rpc.rpc_sync("worker1", double, args=(h,)))
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)
        found = gradients[x], gradients[w]
    return found, torch.autograd.grad(program(x, w, double), (x, w))


def test_gradients_are_those_of_one_process(world, contested):
    for _ in range(5):
        found, expected = pass_over_two_workers()
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert contested


def nodes_of(*losses):
    return [loss.grad_fn for loss in losses]


def test_a_wait_returns_when_a_node_has_run_and_ends_the_call_after_the_last():
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    first, second = a.sum(), b.sum()
    countdown = Countdown(nodes_of(first, second))
    began = time.monotonic()
    threading.Timer(0.2, first.backward).start()
    while countdown.left == 2:
        countdown.wait()  # returns, at the latest after a while, without an error
    assert time.monotonic() - began > 0.15
    second.backward()
    with pytest.raises(HeldBack):
        countdown.wait()
    countdown.remove()
    assert countdown.left == 0
    a.sum().backward()
    assert countdown.left == 0  # the hooks are gone


def test_a_node_that_never_runs_is_an_error(world, contested, monkeypatch):
    """The waits end, and the gradients that are missing are not taken for zeros."""
    monkeypatch.setattr(waiting, "_LONGEST_PATIENCE", 0.001)
    never = torch.ones(1, requires_grad=True).sum().grad_fn
    monkeypatch.setattr(worker_part, "Countdown", lambda nodes: Countdown([*nodes, never]))
    with pytest.raises(RuntimeError, match=r"nodes of a backward pass, which is on cpu, meta, did not run"):
        pass_over_two_workers()


def test_the_devices_of_nodes():
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).to("meta")
    assert devices_of([y.grad_fn]) == {torch.device("meta")}
    assert devices_of(nodes_of(y, x.sum())) == {torch.device("meta"), torch.device("cpu")}
