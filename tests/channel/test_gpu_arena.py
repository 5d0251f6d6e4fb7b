"""Memory of GPUs between processes, with files in place of a GPU's memory. `tests/gpu/test_same_gpu.py` has a GPU."""

import contextlib
import ctypes
import gc
import os
import resource
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from nbdist.channel.shared_memory import gpu_arena, gpu_memory, quiet
from nbdist.channel.shared_memory.arena import ArenaSpace, open_arena
from nbdist.channel.shared_memory.descriptors import Descriptors
from nbdist.channel.shared_memory.gpu_arena import FIRST_GPU_SEGMENT, Gpus
from nbdist.channel.shared_memory.gpu_memory import GpuBytes, GpuMapping
from nbdist.channel.shared_memory.leases import Leases
from nbdist.channel.shared_memory.mapping import Mapping, MemoryFailure
from nbdist.ids import new_incarnation
from nbdist.wire.messages import Place, Record
from nbdist.wire.tensors import Unreadable

OWNER, READER = new_incarnation(), new_incarnation()  # another process may run these tests, too
MB = 1 << 20


class Pretended(GpuMapping):
    """A file that is mapped, in place of a GPU's memory."""

    def __init__(self, file, index, size):
        self.file = Mapping(file, size)
        self.address, self.index, self.size = self.file.address, index, size

    def part(self, offset, length):
        return memory_at(self.address + offset, length)


def memory_at(address, length, owner=None):
    memory = (ctypes.c_ubyte * length).from_address(address)
    memory.owner = owner
    return torch.frombuffer(memory, dtype=torch.uint8)


def bytes_at(place):
    """Return what a segment of this process has at a place, by the segment's file."""
    return torch.frombuffer(bytearray(os.pread(place.file, place.length, place.offset)), dtype=torch.uint8)


@pytest.fixture
def gpu(monkeypatch):
    """Two GPUs of files; ``gpu.is_done`` is an event: clear, the GPUs still work."""
    made = SimpleNamespace(is_done=threading.Event(), refuses=False)
    made.is_done.set()

    def create(index, size):
        if made.refuses:
            raise MemoryFailure("the GPU is full")
        file = os.memfd_create("gpu")
        os.ftruncate(file, size)
        return file, Pretended(file, index, size)

    def tensor(self):
        place = self.__cuda_array_interface__
        return memory_at(place["data"][0], place["shape"][0], self)

    monkeypatch.setattr(gpu_memory, "create", create)
    monkeypatch.setattr(gpu_memory, "open_descriptor", Pretended)
    monkeypatch.setattr(GpuBytes, "tensor", tensor)
    of_256_mb = SimpleNamespace(total_memory=256 * MB)  # an arena takes a quarter at most
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: of_256_mb)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 1.0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: made.is_done.wait(20))
    return made


@pytest.fixture
def owner(gpu):
    gpus = Gpus(OWNER, 1 << 16, ["GPU-a", "GPU-b"])
    yield gpus
    gpus.close()
    gpu.is_done.set()
    gc.collect()
    settle()


@pytest.fixture
def reader(gpu):
    gpus = Gpus(READER, 1 << 16, ["GPU-b"])
    yield gpus
    gpus.close()


def record(gpus):
    return Record("worker0", 0, OWNER, [], "host", os.getpid(), 0, None, gpu_uuids=gpus.uuids)


