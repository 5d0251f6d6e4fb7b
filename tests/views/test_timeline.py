"""What all workers did, on one clock."""

import json

import pytest
import torch
from pipeline_models import Slow, square

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc, trace
from nbdist.errors import UsageError
from nbdist.nn import Pipeline
from nbdist.optim import DistributedOptimizer
from nbdist.testing import World
from nbdist.views import recording
from nbdist.views.recording import Noted
from nbdist.views.timeline import Timeline, stack


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
        assert not trace._listeners
        for worker in ("worker0", "worker1"):
            own = [entry for entry in told.noted if entry.agent == worker]
            by_kind = {kind: [entry for entry in own if entry.kind == kind] for kind in ("micro-batch", "step", "call")}
            assert len(by_kind["micro-batch"]) == 6 + 3
            assert [entry.name for entry in by_kind["step"]] == ["SGD.step"]
            assert any(entry.kind == "segment" for entry in own)
            assert any(entry.name == "run_share" for entry in by_kind["call"]), by_kind["call"]
            for entry in own:
                assert 0 <= entry.start <= entry.end <= told.seconds
        assert told.lost == 0
        assert "worker0: " in repr(told)
        assert told._repr_html_().count("<span title") > 20
        told.save(tmp_path / "told.json")
        events = json.loads((tmp_path / "told.json").read_text())["traceEvents"]
        assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"worker0", "worker1", "worker2"}
        assert sum(event["ph"] == "X" for event in events) == len(told.noted)


def test_it_can_be_looked_at_while_it_runs_and_keeps_no_more_than_it_can(monkeypatch):
    monkeypatch.setattr(recording, "MOST", 5)
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
    with pytest.raises(UsageError):
        recording.end("nobody", "worker0")


def test_of_a_cluster_whose_worker_dies():
    with nbdist.Cluster(2, backend="none") as cluster:
        with cluster.timeline() as told:
            rpc.rpc_sync("worker1", square, args=(torch.ones(1), torch.ones(1)))
            with pytest.raises(nbdist.WorkerLost):
                rpc.rpc_sync("worker0", __import__("os")._exit, args=(3,))
        assert [entry.name for entry in told.noted if entry.agent == "worker1"] == ["square"]
        assert told.lost
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cluster.nothing()
