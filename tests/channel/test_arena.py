"""An arena and its leases in one process: real memory, mapped twice."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nbdist.channel.shared_memory import arena as arenas
from nbdist.channel.shared_memory import leases, mapping
from nbdist.channel.shared_memory.arena import Arena, ArenaSpace, open_arena
from nbdist.channel.shared_memory.leases import Leases
from nbdist.channel.shared_memory.mapping import MemoryFailure
from nbdist.wire import codec
from nbdist.wire.messages import Place, Record

pytestmark = pytest.mark.skipif(not mapping.is_available(), reason="this system has no memfd")

OWNER, READER = 0xA12E4A, 0xB
M = 1 << 20


def record(arena):
    return Record("worker0", 0, OWNER, [], "host", os.getpid(), 0, None, arena=arena.probe)


def mapped():
    with open("/proc/self/maps") as maps:
        return maps.read().count(f"/memfd:nbdist-{OWNER:x}-")


def opened():
    """Return how many files of the arena this process has open."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(link).startswith(f"/memfd:nbdist-{OWNER:x}-") for link in links)


@pytest.fixture
def arena():
    arena = Arena(OWNER, 256 * M, 1)
    yield arena
    arena.close()
    gc.collect()
    assert mapped() == 0
    assert opened() == 0


def send(arena, tensor):
    encoded = codec.encode(tensor, space=ArenaSpace(arena, READER))
    for slot in encoded.slots:
        slot.send()
    return encoded


def receive(arena, mine, encoded):
    return codec.decode(encoded.payload, [*encoded.frames, *mine.begin(record(arena), encoded.payload.places, 0.0)])


def settle(arena, mine):
    ended = mine.take_ended()
    arena.give_back(READER, [(lease.segment, lease.offset) for lease in ended if not lease.is_shared])
    arena.lose(READER, [(lease.segment, lease.offset) for lease in ended if lease.is_shared])


def test_one_copy_in_and_none_out(arena):
    mine, x = Leases(), torch.randn(M)
    assert mine.can_read(record(arena))
    y = receive(arena, mine, send(arena, x))
    assert torch.equal(x, y)
    assert y.data_ptr() % 64 == 0
    y.add_(1)
    again = receive(arena, mine, send(arena, x))
    assert torch.equal(again, x)
    assert torch.equal(y, x + 1)
    settle(arena, mine)
    assert arena.statistics()["arena_blocks_out"] == 2
    del y
    settle(arena, mine)
    assert arena.statistics()["arena_blocks_out"] == 1
    assert torch.equal(receive(arena, mine, send(arena, x * 2)), x * 2)
    assert torch.equal(again, x)


def test_a_message_that_is_not_sent_leaves_nothing(arena):
    codec.encode([torch.ones(M), torch.ones(2 * M)], space=ArenaSpace(arena, READER))
    assert arena.statistics()["arena_bytes_used"] == 0
    with pytest.raises(Exception, match="cannot be sent"):
        codec.encode([torch.ones(M), (i for i in ())], space=ArenaSpace(arena, READER))
    gc.collect()
    assert arena.statistics()["arena_bytes_used"] == 0


def test_a_call_that_is_refused_leaves_nothing(arena):
    encoded = codec.encode(torch.ones(M), space=ArenaSpace(arena, READER))
    (slot,) = encoded.slots
    slot.send()
    assert arena.statistics()["arena_blocks_out"] == 1
    slot.take_back()
    del slot, encoded
    assert arena.statistics()["arena_blocks_out"] == arena.statistics()["arena_bytes_used"] == 0


def test_what_ends_runs_no_python_code(arena):
    """A Ctrl-C that came in a ``__del__`` would be lost, and the block with it."""
    mine = Leases()
    dropped = [
        codec.encode(torch.ones(M), space=ArenaSpace(arena, READER)),
        receive(arena, mine, send(arena, torch.ones(M))),
    ]
    ran = []
    sys.setprofile(lambda frame, event, _: ran.append(frame.f_code.co_name) if event == "call" else None)
    try:
        dropped.clear()
    finally:
        sys.setprofile(None)
    assert ran == []
    settle(arena, mine)
    assert arena.statistics()["arena_blocks_out"] == arena.statistics()["arena_bytes_used"] == 0