def ended(leases, within=10.0):
    """The leases that have ended, once there is one; [] if none does in time."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if found := leases.take_ended():
            return found
        time.sleep(0.01)
    return []


def values(count, seed=0):
    return torch.randint(0, 255, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_which_gpus_two_agents_share(owner, reader):
    assert owner.reachable(reader.uuids) == {"cuda:0": owner.arenas[1]}
    assert reader.reachable(owner.uuids) == {"cuda:1": reader.arenas[0]}
    assert owner.reachable([]) == owner.reachable(["GPU-c", ""]) == {}


def test_a_tensor_is_copied_once_and_read_in_place(owner, reader):
    leases, arena = Leases(reader), owner.arenas[1]
    sent = values(3 * MB)
    slot = arena.put_tensor(sent, READER)
    slot.send()
    expected = sent.clone()
    sent.zero_()
    [memory] = leases.begin(record(owner), [slot.place], 0.0)
    found = memory.tensor()
    assert torch.equal(found, expected)
    found.fill_(3)
    assert (bytes_at(slot.place) == 3).all()


def test_a_block_comes_back_when_the_gpu_is_done(gpu, owner, reader):
    leases, arena = Leases(reader), owner.arenas[1]
    slot = arena.put_tensor(values(MB), READER)
    slot.send()
    gpu.is_done.clear()
    tensors = [memory.tensor() for memory in leases.begin(record(owner), [slot.place], 0.0)]
    assert ended(leases, 0.2) == []
    tensors.clear()
    gc.collect()
    leases.forget(OWNER)  # the memory must not be unmapped either
    assert ended(leases, 0.3) == []
    gpu.is_done.set()
    [lease] = ended(leases)
    assert (lease.owner, lease.segment, lease.offset) == (OWNER, slot.place.segment, slot.place.offset)
    assert not lease.is_shared
    assert arena.statistics()["arena_blocks_out"] == 1
    arena.give_back(READER, [(lease.segment, lease.offset)])
    assert arena.statistics()["arena_blocks_out"] == 0


def test_many_blocks_of_many_sizes(owner, reader):
    leases, arena = Leases(reader), owner.arenas[1]
    for n in range(60):
        sent = values(1000 + 70_000 * (n % 9), n)
        slot = arena.put_tensor(sent, READER)
        slot.send()
        [memory] = leases.begin(record(owner), [slot.place], 0.0)
        assert torch.equal(memory.tensor(), sent)
        del memory
        for lease in leases.take_ended():
            arena.give_back(READER, [(lease.segment, lease.offset)])
    while arena.statistics()["arena_blocks_out"]:
        for lease in ended(leases):
            arena.give_back(READER, [(lease.segment, lease.offset)])


def test_without_room_or_without_a_reader_there_is_no_copy(gpu, owner):
    arena = owner.arenas[0]
    assert arena.put_tensor(values(65 * MB), READER) is None
    assert arena.put_tensor(values(MB), 0xDEAD1) is None, "nobody listens there"
    gpu.refuses = True
    assert arena.put_tensor(values(30 * MB), READER) is None
    assert arena.statistics()["arena_bytes_used"] == 0


def test_a_space_takes_the_gpu_that_both_share(owner, reader, monkeypatch):
    host = open_arena(OWNER, 64 * MB, 1 << 16)
    space = ArenaSpace(host, READER, owner.reachable(reader.uuids))

    class OnGpu(torch.Tensor):
        """A tensor that says it is on GPU 1."""

        device = torch.device("cuda:1")

    part = values(MB).as_subclass(OnGpu)
    assert space.put_from_gpu(part, "cuda:0").place.segment >= 2 * FIRST_GPU_SEGMENT
    for there in ("cuda:1", "cpu", None):
        slot = space.put_from_gpu(part, there)
        assert slot.place.segment < FIRST_GPU_SEGMENT
        assert torch.equal(bytes_at(slot.place), values(MB))
    assert space.put_from_gpu(values(100).as_subclass(OnGpu), "cuda:0") is None, "too small"
    host.close()


def test_a_segment_is_read_although_it_could_not_be_before(owner, reader, monkeypatch):
    leases, arena = Leases(reader), owner.arenas[1]
    slots = [arena.put_tensor(values(MB, n), READER) for n in range(2)]

    def refuse(*_):
        raise MemoryFailure("the GPU has no room")

    with monkeypatch.context() as context:
        context.setattr(gpu_memory, "open_descriptor", refuse)
        [found] = leases.begin(record(owner), [slots[0].place], 0.0)
        assert found.why == "the GPU has no room"
    [found] = leases.begin(record(owner), [slots[1].place], 0.0)
    assert torch.equal(found.tensor(), values(MB, 1))


def test_several_threads_use_an_arena(gpu):
    sent = []
    to = SimpleNamespace(send=lambda receiver, label, file: sent.append((receiver, label)))
    arena = gpu_arena.GpuArena(OWNER, 0, 64 * MB, 1 << 16, to)
    errors = []

    def run(work):
        try:
            for n in range(300):
                work(n)
        except Exception as error:
            errors.append(error)

    def put(n):
        slot = arena.put_tensor(values(1000 + 300_000 * (n % 7)), n % 50)
        slot.send()
        arena.give_back(n % 50, [(slot.place.segment, slot.place.offset)])

    def end(n):
        arena.trim()
        arena.forget(n % 50, is_dead=True)

    threads = [threading.Thread(target=run, args=(work,)) for work in (put, put, end)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    arena.close()


def test_what_cannot_be_read_says_why(owner, reader):
    slot = owner.arenas[1].put_tensor(values(MB), READER)
    place = slot.place
    me = record(owner)
    outside = Place(place.segment, place.file, place.size, place.size - 10, 20)
    never = Place(place.segment + 1, place.file, place.size, 0, 20)
    elsewhere = Place(FIRST_GPU_SEGMENT, place.file, place.size, 0, 20)
    nowhere = Place(FIRST_GPU_SEGMENT * 9, place.file, place.size, 0, 20)
    found = Leases(reader).begin(me, [outside, never, elsewhere, nowhere], 0.0)
    assert all(type(each) is Unreadable for each in found)
    assert [each.why for each in found[1:]] == [
        f"its descriptor (segment-{place.segment + 1:x}) has not come",
        "it is on a GPU that this process does not see",
        "it is on a GPU that this process does not see",
    ]
    [found] = Leases().begin(me, [place], 0.0)
    assert found.why == "this process shares no memory of GPUs"


def test_a_segment_that_its_owner_closes_is_unmapped(owner, reader):
    leases, arena = Leases(reader), owner.arenas[1]
    slot = arena.put_tensor(values(20 * MB), READER)
    slot.send()
    [memory] = leases.begin(record(owner), [slot.place], 0.0)
    del memory
    leases.trim(1000.0)  # long after: the descriptor came once
    assert leases.statistics()["arena_segments_mapped"] == 1
    [lease] = ended(leases)
    arena.give_back(READER, [(lease.segment, lease.offset)])
    for _ in range(3):
        arena.trim()
    assert arena.statistics()["arena_segments"] == 0
    leases.trim(0.0)
    assert leases.statistics()["arena_segments_mapped"] == 0


def test_a_receiver_that_takes_nothing_is_told_later(owner, reader):
    arena = owner.arenas[1]
    slot = arena.put_tensor(values(20 * MB), READER)
    segment = slot.place.segment
    with contextlib.suppress(MemoryFailure):
        for _ in range(10_000):
            owner.descriptors.send(READER, "nothing", None)
    del slot
    for _ in range(3):
        arena.trim()
    assert arena.statistics()["arena_segments"] == 0
    assert reader.take_closed() == [], "there was no room for the notice"
    arena.trim()
    assert reader.take_closed() == [(OWNER, segment)]
    arena.trim()
    assert reader.take_closed() == [], "it is told once"


def test_a_descriptor_is_taken_once_and_closed_with_its_sender():
    gc.collect()
    one, other = Descriptors(OWNER), Descriptors(READER)
    read, write = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    one.send(READER, "a", write)
    one.send(READER, "b", write)
    one.send(READER, "b", write)
    taken = other.take(OWNER, "a")
    os.write(taken, b"hello")
    assert os.read(read, 9) == b"hello"
    os.close(taken)
    for label, sender in (("a", OWNER), ("c", OWNER), ("b", 0xCC1)):
        with pytest.raises(MemoryFailure, match="has not come"):
            other.take(sender, label)
    other.forget(OWNER)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(MemoryFailure, match="has not come"):
        other.take(OWNER, "b")
    other.close()
    other.close()
    with pytest.raises(MemoryFailure, match="cannot hand over"):
        one.send(READER, "a", write)
    one.close()
    os.close(read)
    os.close(write)


def test_nobody_waits_for_an_agent_that_takes_no_descriptors():
    one, other = Descriptors(OWNER), Descriptors(READER)
    sent = 0
    with open("/dev/null") as file, contextlib.suppress(MemoryFailure):
        while sent < 100_000:
            one.send(READER, str(sent), file.fileno())
            sent += 1
    assert 0 < sent < 100_000
    got = other.take(OWNER, "0")
    assert os.readlink(f"/proc/self/fd/{got}") == "/dev/null"
    os.close(got)
    one.close()
    other.close()


def test_a_descriptor_for_which_there_is_no_room_is_not_taken_for_another_notice():
    one, other = Descriptors(OWNER), Descriptors(READER)
    with open("/dev/null") as file:
        one.send(READER, "a", file.fileno())
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno(), most))
        try:
            with pytest.raises(MemoryFailure, match="has not come"):
                other.take(OWNER, "a")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    assert other.take_closed() == []
    one.send(READER, "b", None)
    assert other.take_closed() == [(OWNER, "b")]
    one.close()
    other.close()


def test_a_forked_process_keeps_nothing_open():
    one, other = Descriptors(OWNER), Descriptors(READER)
    with open("/dev/null") as file:
        one.send(READER, "a", file.fileno())
    other.take_closed()  # it takes in what has come
    before = len(os.listdir("/proc/self/fd"))
    if not (pid := os.fork()):
        os._exit(before - len(os.listdir("/proc/self/fd")))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3, "two sockets, and the descriptor"
    os.close(other.take(OWNER, "a"))
    one.close()
    other.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_descriptor_of_another_user_is_dropped():
    reader = Descriptors(READER)
    before = len(os.listdir("/proc/self/fd"))
    program = (
        "import array, os, socket\n"
        "os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "right = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [os.open('/dev/null', 0)]))]\n"
        f"s.sendmsg([b'open {OWNER:x} a'], right, 0, '\\0nbdist-descriptors-{READER:x}')\n"
        f"s.sendmsg([b'nonsense'], [], 0, '\\0nbdist-descriptors-{READER:x}')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    with pytest.raises(MemoryFailure, match="has not come"):
        reader.take(OWNER, "a")
    assert len(os.listdir("/proc/self/fd")) == before
    reader.close()


def test_without_another_thread_no_memory_is_shared(monkeypatch):
    def start():
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(quiet, "start", start)
    with pytest.raises(MemoryFailure, match="cannot wait for GPUs: can't start new thread"):
        Gpus(OWNER, 1 << 16, ["GPU-a"])
    monkeypatch.setattr(gpu_memory, "uuids", lambda: ["GPU-a"])
    monkeypatch.setattr(gpu_memory, "is_available", lambda index: True)
    assert gpu_arena.open_gpus(OWNER, 1 << 16) is None


def test_two_agents_cannot_have_one_address():
    one = Descriptors(OWNER)
    with pytest.raises(MemoryFailure, match="cannot open a socket"):
        Descriptors(OWNER)
    one.close()


def test_without_a_driver_no_memory_is_shared():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert not gpu_memory.is_available(0)
    assert gpu_memory.uuids() == []
    assert gpu_arena.open_gpus(OWNER, 1 << 16) is None


class Driver:
    """CUDA's driver, as far as it is called: it notes the calls, and refuses those in ``refused``."""

    def __init__(self, refused=()):
        self.calls, self.refused = [], refused

    def __getattr__(self, name):
        def call(*args):
            self.calls.append(name)
            if name == "cuGetErrorName":
                args[1]._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
            elif name == "cuMemExportToShareableHandle" and name not in self.refused:
                args[0]._obj.value = os.open("/dev/null", os.O_RDONLY)
            return 2 if name in self.refused else 0

        return call

    def count(self, name):
        return self.calls.count(name)


