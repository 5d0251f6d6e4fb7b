"""How long a GPU takes for the nodes of a watched pass. A GPU that lags behind stands in."""

import threading
from contextlib import contextmanager

import pytest
import torch
from helpers.simulated.late_gpu import SECONDS, LateGpu

from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.gpus import spans
from nbdist.nn import Pipeline
from nbdist.testing import World


@pytest.fixture
def world():
    with World(3) as world, world[0].activate():
        yield world


@pytest.fixture
def gpu(monkeypatch):
    gpu = LateGpu(monkeypatch)
    yield gpu
    gpu.goes_on.set()


def weigh(x):
    return (x * 2.0).exp()


def forward(x):
    return (rpc.rpc_sync("worker1", weigh, args=(x,)) * x).sum()


@contextmanager
def watched_pass():
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        loss = forward(x)
        watch = dist_autograd.watch(norms=False)
        dist_autograd.backward(context_id, [loss])
        yield watch


def keys(watch, what):
    return sorted(event.key for event in watch.passes[0].events if event.what == what)


def test_the_times_come_when_the_gpu_has_run_the_nodes_and_nobody_waits_before(world, gpu):
    with watched_pass() as watch:  # the pass is over, and the GPU has not begun
        assert gpu.ended == len(gpu.begun) > 4
        assert not watch.complete
        assert not [event for event in watch.seen(watch.latest)[1] if event.what == "timed"]
        seconds = watch.seen(watch.latest)[0].seconds
        gpu.goes_on.set()
        assert keys(watch, "timed") == keys(watch, "done")
        assert [thread.name for thread in threading.enumerate()].count("nbdist-gpu-spans") == 1
        (seen,) = watch.passes
        done = {event.key: event for event in seen.events if event.what == "done"}
        for event in seen.events:
            if event.what == "timed":
                assert event.seconds == SECONDS
                assert abs(event.time - done[event.key].time) < 0.5, "when the node ran, not when the GPU was done"
        assert seen.seconds < seconds + 0.5


def test_a_worker_that_reports_twice_is_waited_for_until_its_last_times(world, gpu):
    gpu.one_by_one = True
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        inner = rpc.rpc_sync("worker1", weigh, args=(x,))
        loss = rpc.rpc_sync("worker1", weigh, args=(inner * x,)).sum()
        watch = dist_autograd.watch(norms=False)
        dist_autograd.backward(context_id, [loss])
        gpu.goes_on.set()
        assert keys(watch, "timed") == keys(watch, "done")


def test_a_gpu_that_is_never_behind_needs_no_waiting(world, gpu):
    gpu.goes_on.set()
    with watched_pass() as watch:
        assert keys(watch, "timed") == keys(watch, "done")


def test_if_cuda_fails_the_pass_is_seen_without_times(world, gpu):
    with watched_pass() as watch:
        gpu.fails = True
        gpu.goes_on.set()
        assert keys(watch, "done")
        assert not keys(watch, "timed")


def test_a_step_of_a_pipeline_has_times_too(world, gpu, monkeypatch):
    begin = spans.begin
    monkeypatch.setattr(spans, "begin", lambda device: begin(torch.device("cuda:0")) if device is not None else None)
    pipe = Pipeline([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], ["worker1", "worker2"], micro_batches=2)
    with dist_autograd.context():
        watch = dist_autograd.watch(norms=False)
        pipe.train_step(torch.ones(4, 4), torch.ones(4, 4), torch.nn.functional.mse_loss)
        gpu.goes_on.set()
        assert len(keys(watch, "timed")) == 8
        assert keys(watch, "timed") == keys(watch, "done")


def test_without_a_gpu_nothing_is_measured(world, monkeypatch):
    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(spans, "GpuSpan", refuse)
    monkeypatch.setattr(spans, "when_over", refuse)
    with watched_pass() as watch:
        assert keys(watch, "done")
        assert not keys(watch, "timed")


def test_an_error_of_one_listener_does_not_end_the_thread_that_waits(gpu, caplog):
    over = threading.Event()
    gpu.goes_on.set()
    spans.when_over([spans.begin(torch.device("cuda:0")).end()], lambda: 1 / 0)
    spans.when_over([], over.set)
    assert over.wait(20)
    assert "ZeroDivisionError" in caplog.text


def test_what_torch_is_asked(monkeypatch):
    asked = []

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing
            self.time = None

        def record(self, stream):
            asked.append(f"record in {stream}")
            self.time = len(asked)

        def query(self):
            return False

        def elapsed_time(self, later):
            return 1000.0 * (later.time - self.time)

    current = ["one"]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{current[0]} of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(spans, "CUDA_IS_BUILT", True)
    assert spans.begin(torch.device("cpu")) is spans.begin(None) is None
    span = spans.begin(torch.device("cuda:1"))
    current[0] = "another"
    span.end()
    assert asked == ["record in one of cuda:1"] * 2
    assert not span.is_over()
    assert span.seconds == 1.0


def test_a_cuda_error_ends_no_work_that_is_measured(monkeypatch):
    """The work itself reports it. A step of a pass in which this raised was never reported, and the pass hung."""

    class Event:
        fails = False

        def __init__(self, enable_timing):
            pass

        def record(self, stream):
            if self.fails:
                raise RuntimeError("CUDA error: device-side assert triggered")

        def query(self):
            raise AssertionError("it was not recorded")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(spans, "CUDA_IS_BUILT", True)
    span = spans.begin(torch.device("cuda:0"))
    Event.fails = True
    assert spans.begin(torch.device("cuda:0")) is None
    assert span.end().is_over()
    assert span.seconds is None
    monkeypatch.setattr(Event, "query", lambda self: torch.cuda.Stream())  # raises, as a failed GPU does
    assert span.is_over()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert spans.begin(torch.device("cuda:1")) is None
