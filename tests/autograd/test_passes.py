"""What a backward pass over workers does, and what it says where it cannot go on."""

import contextlib
import gc
import os
import re
import signal
import threading
import warnings

import pytest
import torch
from helpers.waiting import wait_until

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.autograd import UnusedOutputs
from nbdist.autograd.graph.edges import Sent
from nbdist.autograd.passes.gradient_store import GradientStore
from nbdist.autograd.passes.worker_part import Part
from nbdist.errors import EncodeError
from nbdist.testing import World


def tensor(*values, requires_grad=True):
    return torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)


def twice(x):
    return x * 2


def both(a, b):
    return a * 2, b * 3


def by_way_of(name, x):
    return rpc.rpc_sync(name, twice, args=(x,)) + x


# --- what is not used in the loss: where torch fails or hangs -------------------------------------


def unused_call(x):
    rpc.rpc_sync("worker1", twice, args=(x,))
    return rpc.rpc_sync("worker1", twice, args=(x,)).sum()


def to_here_twice(x):
    rref = rpc.remote("worker1", twice, args=(x,))
    rref.to_here()
    return rref.to_here().sum()


def unused_on_a_third(x):
    rpc.rpc_sync("worker1", by_way_of, args=("worker2", x))
    return rpc.rpc_sync("worker1", twice, args=(x,)).sum()


def local_loss(x):
    rpc.rpc_sync("worker1", twice, args=(x,))
    return (x * 2).sum()


def never_fetched(x):
    rpc.remote("worker1", twice, args=(x,))
    return rpc.rpc_sync("worker1", twice, args=(x,)).sum()


def nothing(x):
    return None


def index(x):
    return x.argmax()


def detached(x):
    return x.detach()


def result_none(x):
    rpc.rpc_sync("worker1", nothing, args=(x,))
    return (x * 2).sum()


def result_index(x):
    rpc.rpc_sync("worker1", index, args=(x,))
    return (x * 2).sum()


def result_detached(x):
    rpc.rpc_sync("worker1", detached, args=(x,))
    return (x * 2).sum()


UNUSED = [
    unused_call,
    to_here_twice,
    unused_on_a_third,
    local_loss,
    never_fetched,
    result_none,
    result_index,
    result_detached,
]


@pytest.mark.parametrize("program", UNUSED)
def test_smart_is_right_whatever_is_not_used(world, program):
    x = tensor(1.0, 2.0)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [program(x)])
        assert torch.equal(dist_autograd.get_gradients(context_id)[x], tensor(2.0, 2.0))


@pytest.mark.parametrize("program", UNUSED)
def test_fast_says_at_once_what_is_not_used(world, program):
    x = tensor(1.0, 2.0)
    with dist_autograd.context() as context_id:
        loss = program(x)
        with pytest.raises(UnusedOutputs) as raised:
            dist_autograd.backward(context_id, [loss], mode="fast")
        said = str(raised.value)
        assert 'mode="smart"' in said
        assert "worker0 sent to worker1" in said or "worker1 sent to worker0" in said
        assert not dist_autograd.get_gradients(context_id), "a pass that failed leaves nothing"
        if program is never_fetched:
            with pytest.raises(RuntimeError, match="a second time"):  # as the message says
                dist_autograd.backward(context_id, [loss])
        if program in (local_loss, result_none, result_index, result_detached, unused_call):
            dist_autograd.backward(context_id, [program(x)])  # the next pass works
            assert torch.equal(dist_autograd.get_gradients(context_id)[x], tensor(2.0, 2.0))


NOT_USED = {
    unused_call: ["worker1 sent to worker0 (twice)"],
    unused_on_a_third: ["worker1 sent to worker0 (by_way_of)"],
    local_loss: ["worker1 sent to worker0 (twice)"],
    never_fetched: ["worker0 sent to worker1 (twice)"],
    result_none: ["worker0 sent to worker1 (nothing)"],
    result_index: ["worker0 sent to worker1 (index)"],
}
"""What is not used itself, of some of these programs; `to_here_twice` fetches in an order that is not fixed."""


