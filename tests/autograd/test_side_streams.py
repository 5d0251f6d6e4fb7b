"""Threads with different current CUDA streams meet at the default stream; a record of calls takes the place of CUDA."""

import threading

import pytest
import torch

from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.autograd.graph import transport
from nbdist.autograd.passes import claims, context, pass_driver, worker_part
from nbdist.autograd.passes.gradient_store import GradientStore
from nbdist.gpus import side_streams


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda:0")

    def record_stream(self, stream):
        stream.found.append(f"{stream.name} keeps memory")


def on_gpu(number=1.0):
    return torch.full((2,), number).as_subclass(OnGpu)


@pytest.fixture
def calls(monkeypatch):
    """What streams are asked, in order. The thread ``pool`` is on the default stream, each other one on its own."""
    found = []

    class Stream:
        def __init__(self, name):
            self.name, self.found = name, found

        def __eq__(self, other):
            return self.name == other.name

        def wait_stream(self, other):
            found.append(f"{self.name} waits for {other.name}")

    def current(_):
        name = threading.current_thread().name
        return Stream("default" if name == "pool" else name)

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: Stream("default"))
    return found


def in_thread(name, function, *args):
    thread = threading.Thread(target=function, args=args, name=name)
    thread.start()
    thread.join()


def test_only_side_streams_wait(calls):
    in_thread("pool", side_streams.publish, [on_gpu(), None, torch.ones(1)])
    in_thread("pool", side_streams.catch_up, [on_gpu()])
    assert calls == ["default keeps memory"]
    calls.clear()
    in_thread("user", side_streams.publish, [on_gpu(), on_gpu()])
    in_thread("user", side_streams.catch_up, [on_gpu(), torch.ones(1)])
    in_thread("user", side_streams.publish, [torch.ones(1), None])
    assert calls == ["default waits for user", "user waits for default", "user keeps memory"]


def test_everywhere(calls, monkeypatch):
    side_streams.catch_up_everywhere()
    assert calls == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    in_thread("user", side_streams.catch_up_everywhere)
    assert calls == ["user waits for default"] * 2


@pytest.mark.parametrize("way", ["add", "update"])
def test_a_sum_waits_for_both_and_is_published(calls, way):
    leaf, store, more = torch.ones(2), GradientStore(), GradientStore()
    store.add(leaf, on_gpu())
    more.add(leaf, on_gpu(2.0))
    if way == "add":
        in_thread("user", store.add, leaf, on_gpu(2.0))
    else:
        in_thread("user", store.update, more)
    assert store.of(leaf).tolist() == [3.0, 3.0]
    assert calls == ["user waits for default", "user keeps memory", "user keeps memory", "default waits for user"]


weight = torch.tensor([2.0, 3.0], requires_grad=True)


def weigh(x):
    return x * weight


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_pass_publishes_what_it_computes_and_catches_up_before_it_reads(world, monkeypatch, mode, accumulate):
    """With tensors on the CPU: which tensors are published and caught up with, in which order."""
    found = []
    everywhere = []

    def noting(what):
        return lambda tensors: found.extend(
            (what, tuple(each.reshape(-1).tolist())) for each in tensors if each is not None
        )

    for module in (transport, context, pass_driver, claims, worker_part):
        monkeypatch.setattr(module, "CUDA_IS_BUILT", True)
    monkeypatch.setattr(side_streams, "publish", noting("publish"))
    monkeypatch.setattr(side_streams, "catch_up", noting("catch up"))
    monkeypatch.setattr(side_streams, "catch_up_everywhere", lambda: everywhere.append(1))
    x = torch.ones(2, requires_grad=True)
    weight.grad = None
    with dist_autograd.context() as context_id:
        loss = (rpc.rpc_sync("worker1", weigh, args=(x,)) * 5).sum()
        dist_autograd.backward(context_id, [loss], mode=mode, accumulate=accumulate)
        sent, of_weight, of_x = (5.0, 5.0), (5.0, 5.0), (10.0, 15.0)
        assert found.index(("publish", sent)) < found.index(("catch up", sent))
        assert ("publish", of_weight) in found
        assert found.index(("publish", of_x)) < len(found) - 1 - found[::-1].index(("catch up", of_x))
        if accumulate:
            assert everywhere
            assert x.grad.tolist() == list(of_x)
        else:
            found.clear()
            assert dist_autograd.get_gradients(context_id)[x].tolist() == list(of_x)
            assert found == [("catch up", of_x)]