@pytest.fixture
def with_driver(monkeypatch):
    """Have memory made by a driver that refuses these functions; ``is_done`` is as for `gpu`."""
    is_done = threading.Event()
    is_done.set()
    quiet.start()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: is_done.wait(20))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(query=lambda: True))

    def use(*refused):
        driver = Driver(refused)
        driver.is_done = is_done
        monkeypatch.setattr(gpu_memory, "cuda_driver", lambda: driver)
        return driver

    yield use
    is_done.set()
    gc.collect()
    settle()


def settle():
    """Wait until all that was handed to the thread that waits for GPUs is done."""
    over = threading.Event()
    quiet.when_done(0, over.set)
    assert over.wait(20)


@pytest.mark.parametrize(
    "refused", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_a_refusal_leaves_nothing_behind(with_driver, refused):
    driver = with_driver(refused)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryFailure, match=f"CUDA refuses {refused}: CUDA_ERROR_OUT_OF_MEMORY"):
        gpu_memory.create(0, 5 * MB)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert driver.count("cuMemRelease") == (refused != "cuMemCreate")
    assert driver.count("cuMemUnmap") == (refused == "cuMemSetAccess")
    assert driver.count("cuMemAddressFree") == (refused in ("cuMemMap", "cuMemSetAccess"))


