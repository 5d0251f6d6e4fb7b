"""What is known of a backward pass: against a real one over three workers of one process."""

import gc
import itertools
import json
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from helpers.waiting import wait_until

from nbdist import autograd as dist_autograd
from nbdist import rpc, trace
from nbdist.errors import UsageError, WorkerLost
from nbdist.testing import World
from nbdist.views.drawing.graph import as_svg
from nbdist.views.passes import page, report
from nbdist.views.passes.watching import Watcher

weight = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)


@pytest.fixture
def world():
    with World(3) as world, world[0].activate():
        yield world


def weigh(x):
    return (x * weight).exp()


def by_way_of(name, x):
    return rpc.rpc_sync(name, weigh, args=(x,)) + x.sin()


def unused(x):
    return x.cos()


def forward(x):
    rpc.rpc_sync("worker2", unused, args=(x,))
    return (rpc.rpc_sync("worker1", by_way_of, args=("worker2", x)) * x).sum()


def spoil(x):
    return (x - 1.0).sqrt()  # whose gradient at 1 is infinite


def on_first(world, cell):
    """As it is in a process of one agent: it is every thread's."""

    def run():
        with world[0].activate():
            cell()

    return run


def leaf():
    return torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)


def states(watcher):
    found = watcher.backward
    return [found.state_of(key) for key in found.nodes]


def test_a_pass_that_is_over(world):
    x = leaf()
    with Watcher() as watcher, dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [forward(x)])
        wait_until(lambda: watcher.last.complete)
        found = watcher.backward
        assert {
            state for key, state in zip(found.nodes, states(watcher), strict=True) if key in found.plan.waits_for
        } == {"done"}
        assert "unused" in states(watcher)  # what was sent to worker2 and did not come into the loss
        assert watcher.state == "over"
    shares = {share.worker: share for share in found.shares()}
    assert all(share.done == share.nodes for share in shares.values())
    assert set(shares) == {"worker0", "worker1", "worker2"}
    path = found.critical_path()
    assert path[0][0] == "worker0"
    assert len(path) > 3
    assert found.largest() is not None
    detail = page.detail(found, found.largest())
    assert sum(detail["counts"]) == 2  # all that it was given
    assert detail["low"] <= detail["high"]
    assert "critical path" in "\n".join(report.as_text(found))
    assert "<span title" in report.as_html(found, "told")
    picture = as_svg(found.plan.trace, report.marks_of(found))
    assert "takes no part</text>" in picture
    assert "critical path</text>" in picture
    assert "has not run" not in picture
    assert "worker0 to worker1, with a call of " in picture
    assert json.loads(json.dumps(watcher.drawn()[1]))["over"]


def test_step_by_step_counts_and_who_is_waited_for(world):
    x = leaf()
    watcher = Watcher(paused=True)

    def cell():
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [forward(x)])
            found.update(dist_autograd.get_gradients(context_id))

    found = {}
    watcher.begin(on_first(world, cell))
    (first,) = watcher.step(1)
    assert states(watcher).count("done") == 1
    outline, drawn, _ = watcher.drawn()
    assert watcher.state == "paused"
    index = [(outline["workers"][node["w"]], node["n"]) for node in outline["nodes"]].index(first.key)
    assert drawn["states"][index] == "d"
    assert drawn["ms"][index] is not None
    assert drawn["for"]
    assert all(drawn["got"][index] < outline["nodes"][index]["waits"] for index in drawn["for"])
    assert watcher.drawn()[0] is outline
    for done in range(2, 5):
        watcher.step(1)
        assert states(watcher).count("done") == done
    watcher.run()
    watcher.wait(30)
    expected = torch.autograd.grad(((weigh(x) + x.sin()) * x).sum(), [x])
    assert torch.equal(found[x], expected[0])


def test_run_to_the_first_nan(world):
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    watcher = Watcher(paused=True)

    def cell():
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [rpc.rpc_sync("worker2", spoil, args=(x,)).sum()])

    watcher.begin(on_first(world, cell))
    event = watcher.run(until="nan")
    assert event.worker == "worker2"
    found = watcher.backward
    assert found.bad == event.key
    told = "\n".join(report.as_text(found))
    assert "the first NaN or Inf came up at Sqrt@worker2" in told
    assert "return (x - 1.0).sqrt()" in told  # the line, too, which was noted there
    watcher.run()
    watcher.wait(30)


