"""How long a GPU takes, in watched passes and timelines: measured by events, and never waited for in the pass."""

import threading

import pytest
import torch

from nbdist import autograd as dist_autograd
from nbdist.gpus import spans
from nbdist.testing import World
from nbdist.views.timeline.timeline import Timeline

GPU = torch.device("cuda:0")


def busy_for(seconds):
    """Have the GPU compute for about so long; return at once."""
    torch.cuda._sleep(int(seconds * 1e9))  # counts cycles, of which a GPU has one to two in a nanosecond


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        busy_for(0.2)
        return gradient * 2


def test_a_span_is_as_long_as_the_gpu_computes_and_begins_no_earlier():
    busy_for(0.2)  # comes before
    span = spans.begin(GPU)
    busy_for(0.1)
    span.end()
    assert not span.is_over(), "nobody has waited"
    torch.cuda.synchronize()
    assert span.is_over()
    assert 0.04 < span.seconds < 0.15


def test_a_span_can_be_read_in_another_thread():
    over = threading.Event()
    span = spans.begin(GPU)
    busy_for(0.05)
    spans.when_over([span.end()], over.set)
    assert over.wait(20)
    assert span.is_over()
    assert span.seconds > 0.01


def test_begin_and_end_are_in_one_stream():
    span = spans.begin(GPU)
    with torch.cuda.stream(torch.cuda.Stream()):
        busy_for(0.2)
        span.end()
    torch.cuda.synchronize()
    assert span.seconds < 0.05


@pytest.fixture
def world():
    with World(1) as world, world[0].activate():
        yield world


def test_nodes_of_a_watched_pass(world):
    x = torch.ones(1000, device=GPU, requires_grad=True)
    with dist_autograd.context() as context_id:
        watch = dist_autograd.watch(norms=False)
        dist_autograd.backward(context_id, [Slow.apply(x).sum()])
        assert not torch.cuda.current_stream(GPU).query(), "the pass has not waited for the GPU"
        (seen,) = watch.passes
        found = dist_autograd.get_gradients(context_id)[x]
    timed = {event.name: event.seconds for event in seen.events if event.what == "timed"}
    done = {event.name: event.seconds for event in seen.events if event.what == "done"}
    assert timed.keys() == done.keys()
    slow = next(name for name in timed if "Slow" in name)
    assert timed[slow] > 0.08
    assert done[slow] < timed[slow]
    assert torch.equal(found, torch.full_like(x, 2))


def test_a_segment_in_a_timeline(world):
    x = torch.ones(1000, device=GPU, requires_grad=True)
    with Timeline(world[0]) as told, dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [Slow.apply(x).sum()])
    (segment,) = (one for one in told.noted if one.kind == "segment")
    assert segment.gpu > 0.08
    assert "GPU" in repr(told)