def test_memory_is_unmapped_when_nobody_has_it(with_driver):
    driver = with_driver()
    file, mapped = gpu_memory.create(0, 5 * MB)
    other = gpu_memory.open_descriptor(file, 0, 5 * MB)
    os.close(file)
    assert driver.count("cuMemRelease") == driver.count("cuMemMap") == 2
    del mapped
    settle()
    assert (driver.count("cuMemUnmap"), driver.count("cuMemAddressFree")) == (1, 1)
    block = GpuBytes(other, 10, 20, other)
    del other
    settle()
    assert (len(block), driver.count("cuMemUnmap")) == (20, 1)
    driver.is_done.clear()
    del block
    time.sleep(0.1)
    assert driver.count("cuMemUnmap") == 1, "the GPU may still read it"
    driver.is_done.set()
    settle()
    assert driver.count("cuMemUnmap") == 2


def test_memory_stays_mapped_while_a_gpu_cannot_be_waited_for(with_driver, monkeypatch):
    driver = with_driver()
    file, mapped = gpu_memory.create(0, MB)
    os.close(file)
    captured = threading.Event()

    def synchronize(index):
        if not captured.is_set():
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    del mapped
    time.sleep(0.3)
    assert driver.count("cuMemUnmap") == 0
    captured.set()
    settle()
    assert driver.count("cuMemUnmap") == 1