def test_a_cell_that_fails_says_so(world):
    watcher = Watcher()

    def cell():
        raise ValueError("no")

    watcher.begin(cell)
    with pytest.raises(ValueError, match="no"):
        watcher.wait(10)
    assert watcher.state == "failed"
    assert "ValueError: no" in watcher.told()


class Refuse(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        raise ValueError("no")


def refuse(x):
    return Refuse.apply(x * weight)


def test_in_a_pass_that_has_failed_nobody_waits(world):
    with pytest.raises(ValueError, match="no"), Watcher() as watcher, dist_autograd.context() as context:
        dist_autograd.backward(context, [rpc.rpc_sync("worker1", refuse, args=(leaf(),)).sum()])
    assert watcher.state == "failed"
    found = watcher.backward
    assert "waiting" in states(watcher)
    assert not any(found.waits(key) for key in found.nodes)
    assert "waits for" not in repr(watcher)


def test_of_many_passes_some_are_looked_at_and_all_of_them_run(world):
    x = leaf()
    with Watcher() as watcher:
        for _ in range(30):
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [forward(x)])
        assert watcher.count == 30
    with dist_autograd.context() as context_id:  # nobody watches any more
        assert world[0].recorder.contexts.get(context_id).watch is None


def test_where_no_pass_is_under_way(world):
    with Watcher() as watcher, pytest.raises(UsageError, match="no backward pass"):
        watcher.step(1)


def test_a_pass_that_begins_on_another_worker(world):
    x = leaf()
    watcher = Watcher(paused=True)

    def cell():
        with dist_autograd.context() as context_id:
            loss = rpc.remote("worker1", forward_there, args=(x,))
            loss.backward(context_id)
            found.update(dist_autograd.get_gradients(context_id))

    found = {}
    watcher.begin(on_first(world, cell))
    assert len(watcher.step(2)) == 2
    wait_until(lambda: watcher.backward is not None)  # what it consists of is asked for, and not by who looks
    assert states(watcher).count("done") == 2
    assert watcher.backward.plan.waits_for
    watcher.run()
    watcher.wait(30)
    assert torch.equal(found[x], torch.autograd.grad(weigh(x).sum(), [x])[0])


def forward_there(x):
    return weigh(x).sum()


def test_what_begins_after_the_cell_is_not_held_up(world):
    x = leaf()
    with Watcher(paused=True):
        context_id = dist_autograd.open()
        loss = forward(x)
    dist_autograd.backward(context_id, [loss])
    context_id.close()


def test_of_two_watchers_in_one_thread_one_sees_a_pass(world):
    x = leaf()
    with Watcher() as first, Watcher() as second, dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [forward(x)])
    assert (first.last is None) != (second.last is None)


def test_a_pass_of_another_thread_is_held_and_stepped(world):
    found = []

    def elsewhere():
        with dist_autograd.context() as context_id:
            x = leaf()
            dist_autograd.backward(context_id, [forward(x)])
            found.append(dist_autograd.get_gradients(context_id)[x])

    with Watcher(paused=True) as watcher:
        thread = threading.Thread(target=on_first(world, elsewhere))
        thread.start()
        wait_until(lambda: watcher.under_way)
        assert len(watcher.step(2)) == 2
        assert not found
        watcher.run()
        thread.join(30)
    assert torch.equal(found[0], torch.autograd.grad(forward_here(x := leaf()), [x])[0])


def forward_here(x):
    return ((weigh(x) + x.sin()) * x).sum()


def train_there(steps):
    """Training, on a worker, of steps with a context each: the gradients."""
    gradients = []
    for _ in range(steps):
        with dist_autograd.context() as context_id:
            x = leaf()
            dist_autograd.backward(context_id, [(rpc.rpc_sync("worker2", weigh, args=(x,)) * x).sum()])
            gradients.append(dist_autograd.get_gradients(context_id)[x])
    return gradients


