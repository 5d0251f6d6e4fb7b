"""A pass is seen from one place, paused and stepped on all workers, and is the real pass all the while."""

import threading
import time
import traceback
from functools import partial

import pytest
import torch
from helpers.models.autograd_functions import begin_pass
from helpers.waiting import wait_until

from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.autograd.graph.edges import Received
from nbdist.errors import Interrupted, RpcTimeout, UsageError
from nbdist.testing import Faults, World

weight = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)


@pytest.fixture
def disorderly():
    with World(3, faults=Faults(reorder={"*": 0.5})) as world, world[0].activate():
        yield world


def leaf():
    return torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)


def weigh(x):
    return (x * weight).exp()


def by_way_of(name, x):
    return rpc.rpc_sync(name, weigh, args=(x,)) + x.sin()


def forward(x):
    return (rpc.rpc_sync("worker1", by_way_of, args=("worker2", x)) * x).sum()


def spoil(x):
    return (x - 1.0).sqrt()  # whose gradient at 1 is infinite


def gradients_of(world, context_id):
    found = [agent.recorder.contexts.get(context_id).gradients() for agent in world]
    return {id(leaf): gradient for each in found for leaf, gradient in each.items()}


def expected(x):
    return torch.autograd.grad(((weigh(x) + x.sin()) * x).sum(), [x, weight])


def assert_right(world, context_id, x):
    found = gradients_of(world, context_id)
    for leaf, gradient in zip((x, weight), expected(x), strict=True):
        assert torch.equal(found[id(leaf)], gradient)


def assert_each_ran_once(keys, plan):
    """All that takes part; only a leaf on which nothing hangs may be given its gradient in instalments."""
    assert set(keys) == set(plan.waits_for)
    leaves = {(w, node.number) for w, nodes in plan.trace.nodes.items() for node in nodes if node.kind == "leaf"}
    inner = [key for key in keys if key not in leaves]
    assert len(inner) == len(set(inner))


# --- seeing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("which", ["world", "disorderly"])
def test_all_that_happens_is_seen(request, which, mode):
    world = request.getfixturevalue(which)
    with dist_autograd.context() as context_id:
        x = leaf()
        loss = forward(x)
        watch = context_id.watch(norms=True)
        context_id.backward(loss, mode=mode)
        trace = dist_autograd.trace(context_id)
        (seen,) = trace.passes
        assert (seen.root, seen.mode, seen.over, seen.error) == ("worker0", mode, True, "")
        assert {event.worker for event in seen.events} == {"worker0", "worker1", "worker2"}
        plan = dist_autograd.plan(context_id, loss, mode)
        for what in ("running", "done"):
            assert_each_ran_once([event.key for event in seen.events if event.what == what], plan)
        assert all(event.norm > 0 for event in seen.events if event.what == "running")
        assert all(event.seconds >= 0 for event in seen.events if event.what == "done")
        messages = {edge.autograd_message_id for edge in plan.edges}
        for what in ("arrived", "sent"):
            assert {event.message for event in seen.events if event.what == what} == messages
        assert_right(world, context_id, x)
    assert watch.closed


def test_norms_are_those_of_the_gradients(world):
    with dist_autograd.context() as context_id:
        x = leaf()
        loss = forward(x)
        watch = context_id.watch(norms=True)
        context_id.backward(loss)
        trace = dist_autograd.trace(context_id)
        (sqrt,) = [node for node in trace.nodes["worker2"] if node.kind == "leaf"]
        (norm,) = [e.norm for e in watch.passes[0].events if e.what == "running" and e.key == ("worker2", sqrt.number)]
        assert norm == pytest.approx(float(gradients_of(world, context_id)[id(weight)].norm()))


def test_nothing_is_seen_of_what_nobody_watches(world):
    with dist_autograd.context() as context_id:
        context_id.backward(forward(leaf()), retain_graph=True)
        assert dist_autograd.trace(context_id).passes == []
        with context_id.watch():
            context_id.backward(forward(leaf()), retain_graph=True)
        context_id.backward(forward(leaf()))
        (seen,) = dist_autograd.trace(context_id).passes
        assert seen.over


def test_passes_that_begin_elsewhere_are_seen(world):
    with dist_autograd.context() as context_id:
        x = leaf()
        rref = rpc.remote("worker1", by_way_of, args=("worker2", x))
        total = rref.remote().sum()
        watch = context_id.watch()
        total.backward(context_id)
        (seen,) = watch.passes
        assert seen.root == "worker1"
        assert {event.worker for event in seen.events if event.what == "done"} == {"worker0", "worker1", "worker2"}


def test_a_worker_that_comes_later_is_watched_too(world):
    with dist_autograd.context() as context_id:
        watch = context_id.watch()
        total = rpc.remote("worker1", by_way_of, args=("worker2", leaf())).remote().sum()
        total.to_here()
        total.backward(context_id)
        assert [seen.root for seen in watch.passes] == ["worker1"]


