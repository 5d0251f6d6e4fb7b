"""Puts the steps of a copy between a GPU and the host's memory in order. Pure: `nbdist.gpus.staging` carries them out.

Two pinned buffers are used in turn. The GPU copies one chunk while the processor copies another::

    from a GPU     GPU        | 0 -> buffer 0 | 1 -> buffer 1 | 2 -> buffer 0 | ...
                   processor                  | buffer 0 -> 0 | buffer 1 -> 1 | ...

    to a GPU       processor  | 0 -> buffer 0 | 1 -> buffer 1 | 2 -> buffer 0 | ...
                   GPU                        | buffer 0 -> 0 | buffer 1 -> 1 | ...

`queue` asks the GPU for a copy and returns at once; `wait` waits for the last copy that was queued for a buffer.

====================  ============================================================
from a GPU, chunk n   queue n; then wait for, and drain, the buffer of chunk n - 1
to a GPU, chunk n     wait for the buffer (from chunk 2 on); fill it; queue n
====================  ============================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

BUFFERS = 2  # one that the GPU uses, and one that the processor uses


class CopyStep(NamedTuple):
    """One step of a copy: what to do with a buffer, for the bytes from ``start`` to ``end`` of the whole."""

    act: Literal["queue", "wait", "fill", "drain"]
    """Queue a copy between GPU and buffer; wait for it; copy from the host's memory to the buffer, or back."""
    buffer: int
    start: int
    end: int


def from_gpu(length: int, chunk: int) -> Iterator[CopyStep]:
    """Yield the steps that copy ``length`` bytes from a GPU, in chunks of ``chunk`` bytes."""
    pieces = list(_pieces(length, chunk))
    for number in range(len(pieces) + 1):
        # Before the earlier chunk is drained: the GPU copies this one while the processor drains that one.
        if number < len(pieces):
            yield CopyStep("queue", *pieces[number])
        if number > 0:
            yield CopyStep("wait", *pieces[number - 1])
            yield CopyStep("drain", *pieces[number - 1])


def to_gpu(length: int, chunk: int) -> Iterator[CopyStep]:
    """Yield the steps that copy ``length`` bytes to a GPU, in chunks of ``chunk`` bytes."""
    # After the last step, the copies of the last chunks may still be under way.
    for number, piece in enumerate(_pieces(length, chunk)):
        if number >= BUFFERS:
            # The GPU may still read the chunk that was in this buffer two chunks ago.
            yield CopyStep("wait", *piece)
        yield CopyStep("fill", *piece)
        yield CopyStep("queue", *piece)


def _pieces(length: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Yield the buffer, the start and the end of each chunk."""
    for number, start in enumerate(range(0, length, chunk)):
        yield number % BUFFERS, start, min(start + chunk, length)
