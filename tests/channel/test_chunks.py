"""Large messages in chunks: cut and put together again, interleaved, with losses."""

import ctypes
import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.channel import assembly as module
from nbdist.channel.assembly import Assembly, chunks
from nbdist.large_memory import unfilled

A, B = b"link   A", b"link   B"


def small_chunks():
    """Cut, during the block, into chunks a hundred thousand times smaller, so that a few bytes have several."""
    return mock.patch.multiple(module, CHUNK_BYTES=16, NOT_COPIED_FROM=4)


def put_together(assembly, cut):
    found = [assembly.add(head, data) for head, data in cut]
    assert all(each is None for each in found[:-1])
    return [bytes(frame) for frame in found[-1]]


sizes = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@settings(deadline=None)
@given(sizes, st.randoms())
def test_every_message_is_put_together_as_it_was(lengths, chance):
    frames = [chance.randbytes(length) for length in lengths]
    with small_chunks():
        cut = list(chunks(frames, A, 7))
        assembly = Assembly(1000)
        assert put_together(assembly, cut) == frames
    assert all(len(data) <= 16 for _, data in cut)
    assert len(assembly) == 0


def test_chunks_of_several_links_come_interleaved():
    frames = {link: [random.Random(n).randbytes(5 << 20), b"x"] for n, link in enumerate((A, B))}
    cut = {link: list(chunks(frames[link], link, 0)) for link in frames}
    assert len(cut[A]) > 2
    assembly = Assembly(1 << 30)
    found = []
    for pair in zip(cut[A], cut[B], strict=True):
        found += [message for head, data in pair if (message := assembly.add(head, data)) is not None]
    assert [[bytes(frame) for frame in message] for message in found] == [frames[A], frames[B]]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_message_that_lost_a_chunk_is_dropped_and_the_next_one_comes(lost):
    assembly = Assembly(1 << 30)
    cut = list(chunks([bytes(5 << 20)], A, 0))
    del cut[lost]
    assert [assembly.add(*chunk) for chunk in cut] == [None, None]
    assert put_together(assembly, chunks([b"x" * (3 << 20)], A, 1)) == [b"x" * (3 << 20)]
    assert len(assembly) == 0


def test_the_rest_of_a_message_is_not_taken_for_that_of_another():
    """The connection broke within the first message, and was back within the second, at the same place."""
    assembly = Assembly(1 << 30)
    first, second = (list(chunks([each * (5 << 20)], A, number)) for number, each in enumerate((b"1", b"2")))
    assert [assembly.add(*chunk) for chunk in (*first[:1], *second[1:])] == [None, None, None]


def test_a_message_that_is_too_long_is_dropped_before_its_memory_is_taken(caplog):
    assembly = Assembly(1000)
    for head, data in chunks([bytes(3 << 20)], A, 0):
        assert assembly.add(head, data) is None
    assert len(assembly) == 0
    assert "a message of 3145728 bytes is too long: this agent accepts 1000" in caplog.text


@pytest.mark.parametrize("head", [b"", b"short", bytes(19), bytes(20), bytes(21), b"x" * 20])
def test_bytes_that_are_no_chunk_are_dropped(head):
    assembly = Assembly(1 << 30)
    assert assembly.add(head, b"some bytes") is None
    assert len(assembly) == 0


def test_a_message_of_which_no_more_comes_is_dropped_after_a_while(monkeypatch):
    assembly = Assembly(1 << 30)
    head, data = next(chunks([bytes(5 << 20)], A, 0))
    assembly.add(head, data)
    assembly.drop_idle()
    assert len(assembly) == 1
    now = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 901)
    assembly.drop_idle()
    assert len(assembly) == 0


@pytest.mark.parametrize("length", [0, 1, 100, 5 << 20])
def test_memory_is_writable_and_aligned(length):
    memory = unfilled(length)
    assert len(memory) == length
    assert not memory.readonly
    if length:
        assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 64 == 0
        memory[:] = b"x" * length
        assert bytes(memory) == b"x" * length