def listeners_of(agent, monkeypatch):
    """The listeners to new contexts of an agent: those that it has now, and all that it got from now on."""
    present, ever, own = [], [], agent.recorder.when_opened

    def when_opened(then, wants_lines):
        forget = own(then, wants_lines)
        present.append(then)
        ever.append(then)

        def end():
            forget()
            if then in present:
                present.remove(then)

        return end

    monkeypatch.setattr(agent.recorder, "when_opened", when_opened)
    return present, ever


def test_a_pass_in_a_context_of_another_worker(world, monkeypatch):
    listeners, heard = listeners_of(world[1], monkeypatch)
    watcher = Watcher(paused=True)
    found = []
    watcher.begin(on_first(world, lambda: found.extend(rpc.rpc_sync("worker1", train_there, args=(2,)))))
    wait_until(lambda: watcher.under_way)
    assert watcher.last.root == "worker1"
    assert watcher.backward.plan.roots[0][0] == "worker1"
    assert set(watcher.trace().nodes) == {"worker1", "worker2"}
    assert len(watcher.step(3)) == 3
    assert states(watcher).count("done") == 3
    watcher.run()
    watcher.wait(30)
    x = leaf()
    expected = torch.autograd.grad((weigh(x) * x).sum(), [x])[0]
    assert all(torch.equal(gradient, expected) for gradient in found)
    assert watcher.state == "over"
    wanted = {key for key in watcher.backward.nodes if key in watcher.backward.plan.waits_for}
    assert {watcher.backward.state_of(key) for key in wanted} == {"done"}
    assert watcher.count in (1, 2)  # as far as is known: it is told with each context that is worth a look
    assert watcher.trace() is watcher.backward.plan.trace  # of the last, whose context is over
    assert heard
    wait_until(lambda: not listeners)  # it is told, and nobody waits for that


def test_of_many_contexts_of_another_worker_some_are_looked_at(world):
    x = leaf()
    expected = torch.autograd.grad((weigh(x) * x).sum(), [x])[0]
    with Watcher() as watcher:
        found = rpc.rpc_sync("worker1", train_there, args=(40,))
        assert watcher.last is not None
        with dist_autograd.context() as context_id:  # the notebook's own, beside them
            dist_autograd.backward(context_id, [forward(x)])
    assert watcher.last.root in ("worker0", "worker1")
    assert all(torch.equal(gradient, expected) for gradient in found)


def test_passes_of_several_workers_at_a_time_are_held_and_let_go_one_after_the_other(world):
    watcher = Watcher(paused=True)
    found = []

    def cell():
        asked = [rpc.rpc_async(name, train_there, args=(1,)) for name in ("worker1", "worker0")]
        found.extend(each.wait() for each in asked)

    watcher.begin(on_first(world, cell))
    ran = []
    while not watcher.ended:  # the handle turns to the second pass by itself, at any time after the first is over
        ran += watcher.step(1)
    watcher.wait(30)
    of_roots = [event.worker for event in ran if event.worker != "worker2"]
    assert sorted(root for root, _ in itertools.groupby(of_roots)) == ["worker0", "worker1"]
    assert [event.name for event in ran].count("SumBackward0") == 2
    assert len(found) == 2


def test_where_the_watcher_does_not_answer_training_goes_on(world, monkeypatch):
    from nbdist.views.passes import scouts

    monkeypatch.setattr(scouts, "_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(Watcher, "look_at", lambda *_: time.sleep(1))
    with Watcher(paused=True) as watcher:
        assert len(rpc.rpc_sync("worker1", train_there, args=(1,))) == 1
        assert watcher.last is None


def test_a_watched_context_is_not_kept(world):
    x = leaf()
    with Watcher() as watcher, dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [forward(x)])
        context = weakref.ref(world[0].recorder.contexts.get(context_id))
    gc.collect()
    assert context() is None
    assert watcher.backward is not None