def test_numbers_of_nodes_stay(world):
    with dist_autograd.context() as context_id:
        loss = forward(leaf())
        before = dist_autograd.trace(context_id)
        other = forward(leaf())
        watch = context_id.watch()
        context_id.backward(loss + other)
        after = dist_autograd.trace(context_id)
        for worker, nodes in before.nodes.items():
            assert after.nodes[worker][: len(nodes)] == nodes
        assert watch.passes[0].complete


# --- pausing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["world", "disorderly"])
def test_step_by_step(request, which):
    world = request.getfixturevalue(which)
    with dist_autograd.context() as context_id:
        x = leaf()
        loss = forward(x)
        plan = dist_autograd.plan(context_id, loss)
        watch = context_id.watch(paused=True)
        handle = context_id.backward_async(loss)
        (first,) = watch.step()
        assert first.key == plan.roots[0]
        ran = [first]
        while stepped := watch.step():
            ran += stepped
            assert {event.key for event in ran} == set(plan.waits_for) or not handle.done()
        assert_each_ran_once([event.key for event in ran], plan)
        handle.wait()
        assert_right(world, context_id, x)


def test_nothing_runs_while_it_is_paused(world):
    ran = []
    with dist_autograd.context() as context_id:
        x = leaf()
        loss = forward(x)
        weight_hook = weight.register_hook(lambda gradient: ran.append("weight"))
        watch = context_id.watch(paused=True)
        handle = context_id.backward_async(loss)
        wait_until(lambda: watch.halted)
        (halted,) = watch.halted
        assert halted.worker == "worker0"
        time.sleep(0.1)
        assert not handle.done()
        assert not ran
        assert not context_id.gradients()
        watch.run()
        handle.wait()
        weight_hook.remove()
        assert ran == ["weight"]


def add_hook():
    weight.register_hook(lambda gradient: gradient * 10)


def test_a_hook_added_on_a_worker_while_it_is_paused_counts(world):
    with dist_autograd.context() as context_id:
        x = leaf()
        loss = forward(x)
        watch = context_id.watch(paused=True)
        handle = context_id.backward_async(loss)
        watch.step(2)
        rpc.rpc_sync("worker2", add_hook)
        watch.run()
        handle.wait()
        assert torch.equal(gradients_of(world, context_id)[id(weight)], expected_before_hook(x) * 10)


def expected_before_hook(x):
    weight._backward_hooks.clear()
    return expected(x)[1]


def test_run_to_the_first_nan(world):
    with dist_autograd.context() as context_id:
        x = leaf()
        loss = (rpc.rpc_sync("worker1", spoil, args=(x,)) * 2).sum()
        watch = context_id.watch(paused=True)
        handle = context_id.backward_async(loss)
        found = watch.run(until="nan")
        assert found.worker == "worker1"
        trace = dist_autograd.trace(context_id)
        assert trace.nodes["worker1"][found.node].name == "SqrtBackward0"
        assert not handle.done()
        wait_until(lambda: watch.halted)
        assert watch.halted[0].worker == "worker1"
        watch.run()
        handle.wait()
        assert torch.isinf(context_id.gradients()[x][0])


def test_run_to_a_nan_that_never_comes(world):
    with dist_autograd.context() as context_id:
        loss = forward(leaf())
        watch = context_id.watch(paused=True)
        handle = context_id.backward_async(loss)
        assert watch.run(until="nan") is None
        handle.wait()


def test_run_to_a_node_on_another_worker(world):
    with dist_autograd.context() as context_id:
        x = leaf()
        loss = forward(x)
        trace = dist_autograd.trace(context_id)
        (node,) = [node for node in trace.nodes["worker2"] if node.name == "ExpBackward0"]
        watch = context_id.watch(paused=True)
        handle = context_id.backward_async(loss)
        halted = watch.run(until=("worker2", node.number))
        assert halted.key == ("worker2", node.number)
        done = {event.key for event in watch.passes[0].events if event.what == "done"}
        assert halted.key not in done
        assert watch.step()
        watch.run()
        handle.wait()
        assert_right(world, context_id, x)


def test_run_from_message_to_message(world):
    with dist_autograd.context() as context_id:
        loss = forward(leaf())
        trace = dist_autograd.trace(context_id)
        watch = context_id.watch(paused=True)
        handle = context_id.backward_async(loss)
        met = []
        while halted := watch.run(until="message"):
            met.append(halted.key)
        handle.wait()
        receives = {(w, n.number) for w, nodes in trace.nodes.items() for n in nodes if n.kind == "receive"}
        assert set(met) == receives


