"""Futures carry the streams that compute their values; a record of calls takes the place of CUDA."""

import contextlib
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from nbdist import rpc
from nbdist.rpc import futures, streams
from nbdist.rpc.references import reference_table
from nbdist.testing import World
from nbdist.wire import tensors


class OnGpu(torch.Tensor):
    """A tensor that says that it is on GPU 1."""

    is_cuda = True
    device = torch.device("cuda:1")

    def record_stream(self, stream):
        stream.keeps_memory()


def on_gpu():
    return torch.ones(2).as_subclass(OnGpu)


@pytest.fixture
def calls(monkeypatch):
    """What torch.cuda is asked, in order. Each thread's current stream on a device is named after both."""
    found = []

    class Stream:
        def __init__(self, device):
            self.name = f"{threading.current_thread().name} on {device}"

        def keeps_memory(self):
            found.append(f"{self.name} keeps memory")

        def wait_event(self, event):
            found.append(f"{self.name} waits for {event.of}")

    class Event:
        def record(self, stream):
            self.of = stream.name
            found.append(f"{stream.name} records on {current[-1]}")

    current = []

    @contextlib.contextmanager
    def device(chosen):
        current.append(chosen)
        yield
        current.pop()

    for name, answer in {
        "is_initialized": lambda: True,
        "Event": Event,
        "current_stream": Stream,
        "device": device,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    for module in (futures, reference_table):
        monkeypatch.setattr(module, "CUDA_IS_BUILT", True)
    return found


def in_thread(name, function):
    thread = threading.Thread(target=function, name=name)
    thread.start()
    thread.join()


@pytest.mark.parametrize("shape", ["alone", "in containers"])
def test_the_reader_waits_for_the_stream_that_computes(calls, shape):
    value = on_gpu() if shape == "alone" else {"a": [on_gpu(), 1], "b": (on_gpu(),)}
    future = rpc.Future()
    in_thread("maker", lambda: future.set_result(value))
    assert calls == ["maker on cuda:1 records on cuda:1"]
    in_thread("reader", future.wait)
    in_thread("other", future.value)
    tensors = 1 if shape == "alone" else 2
    assert calls[1:] == [
        line
        for each in ("reader", "other")
        for line in (f"{each} on cuda:1 waits for maker on cuda:1", *[f"{each} on cuda:1 keeps memory"] * tensors)
    ]


def test_a_tensor_that_is_taken_out_of_the_value_is_freed(calls):
    value = [on_gpu(), on_gpu()]
    known = weakref.ref(value[0])
    future = rpc.Future()
    in_thread("maker", lambda: future.set_result(value))
    del value[0]
    assert known() is None
    in_thread("reader", future.wait)
    assert calls[1:] == ["reader on cuda:1 waits for maker on cuda:1", "reader on cuda:1 keeps memory"]


def test_a_callbacks_future_carries_the_callbacks_stream(calls):
    first = rpc.Future()
    second = first.then(lambda done: [done.wait()])
    in_thread("maker", lambda: first.set_result(on_gpu()))
    in_thread("reader", second.wait)
    assert calls == [
        "maker on cuda:1 records on cuda:1",
        "maker on cuda:1 waits for maker on cuda:1",
        "maker on cuda:1 keeps memory",
        "maker on cuda:1 records on cuda:1",
        "reader on cuda:1 waits for maker on cuda:1",
        "reader on cuda:1 keeps memory",
    ]


def test_what_is_not_on_a_gpu_and_errors_have_no_marks(calls):
    future, failed = rpc.Future(), rpc.Future()
    future.set_result([torch.ones(2), None])
    failed.set_exception(ValueError("no value"))
    assert torch.equal(future.wait()[0], torch.ones(2))
    with pytest.raises(ValueError, match="no value"):
        failed.wait()
    assert calls == []


def test_a_future_that_is_complete_keeps_its_marks(calls):
    future = rpc.Future()
    future.set_result(on_gpu())
    with pytest.raises(RuntimeError):
        future.set_result(1)
    del calls[:]
    future.wait()
    assert len(calls) == 2


def test_without_cuda_nothing_is_looked_at():
    assert streams.mark(on_gpu()) is None


def test_a_list_that_contains_itself(calls):
    endless = [on_gpu()]
    endless.append(endless)
    assert streams.mark(endless) is not None


def test_a_long_list_is_not_looked_through(calls):
    assert streams.mark([on_gpu(), *range(100_000)]) is None
    assert streams.mark([*range(100_000), on_gpu()]) is not None


def make():
    return on_gpu()


def test_the_value_of_a_reference_carries_its_streams(calls):
    with World(2) as world, world[0].activate():
        reference = rpc.remote("worker0", make)
        reference.local_value()
    assert any(line.endswith("records on cuda:1") for line in calls)
    assert any("waits for" in line for line in calls)


class Moving:
    """A tensor on a GPU, of which only the place and the copies matter."""

    is_cuda = True
    nbytes = 8

    def __init__(self, device):
        self.device = device

    def to(self, device):
        return self if device == self.device else SimpleNamespace(device=device, is_cuda=device.startswith("cuda"))


@pytest.mark.parametrize(("there", "waits"), [("cuda:1", ["cuda:1"]), ("cuda:0", []), ("cpu", [])])
def test_a_copy_from_gpu_to_gpu_is_complete_when_a_value_is_there(monkeypatch, there, waits):
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(asked[-1]))
    asked = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append(device) or stream)
    assert tensors.move_to(Moving("cuda:0"), there).device == there
    assert waited == waits
