"""What autograd can do inside of one process, it does where a part of it runs on another worker."""

import contextlib
import threading
from dataclasses import dataclass

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from nbdist import autograd as dist_autograd
from nbdist import rpc

torch.manual_seed(0)
linear = torch.nn.Linear(4, 4)
embedding = torch.nn.Embedding(6, 4, sparse=True)
events = []


@dataclass
class Batch:
    x: torch.Tensor
    note: str = "kept"


def containers(x):
    return {"sum": [x + 1, (x * 2,)], "same": x}


def from_containers(got):
    return got["sum"][0].sum() + got["sum"][1][0].sum() * 3 + got["same"].sum()


def custom_class(x):
    return Batch(x * 2)


def dtypes(x):
    return x.double() * 2, (x.to(torch.complex64) * 1j), x.to(torch.bfloat16), x.argmax()


def from_dtypes(got):
    return got[0].sum() + (got[1] * 1j).real.sum() + got[2].float().sum() + got[3]


def through_linear(x):
    return linear(x)


def looked_up(x):
    return embedding(torch.tensor([1, 1, 3])) * x[0, :4]


def mixed_precision(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return linear(x).float()


def packed(x):
    with saved_tensors_hooks(lambda t: (events.append("pack"), t.numpy())[1], lambda a: torch.from_numpy(a)):
        return x.detach() * 0 + (x * x)


def changed_in_place(x):
    x = x * 1
    x[:, 0] += 5
    x.mul_(2)
    return x.t()


def module_hooks(x):
    events.append("forward")
    handle = linear.register_full_backward_hook(lambda *_: events.append("module"))
    y = linear(x)
    y.register_hook(lambda _: (events.append("tensor"), handle.remove())[0])
    return y


def checkpointed(x):
    return checkpoint(linear, x, use_reentrant=True)


def branches(x):
    a, b, c = x.unbind(0)[0], x.sum(0), x.t()[1]
    return torch.cat([a * b, c.exp()])


CASES = {
    function.__name__: (function, reduce)
    for function, reduce in [
        (containers, from_containers),
        (custom_class, lambda got: got.x.sum() if got.note == "kept" else None),
        (dtypes, from_dtypes),
        (through_linear, lambda got: got.square().sum()),
        (looked_up, lambda got: got.sum()),
        (mixed_precision, lambda got: got.sum()),
        (packed, lambda got: got.sum()),
        (changed_in_place, lambda got: (got * got).sum()),
        (module_hooks, lambda got: got.sum()),
        (checkpointed, lambda got: got.sum()),
        (branches, lambda got: got.sum()),
    ]
}


@rpc.functions.async_execution
def later(name, function, x):
    return rpc.rpc_async(name, function, args=(x,)).then(lambda done: done.wait())


def sync(function, x):
    return rpc.rpc_sync("worker1", function, args=(x,))


def by_future(function, x):
    return rpc.rpc_async("worker1", function, args=(x,)).wait()


def by_reference(function, x):
    return rpc.remote("worker1", function, args=(x,)).to_here()


def by_async_execution(function, x):
    return rpc.rpc_sync("worker2", later, args=("worker1", function, x))


def to_itself(function, x):
    return rpc.rpc_sync("worker0", function, args=(x,))


WAYS = [sync, by_future, by_reference, by_async_execution, to_itself]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_the_gradients_are_those_of_one_process(world, case, way):
    function, reduce = CASES[case]
    parameters = [*linear.parameters(), embedding.weight]
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()

    events.clear()
    reduce(function(x * 1)).backward()
    expected, expected_events = [x.grad, *(p.grad for p in parameters)], sorted(events)
    for tensor in (x, *parameters):
        tensor.grad = None

    events.clear()
    with dist_autograd.context() as context_id:
        context_id.backward(reduce(way(function, x * 1)))
        found = {}
        for agent in world:
            context = agent.recorder.contexts.find(context_id)
            found.update({id(leaf): g for leaf, g in context.gradients().items()} if context is not None else {})
    for tensor, wanted in zip((x, *parameters), expected, strict=True):
        got = found.get(id(tensor))
        if wanted is None:
            assert got is None
        else:
            assert got.layout == wanted.layout
            torch.testing.assert_close(got.to_dense(), wanted.to_dense())
        assert tensor.grad is None
    assert sorted(events) == expected_events


def test_a_sparse_tensor_travels_and_comes_back(world):
    dense = torch.eye(3, dtype=torch.float64)
    leaf = dense.to_sparse().requires_grad_()
    with dist_autograd.context() as context_id:
        total = torch.sparse.sum(rpc.rpc_sync("worker1", torch.mul, args=(leaf, 2.0)))
        context_id.backward(total)
        assert torch.equal(context_id.gradients()[leaf].to_dense(), 2 * dense)


def test_the_grad_mode_of_the_caller_travels_inside_of_a_context_only(world):
    with torch.no_grad():
        assert rpc.rpc_sync("worker1", torch.is_grad_enabled)
        with dist_autograd.context():
            assert not rpc.rpc_sync("worker1", torch.is_grad_enabled)
            assert not rpc.rpc_sync("worker1", nested_mode)
    with dist_autograd.context():
        assert rpc.rpc_sync("worker1", nested_mode)
    assert rpc.rpc_sync("worker1", torch.is_grad_enabled)


def nested_mode():
    return rpc.rpc_sync("worker2", torch.is_grad_enabled)


def test_a_context_goes_along_into_callbacks_of_futures(world):
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        first = rpc.rpc_async("worker1", torch.mul, args=(x, 2.0))
        second = first.then(lambda done: rpc.rpc_sync("worker2", torch.mul, args=(done.wait(), 3.0)))
        assert len(second.wait().shape) == 1
        context_id.backward(second.wait().sum())
        assert torch.equal(context_id.gradients()[x], torch.full((2,), 6.0))
    assert second.then(lambda _: dist_autograd.api.recorder().current()).wait() is None


def test_a_call_inside_of_a_reentrant_checkpoint_says_what_to_write(world):
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        y = checkpoint(lambda t: rpc.rpc_sync("worker1", torch.mul, args=(t, 2.0)), x * 1, use_reentrant=True)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            context_id.backward(y.sum())
        y = checkpoint(lambda t: rpc.rpc_sync("worker1", torch.mul, args=(t, 2.0)), x * 1, use_reentrant=False)
        context_id.backward(y.sum())
        assert torch.equal(context_id.gradients()[x], torch.full((2,), 2.0))


@contextlib.contextmanager
def in_hand(world, weight, others):
    """Another pass has ``weight`` in hand, until the event is set or the block ends; it puts what it finds into
    ``others``.
    """
    holds, go_on = threading.Event(), threading.Event()

    def hold(_):
        holds.set()
        assert go_on.wait(20)

    def other():
        with world[0].activate(), dist_autograd.context() as context_id:
            y = weight * 5
            y.register_hook(hold)
            context_id.backward(y)
            others.update(context_id.gradients())

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert holds.wait(20)
        yield go_on
    finally:
        go_on.set()
        thread.join(20)


def reentrant(weight, x):
    return checkpoint(lambda t: t * weight, x * 1, use_reentrant=True)


def test_a_reentrant_checkpoint_reaches_a_leaf_that_another_pass_has_in_hand(world):
    weight, x, others = torch.nn.Parameter(torch.tensor(3.0)), torch.tensor(2.0, requires_grad=True), {}
    with in_hand(world, weight, others), dist_autograd.context() as context_id:
        context_id.backward(reentrant(weight, x))
        assert context_id.gradients() == {x: torch.tensor(3.0), weight: torch.tensor(2.0)}
        assert not others, "the other pass has it in hand all the time"
    assert others == {weight: torch.tensor(5.0)}
    assert weight.grad is None


def test_hooks_after_accumulation_run_also_there(world):
    weight, x, others, ran = torch.nn.Parameter(torch.tensor(3.0)), torch.tensor(2.0, requires_grad=True), {}, []
    with in_hand(world, weight, others) as go_on, dist_autograd.context() as context_id:
        weight.register_hook(lambda _: go_on.set())  # by then it is certain that the leaf is somebody else's
        weight.register_post_accumulate_grad_hook(lambda leaf: ran.append(leaf.grad.item()))
        context_id.backward(reentrant(weight, x))
        assert context_id.gradients() == {x: torch.tensor(3.0), weight: torch.tensor(2.0)}
    assert others == {weight: torch.tensor(5.0)}
    assert sorted(ran) == [2.0, 5.0]
    assert weight.grad is None


def test_gradients_accumulate_also_there(world):
    weight, x, others = torch.nn.Parameter(torch.tensor(3.0)), torch.tensor(2.0, requires_grad=True), {}
    with in_hand(world, weight, others) as go_on, dist_autograd.context() as context_id:
        weight.register_hook(lambda _: go_on.set())
        context_id.backward(reentrant(weight, x), accumulate=True)
        assert torch.equal(weight.grad, torch.tensor(2.0))
        assert torch.equal(x.grad, torch.tensor(3.0))
    assert others == {weight: torch.tensor(5.0)}
