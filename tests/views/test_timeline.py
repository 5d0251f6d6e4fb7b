"""What all workers did, on one clock."""

import base64
import gc
import itertools
import json
import re
import subprocess
import sys
import threading
from functools import partial
from html import escape

import pytest
import torch
from helpers.models.pipeline_models import Slow, square
from helpers.simulated.late_gpu import SECONDS, LateGpu
from helpers.waiting import wait_until

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc, trace
from nbdist.gpus import spans
from nbdist.nn import Pipeline, RemoteModule
from nbdist.optim import DistributedOptimizer
from nbdist.testing import World
from nbdist.views.drawing.gantt import KINDS
from nbdist.views.timeline import recording
from nbdist.views.timeline.recording import Noted
from nbdist.views.timeline.timeline import Timeline, stack


def one(start, end, name="f"):
    return Noted("worker0", "call", name, start, end, 1)


def test_what_overlaps_is_in_another_lane():
    noted = [one(0, 10, "outer"), one(1, 3, "a"), one(3, 5, "b"), one(2, 4, "c"), one(11, 12, "later")]
    names = [[entry.name for entry in lane] for lane in stack(noted)]
    assert names == [["outer", "later"], ["a", "b"], ["c"]]


def test_a_step_of_training_is_told_by_kind_and_worker(tmp_path):
    with World(3) as world, world[2].activate():
        pipe = Pipeline([Slow(), Slow()], ["worker0", "worker1"], micro_batches=3)
        optimizer = DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.1)
        x = torch.randn(6, 8)
        with Timeline(world[2]) as told:
            with dist_autograd.context() as context_id:
                pipe.train_step(x, x, square)
                optimizer.step(context_id)
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [pipe(x).sum()])
        assert not trace.listeners
        for worker in ("worker0", "worker1"):
            own = [entry for entry in told.noted if entry.agent == worker]
            by_kind = {kind: [entry.name for entry in own if entry.kind == kind] for kind in KINDS}
            stage = int(worker[-1])
            done = [f"forward of micro-batch {number}, stage {stage}" for number in range(3)]
            assert sorted(by_kind["forward"]) == sorted(2 * done)
            assert sorted(by_kind["backward"]) == [each.replace("forward", "backward") for each in done]
            assert by_kind["step"] == ["SGD.step"]
            assert by_kind["segment"]
            assert not by_kind["call"]  # by the user there was none
            assert set(by_kind["own"]) >= {"a worker's share of a pipeline step", "optimizer: step"}
            for entry in own:
                assert not re.search(r"[a-z]_[a-z]|nbdist\.|<", entry.name), entry
                assert 0 <= entry.start <= entry.end <= told.seconds
        assert told.lost == 0
        assert re.search(r"worker0: 6 micro-batches forward, 3 micro-batches backward, \d+ backward seg", repr(told))
        assert told._repr_html_().count("<span title") > 20
        told.save(tmp_path / "told.json")
        events = json.loads((tmp_path / "told.json").read_text())["traceEvents"]
        assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"worker0", "worker1", "worker2"}
        assert sum(event["ph"] == "X" for event in events) == len(told.noted)


def twice(x):
    return 2 * x


class Model(torch.nn.Module):
    def forward(self, x):
        return 3 * x


def test_a_users_functions_have_their_own_names_and_nbdists_have_words():
    with World(2) as world, world[0].activate(), Timeline(world[0]) as told:
        rpc.rpc_sync("worker1", twice, args=(1,))
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
        module = RemoteModule("worker1", Model)
        module(torch.ones(1))
        module.state_dict()
        rref = rpc.remote("worker1", Model)
        rref.rpc_sync()(torch.ones(1))
        rref.rpc_sync().forward(torch.ones(1))
        rref.peek()
    assert all(0 < entry.sending < told.seconds for entry in told.noted)
    assert "from the call until it began here" in told._repr_html_()
    calls = [entry.name for entry in told.noted if entry.kind == "call"]
    assert calls == [
        *("twice", "add", "RemoteModule(Model)", "Model.forward", "Model.state_dict", "Model", "Model", "Model.forward")
    ]
    assert [entry.name for entry in told.noted if entry.kind == "own"] == ["peek at a value"]