@pytest.mark.parametrize("program", NOT_USED)
def test_fast_names_what_is_not_used_and_nothing_that_follows_from_it(world, program):
    with dist_autograd.context() as context_id:
        loss = program(tensor(1.0, 2.0))
        planned = dist_autograd.plan(context_id, loss, mode="fast").unused
        with pytest.raises(UnusedOutputs) as raised:
            dist_autograd.backward(context_id, [loss], mode="fast")
        named = [line.removeprefix("  what ") for line in str(raised.value).splitlines() if line.startswith("  ")]
        assert named == NOT_USED[program]
        assert named == [f"{edge.sender} sent to {edge.receiver} ({edge.function})" for edge in planned]
        handle = dist_autograd.backward_async(context_id, [program(tensor(1.0, 2.0))], mode="fast")
        with pytest.raises(UnusedOutputs, match=re.escape(NOT_USED[program][0])):
            handle.wait()


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_a_metric_under_no_grad_is_not_recorded(world, mode):
    x = tensor(1.0, 2.0)
    with dist_autograd.context() as context_id:
        with torch.no_grad():
            assert not rpc.rpc_sync("worker1", twice, args=(x,)).requires_grad
        dist_autograd.backward(context_id, [unused_free(x)], mode=mode)
        assert torch.equal(dist_autograd.get_gradients(context_id)[x], tensor(2.0, 2.0))


def unused_free(x):
    return rpc.rpc_sync("worker1", twice, args=(x,)).sum()


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_one_of_two_results_is_not_used(world, mode):
    a, b = tensor(1.0), tensor(1.0)
    with dist_autograd.context() as context_id:
        used, _ = rpc.rpc_sync("worker1", both, args=(a, b))
        dist_autograd.backward(context_id, [used.sum()], mode=mode)
        found = dist_autograd.get_gradients(context_id)
        assert torch.equal(found[a], tensor(2.0))
        assert b not in found or not found[b].any()


# --- what users ask for beyond torch --------------------------------------------------------------


def test_inside_of_a_context_the_id_may_be_left_out(world):
    x = tensor(1.0)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(unused_free(x))
        assert dist_autograd.get_gradients() == context_id.gradients() == {x: tensor(2.0)}
        context_id.backward([unused_free(x)])
        assert torch.equal(context_id.gradients()[x], tensor(4.0))
        assert isinstance(context_id, int)
    with pytest.raises(nbdist.UsageError, match="inside of `with"):
        dist_autograd.backward(unused_free(x.detach()))


def test_a_context_that_spans_cells(world):
    x = tensor(1.0)
    context = dist_autograd.open()
    loss = unused_free(x)
    context.backward(loss)
    assert context.gradients() == {x: tensor(2.0)}
    context.close()
    with pytest.raises(nbdist.UsageError, match=f"id: {context}: it has ended"):
        context.gradients()


def test_roots_that_are_not_scalars(world):
    x = tensor(1.0, 2.0)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", twice, args=(x,))
        with pytest.raises(nbdist.UsageError, match="is not a scalar"):
            context_id.backward(y)
        with pytest.raises(nbdist.UsageError, match=r"has shape \(1,\), but the root has shape \(2,\)"):
            context_id.backward(y, grad_tensors=tensor(1.0))
        context_id.backward([y, y.sum()], grad_tensors=[tensor(1.0, 10.0), None])
        assert torch.equal(context_id.gradients()[x], tensor(4.0, 22.0))


def test_gradients_accumulate_in_the_context_and_never_in_grad(world):
    x = tensor(1.0)
    x.grad = tensor(100.0, requires_grad=False)
    with dist_autograd.context() as context_id:
        loss = unused_free(x)
        context_id.backward(loss, retain_graph=True)
        context_id.backward(loss)
        assert torch.equal(context_id.gradients()[x], tensor(4.0))
    with dist_autograd.context() as context_id:
        context_id.backward(unused_free(x), accumulate=True)
        assert not context_id.gradients()
    assert torch.equal(x.grad, tensor(102.0))


