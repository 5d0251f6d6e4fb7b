"""Copies in chunks between GPUs and the host. A GPU of CPU memory, which copies late, stands in."""

import contextlib
import gc
import logging
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from nbdist.channel.shared_memory.arena import ArenaSpace, open_arena
from nbdist.errors import WorkerLost
from nbdist.gpus import order, pinned, staging
from nbdist.ids import new_incarnation
from nbdist.wire import tensors
from nbdist.wire.devices import Devices
from nbdist.wire.tensors import TensorPacker, unpack_tensors

CHUNK = 1000
CPU = torch.device("cpu")
DTYPES = [dtype for dtype in tensors._DTYPES if dtype is not None]


class LateLane:
    """Buffers whose copies the GPU makes only when somebody waits, as late as it may, or at once."""

    late = True

    def __init__(self, size):
        self.buffers = [torch.full((size,), 0xEE, dtype=torch.uint8) for _ in range(order.BUFFERS)]
        self.queued = []
        self.begun = []
        self.finished = 0

    def begin(self, on_gpu):
        assert not self.queued
        self.begun.append(on_gpu.device)

    def queue(self, buffer, target, source):
        self.queued.append((buffer, target, source))
        if not self.late:
            self.finish()

    def wait(self, buffer):
        last = max((n for n, each in enumerate(self.queued) if each[0] == buffer), default=-1)
        self._make(last + 1)

    def finish(self):
        self.finished += 1
        self._make(len(self.queued))

    def _make(self, count):
        for _, target, source in self.queued[:count]:
            target.copy_(source)
        del self.queued[:count]


@pytest.fixture(params=["late", "at once"])
def gpu(request, monkeypatch):
    """The lanes that were made; everything on the CPU counts as on a GPU, and chunks have 1000 bytes."""
    made = []

    class Lane(LateLane):
        late = request.param == "late"

        def __init__(self, size):
            super().__init__(size)
            made.append(self)

    return pretend(monkeypatch, Lane, made)