def test_both_timelines_have_one_legend_and_the_colours_of_it():
    with World(2) as world, world[1].activate():
        pipe = Pipeline([Slow(), Slow()], ["worker0", "worker1"], micro_batches=2)
        x = torch.randn(4, 8)
        with Timeline(world[1]) as told, dist_autograd.context():
            pipe.train_step(x, x, square)
        pictures = {"all": told._repr_html_(), "pipeline": pipe.timeline()._repr_html_()}
    for name, html in pictures.items():
        legend = html[html.rindex("<div><span style=") :]
        drawn = "".join(base64.b64decode(found).decode() for found in re.findall(r"base64,([^\"]+)", html))
        fills = set(re.findall(r'fill="(#[0-9a-f]{6})"', drawn))
        shown = {kind for kind, how in KINDS.items() if how.colour in fills}
        assert {"forward", "backward"} <= shown, name
        for kind, how in KINDS.items():
            assert (escape(how.words) in legend) == (how.colour in legend) == (kind in shown), (name, kind)
    assert "forward of micro-batch 1, stage 0: " in pictures["pipeline"]
    assert "forward of micro-batch 1, stage 0, " in pictures["all"]


def test_colour_blind_people_can_tell_the_colours_apart():
    protan = [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]
    deutan = [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
    tritan = [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]
    normal = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]  # of Machado, Oliveira and Fernandes, 2009
    for matrix in (normal, protan, deutan, tritan):
        seen = {name: torch.tensor(matrix, dtype=torch.float64) @ _linear(how.colour) for name, how in KINDS.items()}
        for one, other in itertools.combinations(seen, 2):
            assert (_lab(seen[one]) - _lab(seen[other])).norm() > 15, (one, other)


def _linear(colour):
    parts = torch.tensor([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)], dtype=torch.float64)
    return torch.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def _lab(linear):
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    white = torch.tensor([0.9505, 1.0, 1.089], dtype=torch.float64)
    xyz = (torch.tensor(to_xyz, dtype=torch.float64) @ linear.clamp(0, 1)) / white
    x, y, z = torch.where(xyz > 0.008856, xyz ** (1 / 3), 7.787 * xyz + 16 / 116)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_it_can_be_looked_at_while_it_runs_and_keeps_no_more_than_it_can(monkeypatch):
    monkeypatch.setattr(recording, "EVENTS_KEPT", 5)
    with World(2) as world, world[0].activate():
        told = Timeline(world[0])
        assert "recording since" in repr(told)
        assert "recording since" in told._repr_html_()
        for _ in range(20):
            rpc.rpc_sync("worker1", abs, args=(-1,))
        told.stop()
        told.stop()
        assert len(told.noted) <= 5
        assert told.lost > 10
        assert "missing" in repr(told)


def watches_of(world, monkeypatch):
    """A mark for each listener to losses that the agents have got from now on and still have."""
    present = []

    def noted(agent, on_lost, listener):
        remove, mark = on_lost(listener), object()
        present.append(mark)

        def end():
            remove()
            if mark in present:
                present.remove(mark)

        return end

    for agent in world:
        monkeypatch.setattr(agent, "on_lost", partial(noted, agent, agent.on_lost))
    return present


def test_one_that_is_dropped_or_interrupted_records_no_longer(monkeypatch):
    with World(2) as world, world[0].activate():
        watches = watches_of(world, monkeypatch)
        told = Timeline(world[0])
        assert len(watches) == 2
        assert trace.listeners
        del told
        gc.collect()
        wait_until(lambda: not trace.listeners)
        wait_until(lambda: not watches)

        told = Timeline(world[0])
        with monkeypatch.context() as patched:
            patched.setattr("nbdist.views.timeline.timeline.ask_each", interrupted)
            with pytest.raises(KeyboardInterrupt):
                told.stop()
        assert trace.listeners
        del told
        gc.collect()
        wait_until(lambda: not trace.listeners)


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_a_worker_does_not_record_for_an_agent_that_is_lost():
    with World(2) as world, world[1].activate():
        home = world[0].me.incarnation
        recording.begin("a timeline of worker0", home)
        assert trace.listeners
        world[1].lose(home, "is said to be lost")
        assert not trace.listeners
        recording.begin("it comes late", home)
        assert not trace.listeners


def test_one_whose_agent_has_ended_stops_here():
    with World(1) as world:
        told = Timeline(world[0])
    assert trace.listeners
    told.stop()
    assert not trace.listeners
    assert not trace.listeners