def test_a_worker_that_dies_while_the_pass_is_paused_ends_the_wait(shared_cluster):
    watcher = Watcher(paused=True)
    x = leaf()

    def cell():
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.exp, args=(x,)).sum()])

    watcher.begin(cell)
    watcher.step(1)
    os.kill(shared_cluster.workers[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        watcher.wait(20)
    assert "WorkerLost" in watcher.told()


def test_looking_makes_no_call_and_only_what_is_looked_at_is_noted(world):
    x = leaf()
    calls = []
    with Watcher() as watcher:
        for number in range(3):
            with dist_autograd.context() as context_id:
                assert world[0].recorder.contexts.get(context_id).lines is (number == 0)
                dist_autograd.backward(context_id, [forward(x)])
        end = trace.subscribe(lambda event, told: calls.append(told) if event == "call.sent" else None)
        repr(watcher), watcher.drawn(), watcher.told()
        end()
    assert not calls


def test_a_watch_of_the_users_own(world, monkeypatch):
    listeners, _ = listeners_of(world[0], monkeypatch)
    x = leaf()
    with dist_autograd.context() as context_id:
        loss = forward(x)
        watch = dist_autograd.watch(context_id, paused=True)
        watcher = Watcher.of(watch)
        handle = context_id.backward_async(loss, retain_graph=True)
        watch.step(2)
        assert states(watcher).count("done") == 2
        assert watcher.state == "paused"
        watcher.step(1)
        assert states(watcher).count("done") == 3
        watch.run()
        handle.wait()
        wait_until(lambda: watcher.state == "over" and watcher.last.complete)
        late = Watcher.of(watch)  # whoever comes to it when the pass is over sees all the same
        wait_until(lambda: late.backward is not None)
        assert states(late) == states(watcher)
        assert not watcher.ended
        assert listeners == []
    assert late.ended  # with the context
    assert late.backward is not None


def test_closing_a_view_of_the_users_watch_is_not_to_end_it(world):
    with dist_autograd.context() as context_id:
        watch = dist_autograd.watch(context_id)
        Watcher.of(watch)
        gc.collect()
        assert not watch.closed
        watch.close()


@pytest.mark.parametrize("opened", [False, True])
def test_running_to_something_takes_the_next_pass_from_its_first_node(world, opened):
    """Whether or not its context is open already, and watched, when that is asked for."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    go = threading.Event()
    watcher = Watcher()

    def cell():
        for number in itertools.count():
            if number or not opened:
                wait_until(lambda: watcher.paused or go.is_set())
            if go.is_set():
                break
            with dist_autograd.context() as context_id:
                if not number and opened:
                    wait_until(lambda: watcher.paused)
                dist_autograd.backward(context_id, [rpc.rpc_sync("worker2", spoil, args=(x,)).sum()])

    watcher.begin(on_first(world, cell))
    for _ in range(3):
        event = watcher.run(until="nan")  # in each pass there is one
        assert event is not None
        assert event.worker == "worker2"
        passed = watcher.last
        watcher.run()  # which does not wait: run(until=…) would find the same Inf again, on its way to worker0
        wait_until(lambda passed=passed: passed.over)
    go.set()
    watcher.wait(30)


def test_what_is_noted_is_what_is_looked_at(world):
    x = leaf()
    seen = []
    with Watcher() as watcher:
        for _ in range(12):
            with dist_autograd.context() as context_id:
                context = world[0].recorder.contexts.get(context_id)
                seen.append((context.lines, context.watch is not None))
                dist_autograd.backward(context_id, [forward(x)])
                time.sleep(0.3)
    assert all(lines is watched for lines, watched in seen)
    assert [watched for _, watched in seen].count(True) >= 2
    assert watcher.count == 12


def test_a_watch_that_has_ended_is_over_for_its_view(world):
    with dist_autograd.context() as context_id:
        watch = dist_autograd.watch(context_id)
    assert Watcher.of(watch).state == "ended"
    Watcher.of(watch).close()


class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("mine")


def fail(x):
    return Faulty.apply(x)


def test_a_pass_that_fails_on_another_worker_keeps_its_node(world):
    with Watcher() as watcher, dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", fail, args=(leaf(),)).sum()
        with pytest.raises(ValueError, match="mine"):
            dist_autograd.backward(context_id, [loss])
        wait_until(lambda: watcher.state == "failed", "the failure")
        said = [line for line in report.as_text(watcher.backward) if "failed at" in line]
    assert "the pass failed at Faulty@worker1" in said[0]
    assert "return Faulty.apply(x)" in said[0]