def test_a_tensor_outlives_its_owner(arena):
    mine, x = Leases(), torch.randn(M)
    y = receive(arena, mine, send(arena, x))
    mine.forget(OWNER)
    arena.forget(READER, is_dead=False)
    arena.close()
    assert torch.equal(x, y)
    y.zero_()


def test_what_was_kept_is_let_go(arena):
    mine = Leases()
    for length in (M, 10 * M, 30 * M):
        receive(arena, mine, send(arena, torch.ones(length // 4)))
        settle(arena, mine)
    assert arena.statistics()["arena_segments"] == 3
    for _ in range(3):
        arena.trim()
    assert arena.statistics()["arena_bytes"] == arena.statistics()["arena_segments"] == 0
    assert mapped() == 3  # the reader's
    mine.trim(leases._UNMAP_AFTER - 1)
    assert mapped() == 3
    mine.trim(leases._UNMAP_AFTER + 1)
    assert mapped() == 0


def test_memory_that_was_emptied_is_gone_from_the_machine(arena):
    mine, x = Leases(), torch.ones(M // 4)
    sent = [send(arena, x) for _ in range(8)]
    held = [receive(arena, mine, each) for each in sent]
    file = sent[0].payload.places[0].file
    pages = os.fstat(file).st_blocks * 512
    assert pages >= 8 * M
    del held[1:]
    settle(arena, mine)
    for _ in range(3):
        arena.trim()
    assert os.fstat(file).st_blocks * 512 <= pages - 4 * M
    assert torch.equal(held[0], x)


def test_the_wrong_file_is_not_opened(arena):
    mine = Leases()
    (place,) = send(arena, torch.ones(M)).payload.places
    name = arenas.file_name(OWNER, place.segment)
    mapping.open_of(os.getpid(), place.file, name, place.size)
    for pid, file, called, size in (
        (os.getpid(), arena.probe, name, place.size),
        (os.getpid(), place.file, "nbdist-b-1", place.size),
        (os.getpid(), place.file, name, place.size * 2),
        (os.getpid(), 0, name, place.size),
        (os.getpid(), 1 << 20, name, place.size),
        (1 << 22, place.file, name, place.size),
    ):
        with pytest.raises(MemoryFailure):
            mapping.open_of(pid, file, called, size)
    for wrong in (Place(1, place.file, place.size, place.size, 1), Place(1, place.file, place.size, -1, 10)):
        assert [bytes(part) for part in mine.begin(record(arena), [wrong], 0.0)] == [b""]
    stranger = Record("worker1", 1, 0xC, [], "host", os.getpid(), 0, None, arena=arena.probe)
    assert not mine.can_read(stranger)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(place.file, 4096)


def test_there_is_none_where_it_cannot_be(monkeypatch):
    assert open_arena(OWNER, 0, 1) is None
    monkeypatch.delattr(os, "memfd_create")
    assert open_arena(OWNER, None, 1) is None


def test_no_more_files_is_a_fall_back(arena, monkeypatch):
    def fail(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", fail)
        x = torch.ones(M)
        encoded = codec.encode(x, space=ArenaSpace(arena, READER))
        assert encoded.slots == []
        assert torch.equal(codec.decode(encoded.payload, [bytes(frame) for frame in encoded.frames]), x)
    assert arena.statistics()["arena_falls_back"] == 1
    assert arena.statistics()["arena_bytes"] == arena.statistics()["arena_bytes_used"] == 0
    assert len(codec.encode(x, space=ArenaSpace(arena, READER)).slots) == 1


def test_a_forked_process_keeps_what_it_reads(arena):
    mine, x = Leases(), torch.ones(M)
    y, z = receive(arena, mine, send(arena, x)), receive(arena, mine, send(arena, x))
    inside, outside = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.read(inside, 1)  # the parent has let go of y, and sent other tensors
            fine = torch.equal(y, torch.ones(M)) and opened() == 0
            del y
            (lease,) = mine.take_ended()
            os._exit(0 if fine and lease.is_shared else 1)
        finally:
            os._exit(2)
    del y
    settle(arena, mine)
    for value in range(5):
        receive(arena, mine, send(arena, torch.full((M,), float(value))))
        settle(arena, mine)
    os.write(outside, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(inside)
    os.close(outside)
    assert torch.equal(z, x)
    del z
    settle(arena, mine)
    assert arena.statistics()["arena_blocks_out"] == arena.statistics()["arena_bytes_used"] == 0


SENDER = """
import os, sys, time, torch
from nbdist.channel.shared_memory.arena import Arena, ArenaSpace
arena = Arena(0xA12E4A, 1 << 30, 1)
(slot,) = [ArenaSpace(arena, 0xB).put((x := torch.full((1 << 20,), 7.0)).data_ptr(), 4 << 20)]
print(arena.probe, *[getattr(slot.place, field) for field in slot.place.__struct_fields__], flush=True)
time.sleep(60)
"""


def test_a_sender_that_is_killed():
    process = subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True)
    try:
        probe, *place = map(int, process.stdout.readline().split())
        owner = Record("worker0", 0, OWNER, [], "host", process.pid, 0, None, arena=probe)
        mine, place = Leases(), Place(*place)
        assert mine.can_read(owner)
        (memory_there,) = mine.begin(owner, [place], 0.0)
        process.send_signal(signal.SIGKILL)
        process.wait()
        x = torch.frombuffer(memory_there, dtype=torch.float32)
        assert x.eq(7).all()
        (more,) = mine.begin(owner, [place], 0.0)  # it is mapped already
        assert more == memory_there
        mine.forget(OWNER)
        assert not mine.begin(owner, [place], 0.0)[0]
        assert not mine.can_read(owner)
        del memory_there, more
        x.add_(1)
        assert x.eq(8).all()
        assert mapped() == 1
        del x
        assert mapped() == 0
        assert len(mine.take_ended()) == 3
    finally:
        process.kill()
        process.communicate()


def test_threads_that_ask_for_the_probe_at_once_make_one_file(arena, monkeypatch):
    create = arenas.mapping.create

    def slowly(*arguments):
        time.sleep(0.05)
        return create(*arguments)

    monkeypatch.setattr(arenas.mapping, "create", slowly)
    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(lambda _: arena.probe, range(4)))) == 1
    assert opened() == 1


@pytest.mark.parametrize("event", ["lose", "forget", "trim"])
def test_ctrl_c_while_blocks_end_leaves_no_file_behind(arena, monkeypatch, event):
    sent = send(arena, torch.ones(M))
    (place,) = sent.payload.places
    if event == "trim":
        arena.give_back(READER, [(place.segment, place.offset)])
    assert opened() == 1
    decide = getattr(arena._blocks, event)

    def interrupted(*arguments, **options):
        instructions = decide(*arguments, **options)
        signal.raise_signal(signal.SIGINT)
        return instructions

    monkeypatch.setattr(arena._blocks, event, interrupted)
    arguments = {"lose": (READER, [(place.segment, place.offset)]), "forget": (READER,), "trim": ()}[event]
    for _ in range(3 if event == "trim" else 1):  # it keeps what was in use lately
        with pytest.raises(KeyboardInterrupt):
            getattr(arena, event)(*arguments, **({"is_dead": False} if event == "forget" else {}))
    assert opened() == 0


def test_many_threads_send_and_receive(arena):
    mine, wrong = Leases(), []

    def work(number):
        for turn in range(100):
            value = float(number * 1000 + turn)
            got = receive(arena, mine, send(arena, torch.full((20_000 + 1000 * number,), value)))
            time.sleep(0)
            if not got.eq(value).all():
                wrong.append((number, turn))
            del got
            settle(arena, mine)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    settle(arena, mine)
    assert arena.statistics()["arena_bytes_used"] == 0