def test_of_a_cluster_whose_worker_dies(shared_cluster):
    with shared_cluster.timeline() as told:
        rpc.rpc_sync("worker1", square, args=(torch.ones(1), torch.ones(1)))
        with pytest.raises(nbdist.WorkerLost):
            rpc.rpc_sync("worker0", __import__("os")._exit, args=(3,))
    assert [entry.name for entry in told.noted if entry.agent == "worker1"] == ["square"]
    assert told.lost
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        shared_cluster.nothing()


def test_a_timeline_starts_the_workers():
    cluster = nbdist.Cluster(1, backend="none")
    try:
        with cluster.timeline() as told:
            assert cluster.running
        assert told.workers == ["worker0", "notebook"]
    finally:
        cluster.shutdown()


def test_the_views_are_methods_of_the_class_before_their_layers_are_imported():
    """So a type checker knows what they return, and completion offers them."""
    code = (
        "import sys\n"
        "from nbdist.cluster.cluster import Cluster\n"
        "print([getattr(Cluster, name).__annotations__['return'] for name in ('timeline', 'view')])\n"
        "print(sorted({'nbdist.views', 'nbdist.compat'} & set(sys.modules)))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.splitlines() == ["['Timeline', 'DirectView | LoadBalancedView']", "[]"]


def test_a_time_that_another_thread_reads_just_now_is_not_left_out():
    """Two agents of one process are asked for their pieces of work at once."""
    looked, goes_on = threading.Event(), threading.Event()

    class Span:
        seconds = SECONDS

        def is_over(self):
            looked.set()
            return goes_on.wait(20)

    with World(1) as world, world[0].activate():
        recording.begin("recording", world[0].me.incarnation)
        known = world[0].named.find("recording")
        fields = {"agent": "worker0", "optimizer": "SGD", "start": 0.0, "gpu": Span()}
        other = threading.Thread(target=partial(trace.emit, "optimizer.stepped", **fields))
        other.start()
        assert looked.wait(20)
        threading.Timer(0.2, goes_on.set).start()
        assert [one.gpu for one in known.finish().noted] == [SECONDS]
        other.join()


def test_times_on_a_gpu_are_shown_beside_those_of_the_processor(monkeypatch):
    gpu = LateGpu(monkeypatch)
    begin = spans.begin  # the stages are on the CPU
    monkeypatch.setattr(spans, "begin", lambda device: begin(torch.device("cuda:0")) if device is not None else None)
    with World(3) as world, world[2].activate():
        pipe = Pipeline([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)], ["worker0", "worker1"], micro_batches=3)
        optimizer = DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.1)
        x = torch.randn(6, 8)
        told = Timeline(world[2])
        with dist_autograd.context() as context_id:
            pipe.train_step(x, x, square)
            optimizer.step(context_id)
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [rpc.rpc_sync("worker0", torch.neg, args=(x.requires_grad_(),)).sum()])
        rpc.rpc_sync("worker1", max, args=(1, 2))
        assert gpu.begun, "it has not waited for the GPU"
        gpu.goes_on.set()
        told.stop()
    by_kind = {kind: {one.gpu for one in told.noted if one.kind == kind} for kind in KINDS}
    assert by_kind["forward"] == by_kind["backward"] == by_kind["step"] == {SECONDS}
    by_kind["segment"].discard(None)  # a thread that found no gradient left to run
    assert by_kind["segment"] == {SECONDS}
    assert by_kind["call"] == {SECONDS, None}, "a call without a tensor among its arguments has no time on a GPU"
    assert re.search(r"worker0: .*; busy .*; GPU .*9.3 ms in micro-batches forward, 9.3 ms in", repr(told))
    assert re.search(r"forward of micro-batch 0, stage 0, [^\"]*, GPU 3.1 ms", told._repr_html_())
    assert "in tasks of nbdist's own" not in repr(told)
    args = [event.get("args", {}) for event in told.to_perfetto()["traceEvents"] if event["ph"] == "X"]
    assert {each.get("GPU ms") for each in args} == {3.1, None}


def test_a_gpu_that_does_not_finish_is_left_out(monkeypatch):
    gpu = LateGpu(monkeypatch)
    monkeypatch.setattr(recording, "_GPU_WITHIN", 0.05)
    with World(2) as world, world[0].activate():
        with Timeline(world[0]) as told:
            rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(2),))
        assert gpu.ended
        assert {one.gpu for one in told.noted} == {None}
        assert "GPU" not in repr(told)
