"""A step of a pipeline that is watched: what it consists of, seen and held as a backward pass is, and its numbers."""

import sys
import threading
import traceback

import pytest
import torch
from helpers.models.pipeline_models import parts_of
from helpers.waiting import wait_until

from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.errors import WorkerLost
from nbdist.nn import Pipeline
from nbdist.nn.inbox import Abandoned, Inbox
from nbdist.nn.schedules import SCHEDULES, simulate
from nbdist.nn.watched import plan_of_step
from nbdist.testing import World
from nbdist.views.drawing.graph import as_svg
from nbdist.views.passes import report
from nbdist.views.passes.backward import Backward
from nbdist.views.passes.watching import Watcher

CASES = [("gpipe", 2, 2), ("1f1b", 2, 2), ("interleaved", 2, 4), ("gpipe", 1, 2), ("1f1b", 1, 1)]


@pytest.fixture
def world():
    with World(3) as world, world[2].activate():
        yield world


@pytest.fixture(autouse=True)
def no_report_is_late(monkeypatch):
    monkeypatch.setattr("nbdist.views.passes.watching._LAST_REPORTS_SECONDS", 10.0)
    monkeypatch.setattr("nbdist.views.passes.scouts._ANSWER_SECONDS", 10.0)


def stages(count):
    torch.manual_seed(1)
    return [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2)) for _ in range(count)]


def pipeline(schedule="1f1b", workers=2, count=2):
    places = [f"worker{index}" for index in range(workers)]
    return Pipeline(stages(count), places, micro_batches=4, schedule=schedule, seed=3)


def step(pipe):
    with dist_autograd.context():
        return pipe.train_step(torch.ones(8, 4), torch.zeros(8, 4), torch.nn.functional.mse_loss)


def on_driver(world, cell):
    def run():
        with world[2].activate():
            cell()

    return run


def states(watcher):
    found = watcher.backward
    return {key: found.state_of(key) for key in found.nodes}


@pytest.mark.parametrize(("schedule", "workers", "count"), CASES)
def test_the_plan_has_each_operation_and_whom_it_waits_for(schedule, workers, count):
    table = SCHEDULES[schedule](workers, count, 4)
    names = [f"worker{index}" for index in range(workers)]
    plan = plan_of_step(7, table, names, count)
    assert [len(plan.trace.nodes[name]) for name in names] == [len(row) for row in table]
    found = Backward(plan)
    ends = {
        (names[row], at): span.end for row, spans in enumerate(simulate(table, count)) for at, span in enumerate(spans)
    }
    for key in found.nodes:
        assert plan.waits_for[key] == len(found.before[key])
        assert all(ends[before] < ends[key] for before in found.before[key])
    assert [found.nodes[key].name for key in plan.roots] == ["F0", "F1", "F2", "F3"]
    assert {found.nodes[key].module for key in found.nodes} == {f"stage {stage}" for stage in range(count)}
    assert "F0" in as_svg(plan.trace)


@pytest.mark.parametrize(("schedule", "workers", "count"), CASES)
def test_a_step_is_seen_whole_and_its_numbers_are_the_same(world, schedule, workers, count):
    plain = step(pipeline(schedule, workers, count))
    pipe = pipeline(schedule, workers, count)
    with Watcher() as watcher:
        assert torch.equal(step(pipe), plain)
    assert set(states(watcher).values()) == {"done"}
    assert len(states(watcher)) == 8 * count
    assert watcher.told() == f"pipeline step of worker2: {8 * count} of {8 * count} nodes, over"
    assert "critical path" in "\n".join(report.as_text(watcher.backward))
    assert "<span title" in report.as_html(watcher.backward, "told")
    outline, snapshot, found = watcher.drawn()
    assert outline["workers"] == [f"worker{index}" for index in range(workers)]
    assert set(snapshot["states"]) == {"d"}
    assert all(state == "arrived" for _, state in snapshot["messages"])
    normed = {found.nodes[key].module for key in found.norm}
    assert normed == {f"stage {stage}" for stage in range(count - 1)}  # the last one's gradient is its own loss's


def test_a_step_is_stepped_operation_by_operation(world):
    plain = step(pipeline())
    pipe = pipeline()
    losses = []
    watcher = Watcher(paused=True)
    watcher.begin(on_driver(world, lambda: losses.append(step(pipe))))
    done = [watcher.step(1)[0] for _ in range(4)]
    assert [(event.worker, event.name) for event in done[:1]] == [("worker0", "F0")]
    assert list(states(watcher).values()).count("done") == 4
    assert not losses
    last = watcher.run(until=("worker0", 7))
    assert (last.worker, last.name) == ("worker0", "B3")
    assert watcher.run(until="message") is None  # the first stage's sends none
    watcher.run()
    watcher.wait(30)
    assert torch.equal(losses[0], plain)