def test_one_worker_is_stepped_and_the_others_are_not(world):
    with dist_autograd.context() as context_id:
        x = leaf()
        loss = forward(x)
        watch = context_id.watch(paused=True)
        handle = context_id.backward_async(loss)
        ran = watch.step(100, worker="worker0")
        assert {event.worker for event in ran} == {"worker0"}
        assert watch.step(100, worker="worker2") == [], "its gradient has not come"
        wait_until(lambda: {event.worker for event in watch.halted} == {"worker1"})
        watch.run()
        handle.wait()
        assert_right(world, context_id, x)


def test_pausing_in_the_middle(world):
    """From another thread than that which began the pass."""
    reached, go_on = threading.Event(), threading.Event()

    def hook(gradient):
        reached.set()
        go_on.wait(30)

    with dist_autograd.context() as context_id:
        x = leaf()
        y = x * 1.0
        y.register_hook(hook)
        loss = (y * 2).sum() + forward(x)
        watch = context_id.watch()
        handle = context_id.backward_async(loss)
        assert reached.wait(30)
        watch.pause()
        go_on.set()
        wait_until(lambda: watch.halted)
        assert not handle.done()
        watch.run()
        handle.wait()


def test_a_paused_pass_can_be_cancelled(world):
    with dist_autograd.context() as context_id:
        x = leaf()
        loss = forward(x)
        watch = context_id.watch(paused=True)
        handle = context_id.backward_async(loss, retain_graph=True)
        watch.step(4)
        handle.cancel()
        with pytest.raises(Interrupted):
            handle.wait()
        wait_until(lambda: watch.passes[0].over)
        assert watch.passes[0].error
        assert watch.step() == []
        watch.run()
        context_id.backward(loss)
        assert_right(world, context_id, x)


def test_the_end_of_a_context_ends_the_pause(world):
    with dist_autograd.context() as context_id:
        watch = context_id.watch(paused=True)
        handle = context_id.backward_async(forward(leaf()))
        watch.step(2)
    with pytest.raises(UsageError, match="ended during its backward pass"):
        handle.wait()
    with pytest.raises(UsageError, match="has ended"):
        watch.pause()


def test_a_pass_goes_on_when_its_watcher_is_gone():
    with World(3) as world:
        with world[1].activate():
            context_id = dist_autograd.open()
            x = leaf()
            loss = (rpc.rpc_sync("worker0", weigh, args=(x,)) * x).sum()
        with world[2].activate():
            recorder = world[2].recorder
            context = recorder.contexts.enter(int(context_id), world[1].me.incarnation)
            watch = recorder.passes.observing.watch(context, paused=True, norms=False)
        wait_until(lambda: world[1].recorder.contexts.get(int(context_id)).watching is not None)
        with world[1].activate():
            handle = dist_autograd.backward_async(int(context_id), loss)
        wait_until(lambda: watch.halted)
        world.kill(2)
        handle.wait()
        with world[1].activate():
            assert len(dist_autograd.get_gradients(int(context_id))) == 1
            context_id.close()


def watch_it(context_id):
    dist_autograd.watch(context_id, paused=True)


def test_passes_that_begin_when_the_watcher_is_gone_do_not_halt():
    with World(3) as world, world[0].activate(), dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", watch_it, args=(context_id,))
        loss = rpc.rpc_sync("worker2", weigh, args=(leaf(),)).sum()
        wait_until(lambda: world[0].recorder.contexts.get(int(context_id)).watching is not None)
        world.kill(1)
        context_id.backward(loss)


def begin_elsewhere(context_id, x):
    dist_autograd.backward(context_id, [(x * x).sum()])


def test_the_watch_of_a_pass_whose_root_is_gone_ends_its_waits():
    with World(3) as world, world[0].activate(), dist_autograd.context() as context_id:
        x = leaf()
        rpc.rpc_sync("worker1", torch.sum, args=(x,))
        watch = context_id.watch(paused=True)
        wait_until(lambda: world[1].recorder.contexts.get(int(context_id)).watching is not None)
        rpc.rpc_async("worker1", begin_elsewhere, args=(context_id, x))
        wait_until(lambda: watch.halted)
        world.kill(1)
        assert watch.step() == []
        assert "WorkerLost" in watch.passes[0].error
        wait_until(lambda: not any(agent.pending.frozen_by for agent in (world[0], world[2])))


def test_a_worker_that_begins_after_its_watch_was_replaced_does_not_halt(world):
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", weigh, args=(leaf(),)).sum()
        first = context_id.watch(paused=True)
        handle = context_id.backward_async(loss, mode="fast")
        wait_until(lambda: first.halted)
        first.close()
        context_id.watch()
        handle.wait()