weight = tensor(3.0)


def weighted(x):
    return x * weight


def test_accumulating_reaches_grad_on_every_worker_before_it_returns(world):
    weight.grad = None
    for times in (1.0, 2.0):
        with dist_autograd.context() as context_id:
            context_id.backward(rpc.rpc_sync("worker2", weighted, args=(tensor(5.0),)).sum(), accumulate=True)
        assert torch.equal(weight.grad, tensor(5.0 * times))
    weight.grad = None


def test_a_pass_in_the_background(world):
    x = tensor(1.0)
    _may_end.clear()
    with dist_autograd.context() as context_id:
        handle = dist_autograd.backward_async(context_id, [rpc.rpc_sync("worker1", held_twice, args=(x,)).sum()])
        assert not handle.done()
        _may_end.set()
        handle.wait()
        assert handle.done()
        assert torch.equal(context_id.gradients()[x], tensor(2.0))
        _may_end.clear()
        handle = dist_autograd.backward_async(rpc.rpc_sync("worker1", held_twice, args=(x,)).sum())
        handle.cancel()
        _may_end.set()
        with pytest.raises(nbdist.Interrupted, match="cancelled"):
            handle.wait()
        handle = dist_autograd.backward_async(rpc.rpc_sync("worker1", failing, args=(x,)).sum())
        with pytest.raises(ZeroDivisionError):
            handle.wait()
        assert torch.equal(context_id.gradients()[x], tensor(2.0))


_may_end = threading.Event()


class Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        assert _may_end.wait(60)
        return g * 2


def held_twice(x):
    return Held.apply(x)