def test_an_error_of_torch_is_one_of_memory(with_driver, monkeypatch):
    def query():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with_driver()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(query=query))
    for make in (lambda: gpu_memory.create(0, MB), lambda: gpu_memory.open_descriptor(0, 0, MB)):
        with pytest.raises(MemoryFailure, match="CUDA cannot be used now: CUDA error"):
            make()


def test_a_segment_that_is_made_in_inference_mode_serves_outside(with_driver, monkeypatch):
    with_driver()
    file, mapped = gpu_memory.create(0, MB)
    os.close(file)
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: torch.zeros(100, dtype=torch.uint8))
    with torch.inference_mode():
        mapped.part(0, 10).copy_(values(10))
    mapped.part(5, 10).copy_(values(10))
    assert torch.equal(mapped.part(5, 10), values(10))


def test_a_process_that_was_forked_leaves_the_driver_alone(with_driver, monkeypatch):
    with_driver()
    unmapping = []
    with monkeypatch.context() as context:
        context.setattr(quiet, "when_done", lambda index, then: unmapping.append(os.getpid()))
        file, mapped = gpu_memory.create(0, MB)
        os.close(file)
        if not (child := os.fork()):
            try:
                del mapped
                os._exit(len(unmapping))
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        del mapped
    assert unmapping == [os.getpid()]


def test_which_gpus_can_share_memory(with_driver):
    with_driver("cuDeviceGet")
    assert not gpu_memory.is_available(0)
    assert "CUDA refuses cuDeviceGet" in gpu_memory.why_unavailable(0)
    with_driver()
    assert not gpu_memory.is_available(0), "an attribute is 0"
    assert "the GPU cannot map memory" in gpu_memory.why_unavailable(0)