def test_a_local_pass_does_not_mix_with_a_paused_one(world):
    p = leaf()
    with dist_autograd.context() as context_id:
        watch = context_id.watch(paused=True)
        handle = context_id.backward_async([(p * p).sum()])
        wait_until(lambda: watch.halted)
        with pytest.raises(UsageError, match="paused backward pass"):
            (p * 10).sum().backward()
        assert torch.equal(*torch.autograd.grad((p * 10).sum(), [p]), torch.full((2,), 10.0).double())
        watch.run()
        handle.wait()
        assert torch.equal(context_id.gradients()[p], 2 * p)
        (p * 10).sum().backward()
        assert torch.equal(p.grad, torch.full((2,), 10.0).double())


def test_an_error_of_a_view_fails_neither_pass_nor_step(world, caplog):
    x = leaf()
    with dist_autograd.context() as context_id, context_id.watch() as watch:
        watch.on_plan = lambda _: 1 / 0
        context_id.backward((x * 2).sum())
        watch.prepare(partial(dist_autograd.plan, context_id, (x * 2).sum()))
    assert caplog.text.count("ZeroDivisionError") == 2


def test_a_watch_is_the_only_one(world):
    with dist_autograd.context() as context_id:
        with context_id.watch(), pytest.raises(UsageError, match="watched already"):
            context_id.watch()
        context_id.watch()


@pytest.mark.parametrize(
    "until", ["sunset", "node", 5, ("worker1",), ("worker1", 5, 6), (5, "worker1"), ("worker1", "5"), ["worker1", 5]]
)
def test_what_one_cannot_run_to(world, until):
    with dist_autograd.context() as context_id, pytest.raises(UsageError, match="until must be"):
        context_id.watch().run(until=until)


# --- time -----------------------------------------------------------------------------------------


def train(pausing):
    with dist_autograd.context() as context_id:
        x = leaf()
        loss = (rpc.rpc_sync("worker2", weigh, args=(x,)) * x).sum()
        watch = context_id.watch(paused=True)
        pausing.append(watch)
        context_id.backward(loss)
    return 1


_pausing = []
_release = threading.Event()


def wait_for_release():
    _release.wait(30)


def train_paused():
    return train(_pausing)


def test_no_timeout_runs_while_a_pass_is_paused(world):
    _pausing.clear()
    future = rpc.rpc_async("worker1", train_paused, timeout=2)
    wait_until(lambda: _pausing and _pausing[0].halted)
    wait_until(lambda: all(agent.pending.frozen_by for agent in world))
    time.sleep(2.3)
    assert not future.done()
    _pausing[0].run()
    assert future.wait() == 1
    wait_until(lambda: not any(agent.pending.frozen_by for agent in world))


def test_the_thread_that_reads_messages_looks_at_no_large_tensor(world, monkeypatch):
    looked = []
    look = Received.look

    def noted(self, tensors):
        looked.append({frame.name for frame in traceback.extract_stack()})
        look(self, tensors)

    monkeypatch.setattr(Received, "look", noted)
    x = torch.ones(1_000_000, requires_grad=True)
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", torch.sum, args=(torch.ones(2, requires_grad=True),))  # so that it hears of the watch
        context_id.watch()
        wait_until(lambda: world[1].recorder.looks(int(context_id)))
        rpc.rpc_sync("worker1", torch.mul, args=(x, 2))
    assert len(looked) == 2  # the argument there, the result here
    for names in looked:
        assert names.isdisjoint({"on_call", "on_reply"})


def test_timeouts_run_again_after_a_pause(world):
    _pausing.clear()
    future = rpc.rpc_async("worker1", train_paused, timeout=5)
    wait_until(lambda: _pausing and _pausing[0].halted)
    wait_until(lambda: all(agent.pending.frozen_by for agent in world))
    slow = rpc.rpc_async("worker2", wait_for_release, timeout=0.3)
    time.sleep(0.5)
    assert not slow.done()
    _pausing[0].run()
    with pytest.raises(RpcTimeout):
        slow.wait()
    _release.set()
    future.wait()


@pytest.mark.timeout(120)
def test_worker_kernels_are_paused_and_their_callers_time_stands_still(shared_cluster):
    with dist_autograd.context() as context_id:
        x = torch.ones(4, requires_grad=True)
        rpc.rpc_sync("worker1", torch.sum, args=(x,))  # so that it is in the context, and hears of the watch
        watch = context_id.watch(paused=True)
        future = rpc.rpc_async("worker1", begin_pass, args=(context_id, x), timeout=2)
        wait_until(lambda: watch.halted)
        time.sleep(2.3)  # more than the call has
        assert not future.done()
        (event,) = watch.step()
        assert (event.worker, event.name) == ("worker1", "SumBackward0")
        watch.run()
        assert future.wait() == "worker1"
        assert torch.equal(context_id.gradients()[x], torch.full((4,), 2.0))