# --- errors ---------------------------------------------------------------------------------------


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g / (1 // 0)


def failing(x):
    return Failing.apply(x)


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_an_error_in_a_node_comes_with_its_worker_and_the_next_pass_works(world, mode):
    x = tensor(1.0)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", by_failing, args=("worker2", x)).sum()
        with pytest.raises(ZeroDivisionError) as raised:
            context_id.backward(loss, mode=mode)
        assert "raised on worker2" in "".join(raised.value.__notes__)
        assert "1 // 0" in "".join(raised.value.__notes__)
        assert not context_id.gradients()
        context_id.backward(rpc.rpc_sync("worker2", twice, args=(x,)).sum())
        assert torch.equal(context_id.gradients()[x], tensor(2.0))


def by_failing(name, x):
    return rpc.rpc_sync(name, failing, args=(x,)) + x


def twice_with_a_gradient_that_cannot_be_sent(x):
    def spoil(gradient):
        spoilt = gradient.clone()
        spoilt.lock = threading.Lock()
        return spoilt

    x.register_hook(spoil)
    return x * 2


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_a_gradient_that_cannot_be_sent_fails_the_pass(world, mode):
    w = tensor(1.0, 2.0)
    for _ in range(2):
        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", twice_with_a_gradient_that_cannot_be_sent, args=(w,)).sum()
            with pytest.raises(EncodeError, match="a gradient cannot be sent: cannot pickle"):
                dist_autograd.backward(context_id, [loss], mode=mode)


def test_a_gradient_for_which_a_gpu_has_no_room_fails_the_pass(world, monkeypatch):
    def full(self, message, outputs, gradients):
        raise torch.OutOfMemoryError("CUDA out of memory")

    w = tensor(1.0, 2.0)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", twice, args=(w,)).sum()
        monkeypatch.setattr(Sent, "has_gpu_tensors", True)
        monkeypatch.setattr(Part, "brought", full)  # the copy to the tensor's GPU
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            dist_autograd.backward(context_id, [loss])
    monkeypatch.undo()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", twice, args=(w,)).sum()])


@pytest.mark.parametrize("place", ["mark", "arrive"])
def test_an_error_in_what_a_message_does_fails_the_pass(world, monkeypatch, place):
    def fail(*_):
        raise MemoryError("no room")

    w = tensor(1.0, 2.0)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", by_way_of, args=("worker2", w)).sum()
        monkeypatch.setattr(Part, place, fail)
        with pytest.raises(MemoryError, match="no room"):
            dist_autograd.backward(context_id, [loss])


class Full(torch.Tensor):
    """A gradient on a GPU that has no room for a sum with it."""

    def __add__(self, other):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_sums_for_which_a_gpu_has_no_room_leave_the_gradients_as_they_were():
    first, second = tensor(1.0), tensor(2.0)
    known, more = GradientStore(), GradientStore()
    known.add(first, torch.tensor(1.0))
    known.add(second, torch.tensor(2.0).as_subclass(Full))
    for leaf in (first, second):
        more.add(leaf, torch.tensor(3.0))
    with pytest.raises(torch.OutOfMemoryError):
        known.update(more)
    assert [float(gradient) for _, gradient in known.items()] == [1.0, 2.0]


def test_a_local_backward_through_what_was_received_says_what_to_write(world):
    x = tensor(1.0)
    with dist_autograd.context():
        loss = rpc.rpc_sync("worker1", twice, args=(x,)).sum()
        with pytest.raises(nbdist.UsageError, match=r"dist_autograd.backward\(context_id, \[loss\]\)"):
            loss.backward()


def test_a_pass_from_inside_of_a_pass_says_what_to_do(world):
    x = tensor(1.0)
    with dist_autograd.context() as context_id:
        loss, other = (x * 2).sum(), (x * 3).sum()
        loss.register_hook(lambda _: context_id.backward(other))
        with pytest.raises(nbdist.UsageError, match=r"after backward\(\) has returned"):
            context_id.backward(loss * 1)
        context_id.backward((x * 3).sum())
        assert torch.equal(context_id.gradients()[x], tensor(3.0))


def test_a_second_pass_over_freed_buffers(world):
    x = tensor(1.0)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", squared, args=(x,)).sum()
        context_id.backward(loss)
        with pytest.raises(RuntimeError, match="second time") as raised:
            context_id.backward(loss)
        assert "raised on worker1" in "".join(raised.value.__notes__)


def squared(x):
    return x * x


def test_a_root_on_another_worker(world):
    x = tensor(1.0)
    with dist_autograd.context() as context_id:
        rref = rpc.remote("worker1", squared, args=(x,))
        with pytest.raises(nbdist.UsageError, match=r"rref.backward\(context_id\)"):
            context_id.backward(rref)
        rref.backward(context_id)
        assert torch.equal(context_id.gradients()[x], tensor(2.0))


@pytest.mark.parametrize("worker", ["worker0", "worker1"])
def test_a_root_of_several_elements_is_refused_as_it_is_without_a_reference(world, worker):
    x = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as context_id:
        rref = rpc.remote(worker, squared, args=(x,))
        with pytest.raises(nbdist.UsageError, match=r"has 3 elements, and a pass begins with one"):
            rref.backward(context_id)
        assert not context_id.gradients()


def test_contexts_do_not_nest(world):
    with dist_autograd.context(), pytest.raises(nbdist.UsageError, match="do not nest"), dist_autograd.context():
        pass


def test_a_tensor_sent_outside_of_a_context_warns_once_at_each_place(world):
    x = tensor(1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            rpc.rpc_sync("worker1", twice, args=(x,))
        rpc.rpc_sync("worker1", twice, args=(x,))
    caught = [warning for warning in caught if not issubclass(warning.category, ResourceWarning)]  # of other tests
    assert len(caught) == 2
    assert {warning.filename for warning in caught} == {__file__}
    assert "twice on worker1" in str(caught[0].message)
    assert "no gradient will come back" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rpc.rpc_sync("worker1", twice, args=(x.detach(),))
        rpc.rpc_sync("worker1", type, args=(torch.nn.Linear(1, 1),))  # a module is a copy, and meant as one
        with torch.no_grad():
            rpc.rpc_sync("worker1", twice, args=(x,))
        with dist_autograd.context():
            rpc.rpc_sync("worker1", twice, args=(x,))


def test_a_parameter_is_recorded_and_a_modules_are_its_own(world):
    linear = torch.nn.Linear(1, 1)
    with dist_autograd.context() as context_id:
        kind, leaf = rpc.rpc_sync("worker1", look_at_parameter, args=(linear.weight,))
        assert (kind, leaf) == ("Tensor", False)
        assert rpc.rpc_sync("worker1", look_at_parameter_of, args=(linear,)) == ("Parameter", True)
        context_id.backward(rpc.rpc_sync("worker1", twice, args=(linear.weight,)).sum())
        assert context_id.gradients().keys() == {linear.weight}


def look_at_parameter(parameter):
    return type(parameter).__name__, parameter.is_leaf


def look_at_parameter_of(module):
    return look_at_parameter(module.weight)


def test_ctrl_c_gives_the_pass_up_everywhere(world):
    x = tensor(1.0)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", interrupting_chain, args=("worker2", x)).sum()
        _may_end.clear()
        with pytest.raises(KeyboardInterrupt):
            context_id.backward(loss)
        _may_end.set()
        wait_until(
            lambda: not any(agent.recorder.contexts.get(context_id).runs for agent in world),
            "the end of the pass everywhere",
        )
        assert not context_id.gradients()
        context_id.backward(rpc.rpc_sync("worker1", twice, args=(x,)).sum())
        assert torch.equal(context_id.gradients()[x], tensor(2.0))


class Interrupting(Held):
    @staticmethod
    def backward(ctx, g):
        os.kill(os.getpid(), signal.SIGINT)
        return Held.backward(ctx, g)


def interrupting_chain(name, x):
    return Interrupting.apply(rpc.rpc_sync(name, held_twice, args=(x,)))


# --- many at a time -------------------------------------------------------------------------------

shared = [torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2)]


def share(depth, x):
    y = x * shared[depth % 2]
    if depth:
        y = rpc.rpc_sync(f"worker{depth % 3}", share, args=(depth - 1, y))
    return y * shared[(depth + 1) % 2]


def test_sixty_concurrent_passes_that_share_parameters(world):
    problems = []

    def one(number):
        try:
            with world[0].activate(), dist_autograd.context() as context_id:
                x = torch.full((2,), 2.0, dtype=torch.float64)
                loss = rpc.rpc_sync("worker1", share, args=(4, x)).sum()
                context_id.backward(loss)
                sums = {}
                for agent in world:
                    for leaf, gradient in agent.recorder.contexts.get(context_id).gradients().items():
                        sums[id(leaf)] = sums.get(id(leaf), 0) + gradient
                # x * (5 factors of each); d/dp of 2 p^5 q^5 at 1 is 10
                assert all(torch.equal(sums[id(p)], torch.full((2,), 10.0).double()) for p in shared), sums
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not problems, problems[0]
    assert all(p.grad is None for p in shared)


def test_nothing_is_left_of_contexts(world):
    from nbdist.autograd.graph import edges
    from nbdist.autograd.passes import context as state
    from nbdist.autograd.passes import worker_part

    kinds = (state.Context, edges.EdgeSlot, edges.Received, edges.Sent, worker_part.Part, state.Run, edges.RECEIVE)

    def alive():
        gc.collect()
        return [object for object in gc.get_objects() if type(object) in kinds and id(object) not in before]

    before = set()
    before = {id(object) for object in alive()}

    x = tensor(1.0, 2.0)
    for mode in ("smart", "fast", "broken"):
        for _ in range(10):
            with dist_autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", by_failing if mode == "broken" else by_way_of, args=("worker2", x)).sum()
                with contextlib.suppress(ZeroDivisionError):
                    context_id.backward(loss, mode="smart" if mode == "broken" else mode)
            del loss
    wait_until(lambda: not alive())


# --- the end of contexts --------------------------------------------------------------------------


def test_a_context_is_gone_everywhere_also_where_a_third_worker_brought_it(world):
    x = tensor(1.0)
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", by_way_of, args=("worker2", x))
        assert all(agent.recorder.contexts.find(context_id) is not None for agent in world)
    # the fixture waits for their end


begun, over = threading.Event(), threading.Event()


def test_what_comes_after_the_end_is_not_recorded(world):
    x = tensor(1.0)
    with dist_autograd.context():
        late = rpc.rpc_async("worker1", at_leisure, args=(x,))
        assert begun.wait(20)
    wait_until(lambda: not world[1].recorder.contexts.all())
    with pytest.warns(UserWarning, match="twice on worker2 .* outside of a distributed autograd context"):
        came = let_go(late)
    assert came.grad_fn is None


def let_go(late):
    over.set()
    return late.wait()


def at_leisure(x):
    begun.set()
    assert over.wait(20)
    return rpc.rpc_sync("worker2", twice, args=(x,))


def test_the_end_of_the_worker_between_is_not_in_the_way():
    with World(3, dynamic=True) as world, world[0].activate():
        x = tensor(1.0)
        with dist_autograd.context() as context_id:
            rpc.rpc_sync("worker1", by_way_of, args=("worker2", x))
            world.kill(1)
            assert world[2].recorder.contexts.find(context_id) is not None
        wait_until(lambda: not world[2].recorder.contexts.all())


def test_the_end_of_the_maker_ends_its_contexts():
    with World(3, dynamic=True) as world:
        with world[0].activate():
            context = dist_autograd.open()
            rpc.rpc_sync("worker1", by_way_of, args=("worker2", tensor(1.0)))
        assert world[2].recorder.contexts.find(context) is not None
        world.kill(0)
        wait_until(lambda: not (world[1].recorder.contexts.all() or world[2].recorder.contexts.all()))


def test_a_worker_lost_during_a_pass_fails_it_by_name():
    with World(3, dynamic=True) as world, world[0].activate():
        x = tensor(1.0)
        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", by_way_of, args=("worker2", x)).sum()
            world.kill(2)
            with pytest.raises(nbdist.WorkerLost, match="worker2"):
                context_id.backward(loss)
            context_id.backward(rpc.rpc_sync("worker1", twice, args=(x,)).sum())
            assert torch.equal(context_id.gradients()[x], tensor(2.0))


# --- in another thread than that of the context ----------------------------------------------------


def test_a_thread_in_no_context_is_told_of_the_contexts_of_others(world):
    said = []

    def outside():
        world[0].activate().__enter__()
        with pytest.warns(UserWarning, match="no gradient will come back") as warned:
            rpc.rpc_sync("worker1", twice, args=(x,))
        said.append(str(warned[0].message))
        for run in (lambda: dist_autograd.backward([received.sum()]), received.sum().backward):
            with pytest.raises(nbdist.UsageError) as raised:
                run()
            said.append(str(raised.value))
        dist_autograd.backward(context_id, [received.sum()])  # the id is enough

    with dist_autograd.context() as context_id:
        x = tensor(1.0)
        received = rpc.rpc_sync("worker1", twice, args=(x,))
        thread = threading.Thread(target=outside, name="other")
        thread.start()
        thread.join()
        assert dist_autograd.get_gradients(context_id)[x].item() == 2.0
    opened = f"thread 'MainThread' has opened context {context_id}, and this thread, 'other', is in none"
    assert opened in said[0]
    assert opened in said[1]
    assert f"(twice) in context {context_id}, which thread 'MainThread' has opened" in said[2]
    with pytest.raises(nbdist.UsageError) as raised:
        dist_autograd.get_gradients()
    assert str(raised.value).endswith("as context_id:`"), "there is no other"