def test_a_step_in_a_context_of_another_worker(world):
    plain = step(pipeline())
    watcher = Watcher(paused=True)
    losses = []
    watcher.begin(on_driver(world, lambda: losses.append(rpc.rpc_sync("worker1", step_there))))
    assert len(watcher.step(3)) == 3
    assert watcher.last.root == "worker1"
    assert watcher.trace().of_step
    watcher.run()
    watcher.wait(30)
    assert torch.equal(losses[0], plain)
    assert set(states(watcher).values()) == {"done"}


def step_there():
    return step(pipeline())


def test_a_step_that_fails_is_over(world):
    pipe = pipeline()
    with Watcher() as watcher, dist_autograd.context(), pytest.raises(FloatingPointError):
        pipe.train_step(torch.full((8, 4), torch.nan), torch.zeros(8, 4), torch.nn.functional.mse_loss)
    assert "FloatingPointError" in watcher.told()
    assert watcher.last.over


class Spoils(torch.nn.Module):
    """Makes a NaN in the forward, and, if ``again``, another in the backward, which has finite inputs."""

    def __init__(self, again):
        super().__init__()
        self.again = again

    def forward(self, x):
        apart = (x * 0.0).square().sqrt() if self.again else x
        return torch.stack([x.new_full((4,), torch.nan) * x[0], apart.sum(0)])


@pytest.mark.parametrize("again", [True, False])
def test_a_nan_that_a_backward_makes_is_told_though_its_forward_had_one(world, again):
    """In other elements, to which the loss gives a gradient; those with the NaN of the forward get none."""
    pipe = Pipeline([torch.nn.Linear(4, 4), Spoils(again), torch.nn.Identity()], [0, 1, 2], micro_batches=2)
    watcher = Watcher(paused=True)

    def cell():
        with dist_autograd.context():
            pipe.train_step(torch.ones(8, 4), torch.ones(8, 4), lambda y, _: y[1].sum(), finite=False)

    watcher.begin(on_driver(world, cell))
    seen = []
    while (event := watcher.run(until="nan")) is not None:
        seen.append((event.worker, event.name))
    watcher.wait(30)
    made = [(event.worker, event.name) for event in watcher.last.events if event.what == "nan"]
    assert [each for each in made if each[0] == "worker1"] == [
        ("worker1", "F0"),
        ("worker1", "F1"),
        *([("worker1", "B0"), ("worker1", "B1")] if again else []),
    ], (made, seen)


def test_a_worker_that_is_lost_ends_a_step_that_is_held():
    world = World(3)
    with world, world[2].activate():
        pipe = pipeline()
        watcher = Watcher(paused=True)
        watcher.begin(on_driver(world, lambda: step(pipe)))
        watcher.step(2)
        world.kill(1) if hasattr(world, "kill") else world[1].close("killed")
        with pytest.raises(WorkerLost):
            watcher.wait(20)
        assert "WorkerLost" in watcher.told()


def takers():
    """The threads that wait for the input of a stage."""
    return [
        thread
        for thread, frame in sys._current_frames().items()
        if any(each.f_code is Inbox.take.__code__ for each, _ in traceback.walk_stack(frame))
    ]


def test_a_worker_that_ends_while_its_stage_waits_leaves_no_thread():
    before = takers()
    with World(3) as world, world[2].activate():
        pipe = pipeline()
        watcher = Watcher(paused=True)
        watcher.begin(on_driver(world, lambda: step(pipe)))
        wait_until(lambda: len(takers()) > len(before))
        world[1].close("was asked to end")
        with pytest.raises(WorkerLost):
            watcher.wait(20)
        wait_until(lambda: len(takers()) <= len(before))


def abandon(pipe, context_id):
    for part in parts_of(pipe):
        with part.agent.activate():
            part.abandon(0, context_id, "the test has had enough")


def test_a_step_that_is_held_can_be_given_up(world):
    pipe = pipeline()
    held = threading.Event()
    failed = []

    def cell():
        with dist_autograd.context() as context_id:
            watch = dist_autograd.watch(context_id, paused=True)
            held.set()
            try:
                pipe.train_step(torch.ones(8, 4), torch.zeros(8, 4), torch.nn.functional.mse_loss)
            except Exception as error:
                failed.append(error)
            assert watch.passes

    thread = threading.Thread(target=on_driver(world, cell))
    thread.start()
    held.wait(10)
    wait_until(lambda: world[0].recorder.contexts.all())
    context = world[2].recorder.contexts.all()[0]
    wait_until(lambda: context.watch is not None and context.watch.halted)
    abandon(pipe, context.id)
    assert [part.inbox(0) for part in parts_of(pipe)] == [None, None]  # at once: what comes late is dropped
    thread.join(20)
    assert not thread.is_alive()
    assert "the test has had enough" in str(failed[0])


def test_a_step_that_is_given_up_before_a_worker_begins_it_says_why(world):
    pipe = pipeline()
    abandon(pipe, None)
    with pytest.raises(Abandoned, match=r"the test has had enough \(this worker had not begun the step\)"):
        step(pipe)