def pretend(monkeypatch, lane, made=None):
    monkeypatch.setattr(staging, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(staging, "STAGED_BYTES", 2 * CHUNK)
    monkeypatch.setattr(staging, "process_lanes", staging.CopyLanes(lane))
    monkeypatch.setattr(pinned, "on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(pinned, "is_capturing", lambda: False)
    monkeypatch.setattr(
        pinned, "empty_like", lambda tensor, device: torch.full_like(tensor.view(torch.uint8), 0xDD).view(tensor.dtype)
    )
    return made if made is not None else []


def values(length):
    return torch.randint(0, 256, (length,), dtype=torch.uint8)


# -- the order ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 999, 1000, 1001, 2000, 2001, 3000, 10_007])
def test_each_byte_is_copied_once_and_no_buffer_is_used_too_early(length):
    for steps in (order.from_gpu, order.to_gpu):
        filled = {}  # the chunk in each buffer
        under_way = set()
        copied = []
        first, last = ("queue", "drain") if steps is order.from_gpu else ("fill", "queue")
        for act, buffer, start, end in steps(length, CHUNK):
            if act == "wait":
                under_way.discard(buffer)
                continue
            assert buffer not in under_way
            if act == first:
                assert buffer not in filled, "its bytes are not out yet"
                filled[buffer] = (start, end)
            if act == last:
                assert filled.pop(buffer) == (start, end)
                copied.append((start, end))
            if act == "queue":
                under_way.add(buffer)
        assert not filled
        assert [byte for start, end in copied for byte in (start, end)] == sorted(
            [*range(0, length, CHUNK), *range(CHUNK, length, CHUNK), *([length] if length else [])]
        )
        if steps is order.from_gpu:
            assert not under_way


def test_the_gpu_copies_one_chunk_while_the_processor_copies_another():
    out = [(act, start) for act, _, start, _ in order.from_gpu(3000, 1000)]
    assert (
        out.index(("queue", 1000)) < out.index(("drain", 0)) < out.index(("queue", 2000)) < out.index(("drain", 1000))
    )
    back = [(act, start) for act, _, start, _ in order.to_gpu(3000, 1000)]
    assert back == [
        *(("fill", 0), ("queue", 0), ("fill", 1000), ("queue", 1000)),
        *(("wait", 2000), ("fill", 2000), ("queue", 2000)),
    ]


# -- copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 1999, 2000, 2001, 2999, 3000, 5500, 100_001])
def test_bytes_arrive_as_they_were(gpu, length):
    sent = values(length)
    found = staging.fresh_host_copy(sent)
    assert torch.equal(found, sent)
    there = torch.zeros(length, dtype=torch.uint8)
    staging.to_host(sent, there)
    assert torch.equal(there, sent)
    back = staging.to_gpu(sent, "cuda:0")
    assert (back is None) == (length < 2000)
    assert back is None or (torch.equal(back, sent) and back.data_ptr() != sent.data_ptr())
    assert len(gpu) == (length >= 2000), "small ones are torch's matter, and one pair of buffers is enough"
    assert staging.statistics()["staged_bytes"] == (3 * length if length >= 2000 else 0)


@pytest.fixture
def packed(gpu, monkeypatch):
    """A function that sends tensors from a GPU and receives them on one, with or without shared memory between."""
    original, arrived = tensors.move_to, []

    def moved(tensor, there):
        if any(tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in arrived):
            return tensor
        arrived.append(original(tensor, there) if tensor.nbytes >= 2000 else tensor.clone())
        return arrived[-1]

    monkeypatch.setattr(tensors.StoragePart, "is_on_gpu", True)
    monkeypatch.setattr(tensors, "move_to", moved)

    def send(sent, space=None):
        packer = TensorPacker(Devices("other", {"cpu": "cuda:0"}), space)
        for each in sent:
            packer.add(each)
        metas, where, frames = packer.pack()
        leased = []
        for slot in packer.slots:
            place = slot.place
            leased.append(memoryview(bytearray(os.pread(place.file, place.length, place.offset))))
        return unpack_tensors(metas, where, [bytes(frame) for frame in frames], leased)

    return send


@pytest.fixture(params=["frames", "shared memory"])
def space(request):
    if request.param == "frames":
        yield None
        return
    arena = open_arena(new_incarnation(), 64 << 20, 100)
    yield ArenaSpace(arena, new_incarnation())
    arena.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes_arrive_bit_equal(packed, gpu, space, dtype):
    whole = values(8 * 3007)
    sent = whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype)
    (found,) = packed([sent], space)
    assert found.dtype == dtype
    assert found.shape == sent.shape
    assert torch.equal(found.view(torch.uint8), sent.view(torch.uint8))
    assert gpu


def test_views_arrive_equal_and_share_memory(packed, gpu, space):
    base = torch.randn(60, 70, 3)
    large = torch.randn(100_000)
    sent = [
        *(base, base[5:30], base.transpose(0, 2), base[::2, 3:, 1]),
        *(large[1000:3000], torch.empty(0, 5), torch.tensor(3.0)),
        torch.nn.Parameter(torch.randn(50, 50)),
        torch.randn(1, 50).expand(60, 50),
        torch.randn(40, 40, dtype=torch.complex64).conj(),
    ]
    found = packed(sent, space)
    for there, here in zip(found, sent, strict=True):
        assert there.shape == here.shape
        assert torch.equal(there, here)
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
    assert found[0].untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    assert type(found[7]) is torch.nn.Parameter
    assert gpu


def test_what_is_sent_is_the_value_at_the_call(gpu, monkeypatch):
    monkeypatch.setattr(tensors.StoragePart, "is_on_gpu", True)
    sent = values(1 << 20)
    before = sent.clone()
    packer = TensorPacker(Devices("other", {"cpu": "cuda:0"}))
    packer.add(sent)
    _, _, (frame,) = packer.pack()
    sent.fill_(7)
    assert bytes(frame) == before.numpy().tobytes()


def test_the_copies_come_after_the_streams_of_each_device(gpu):
    staging.to_host(values(5000), torch.zeros(5000, dtype=torch.uint8))
    assert gpu[0].begun == [CPU]
    assert gpu[0].finished >= 1
    assert not gpu[0].queued


def test_what_is_more_than_its_bytes_is_left_to_torch(gpu):
    large = torch.randn(40, 40, dtype=torch.complex64)
    for each in (large.conj(), large.conj().imag, large.t(), large.clone().requires_grad_(), torch.ones(2)):
        assert staging.to_gpu(each, "cuda:0") is None
    assert staging.to_gpu(large, "cpu") is None
    assert staging.to_gpu(torch.nn.Parameter(large, requires_grad=False), "cuda:0") is not None
    assert type(staging.to_gpu(large, "cuda:0")) is torch.Tensor


# -- what goes wrong ---------------------------------------------------------------------------


def test_without_pinned_memory_torch_copies_and_one_line_says_so(monkeypatch, caplog):
    asked = []

    def refuses(size):
        asked.append(size)
        torch.cuda.Stream()  # raises on a torch without CUDA, as an error of CUDA's does

    pretend(monkeypatch, refuses)
    sent, there = values(5000), torch.zeros(5000, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            staging.to_host(sent, there)
            assert torch.equal(there, sent)
            there.zero_()
    assert asked == [CHUNK]
    assert len(caplog.records) == 1
    assert "without pinned memory" in caplog.text
    assert staging.statistics() == {"pinned_bytes": 0, "staged_bytes": 0}
    assert "refused" in staging.describe()


@pytest.mark.parametrize("where", ["begin", "queue", "wait"])
def test_if_torch_fails_in_a_copy_it_copies_all_of_it_its_own_way(monkeypatch, caplog, where):
    class Failing(LateLane):
        pass

    setattr(Failing, where, lambda *args: torch.cuda.Stream())
    pretend(monkeypatch, Failing)
    sent, there = values(5500), torch.zeros(5500, dtype=torch.uint8)
    staging.to_host(sent, there)
    assert torch.equal(there, sent)
    there = staging.to_gpu(sent, "cuda:0")
    assert torch.equal(there, sent)
    assert not caplog.records, "the next copy may be made"
    assert torch.equal(staging.fresh_host_copy(sent), sent)
    assert len(caplog.records) == 1
    assert staging.refusal()


@pytest.mark.parametrize("kind", [WorkerLost, KeyboardInterrupt, RuntimeError])
def test_an_error_from_elsewhere_ends_the_copy_when_the_gpu_has_ended_its_own(monkeypatch, caplog, kind):
    """Another thread, or a signal's handler, raises the error in the middle of the copy."""
    made = []

    class Stopped(LateLane):
        def __init__(self, size):
            super().__init__(size)
            made.append(self)

        def wait(self, buffer):
            if len(made) == 1:
                raise kind("stopped")
            super().wait(buffer)

    pretend(monkeypatch, Stopped)
    sent = values(5500)
    with pytest.raises(kind, match="stopped"):
        staging.fresh_host_copy(sent)
    assert made[0].finished == 1
    assert not made[0].queued
    assert not caplog.records
    assert torch.equal(staging.fresh_host_copy(sent), sent)
    assert len(made) == 2, "buffers that were left in the middle are not used again"
    made.clear()
    gc.collect()
    assert staging.statistics()["pinned_bytes"] == staging.STAGED_BYTES, "the first pair is free again"


def test_a_stream_that_records_a_graph_is_left_to_torch(gpu, monkeypatch):
    monkeypatch.setattr(pinned, "is_capturing", lambda: True)
    sent = values(5000)
    assert torch.equal(staging.fresh_host_copy(sent), sent)
    assert not gpu


def test_many_threads_share_few_buffers_and_none_waits_for_another(monkeypatch):
    """The GPU stands still for the first copies; a further one is made by torch meanwhile."""
    goes_on = threading.Event()
    started = threading.Semaphore(0)
    made = []

    class Standing(LateLane):
        def __init__(self, size):
            super().__init__(size)
            made.append(self)

        def wait(self, buffer):
            started.release()
            assert goes_on.wait(20)
            super().wait(buffer)

    pretend(monkeypatch, Standing)
    found = []

    def copy():
        sent = values(5500)
        found.append(torch.equal(staging.fresh_host_copy(sent), sent))

    threads = [threading.Thread(target=copy) for _ in range(staging._MOST_LANES)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert started.acquire(timeout=20)
    copy()
    assert found == [True]
    assert staging.statistics()["pinned_bytes"] == staging._MOST_LANES * staging.STAGED_BYTES
    goes_on.set()
    for thread in threads:
        thread.join()
    assert found == [True] * (1 + len(threads))
    goes_on.clear()
    started = threading.Semaphore(0)
    threads = [threading.Thread(target=copy) for _ in range(2)]  # each has buffers of its own, which are used again
    for thread in threads:
        thread.start()
    for _ in threads:
        assert started.acquire(timeout=20)
    goes_on.set()
    for thread in threads:
        thread.join()
    assert found == [True] * (3 + staging._MOST_LANES)
    assert len(made) == staging._MOST_LANES


def test_a_closed_agent_frees_the_pinned_memory(gpu):
    staging.fresh_host_copy(values(5000))
    assert staging.statistics()["pinned_bytes"] == staging.STAGED_BYTES
    gpu.clear()
    staging.free()
    gc.collect()
    assert staging.statistics()["pinned_bytes"] == 0


def test_a_forked_process_neither_uses_nor_frees_the_buffers(monkeypatch):
    told = []

    class Told(LateLane):
        def __del__(self):
            told.append(os.getpid())

    pretend(monkeypatch, Told)
    staging.fresh_host_copy(values(5000))
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            gc.collect()
            code = 0 if not told and staging.statistics() == {"pinned_bytes": 0, "staged_bytes": 0} else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    staging.free()
    assert told == [os.getpid()]


# -- the calls of torch.cuda -------------------------------------------------------------------


def test_what_torch_is_asked(monkeypatch):
    asked = []

    class Stream:
        def __init__(self, device):
            asked.append(f"stream on {device}")

        def wait_stream(self, other):
            asked.append(f"wait for {other}")

        def synchronize(self):
            asked.append("synchronize")

    class Event:
        count = 0

        def __init__(self):
            self.number = Event.count
            Event.count += 1

        def record(self, stream):
            assert isinstance(stream, Stream)
            asked.append(f"record {self.number} on {current[-1]}")

        def synchronize(self):
            asked.append(f"wait for event {self.number}")

    current = ["own"]
    devices = []

    @contextlib.contextmanager
    def stream(chosen):
        assert devices, "torch would start CUDA on the thread's current GPU when it switches back"
        current.append("the side stream")
        yield
        current.pop()

    @contextlib.contextmanager
    def device(chosen):
        devices.append(chosen)
        yield
        devices.pop()

    empty = torch.empty

    def pinnable(*args, pin_memory=False, **kwargs):
        asked.append(f"pinned {args[0]}") if pin_memory else None
        return empty(*args, **kwargs)

    cuda = SimpleNamespace(Stream=Stream, Event=Event, stream=stream, current_stream=lambda device: f"current {device}")
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch, "empty", pinnable)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: asked.append("keep"))
    on = pinned.on
    pretend(monkeypatch, pinned.PinnedLane)
    monkeypatch.setattr(pinned, "on", on)
    with torch.inference_mode():
        staging.fresh_host_copy(values(2500))
    assert asked == [
        *("pinned 1000", "pinned 1000", "stream on cpu", "wait for current cpu", "keep"),
        *("record 0 on the side stream", "record 1 on the side stream", "wait for event 0"),
        *("record 0 on the side stream", "wait for event 1", "wait for event 0", "synchronize"),
    ]
    del asked[:]
    Event.count = 0
    staging.to_gpu(values(2500), "cuda:0")
    assert asked == [
        *("wait for current cpu", "keep"),
        *("record 0 on the side stream", "record 1 on the side stream", "wait for event 0"),
        *("record 0 on the side stream", "synchronize"),
    ]
