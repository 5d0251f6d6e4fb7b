"""Cuts a large message into chunks that travel one by one over ZeroMQ, and puts them together again. Pure.

ZeroMQ encrypts a message in one go, and passes it on only when all of it has arrived. So a large message is sent as
several ZeroMQ messages of about 2 MiB: one chunk is copied while the next one travels, and the chunks of several
senders arrive interleaved. A chunk has two parts::

    head    8 bytes   the link's random number, which tells the chunks of different links apart
            8 bytes   the number of the message on its link
            4 bytes   the number of the chunk in its message, from 0 on
            only in chunk 0: the length of each of the message's frames, 8 bytes each
    data    the next bytes of the frames, one after the other

If a chunk is lost, for example because a connection breaks, the whole message is dropped, and `nbdist.wire.peer` sends
it again.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterator, Sequence

from nbdist.channel import machine
from nbdist.channel.contract import Buffer
from nbdist.large_memory import copy, unfilled

CHUNK_BYTES = 2 << 20  # the most bytes of data in a chunk; with half as many, 64 MB take a tenth longer
NOT_COPIED_FROM = 256 * 1024  # pieces of this many bytes or more are sent as views; for smaller ones a copy is cheaper
_IDLE_SECONDS = 900.0
_HEAD = struct.Struct("<8sQI")

_log = logging.getLogger("nbdist.channel")


def chunks(frames: Sequence[Buffer], link: bytes, number: int) -> Iterator[tuple[bytes, Buffer]]:
    """Yield the head and the data of each chunk of a message. ``link`` is 8 bytes that no other link has."""
    sizes = struct.pack(f"<{len(frames)}Q", *map(len, frames))
    for index, data in enumerate(_pieces(frames)):
        yield _HEAD.pack(link, number, index) + (b"" if index else sizes), data


def _pieces(frames: Sequence[Buffer]) -> Iterator[Buffer]:
    """Yield the frames' bytes in pieces of at most `CHUNK_BYTES`, at least one piece: chunk 0 tells the sizes."""
    for frame in frames:
        view = memoryview(frame)
        for begin in range(0, len(view), CHUNK_BYTES):
            yield view[begin : begin + CHUNK_BYTES]
    if not any(map(len, frames)):
        yield b""


class Assembly:
    """Puts the chunks of all senders together to form messages. Only one thread at a time may use it."""

    def __init__(self, max_message: int) -> None:
        """Accept messages of at most ``max_message`` bytes."""
        self._max_message = max_message
        self._parts: dict[bytes, _Part] = {}  # by link, which sends one message after the other

    def __len__(self) -> int:
        """Return the number of incomplete messages."""
        return len(self._parts)

    def add(self, head: bytes, data: Buffer) -> list[Buffer] | None:
        """Take a chunk; return the frames of its message if it was the last one, else None.

        Frames of `NOT_COPIED_FROM` bytes or more are writable views, each with its own memory (`unfilled`). A message
        that has lost a chunk, or for which there is no memory, is dropped; the latter with a line in the log.
        """
        try:
            link, number, index = _HEAD.unpack_from(head)
            part = self._begin(link, number, head) if index == 0 else self._parts.get(link)
            if part is None or not part.take(number, index, data):
                self._parts.pop(link, None)
                return None
        except (struct.error, MemoryError) as error:
            _log.warning("a message from another agent is dropped, because of an error: %s", error)
            return None
        if part.left:
            return None
        del self._parts[link]
        return part.finished()

    def _begin(self, link: bytes, number: int, head: bytes) -> _Part:
        self._parts.pop(link, None)  # the rest of the previous message will not arrive any more
        rest = len(head) - _HEAD.size
        sizes = struct.unpack_from(f"<{rest // 8}Q", head, _HEAD.size)
        length = sum(sizes)
        if length > self._max_message:
            raise MemoryError(
                f"a message of {length} bytes is too long: this agent accepts {self._max_message}. Raise its option "
                "max_message, or send less at once"
            )
        machine.require_memory(length)  # before the memory is taken: a head may announce more than the machine has
        part = self._parts[link] = _Part(number, sizes)
        return part

    def drop_idle(self) -> None:
        """Drop the messages of which no chunk has arrived for 15 minutes: their senders are dead or cut off."""
        before = time.monotonic() - _IDLE_SECONDS
        for link in [link for link, part in self._parts.items() if part.heard < before]:
            del self._parts[link]


class _Part:
    """An incomplete message."""

    def __init__(self, number: int, sizes: Sequence[int]) -> None:
        self.left = sum(sizes)  # the bytes that have not arrived
        self.heard = time.monotonic()  # the moment at which the last chunk arrived
        self._number = number
        self._next = 0  # the number of the next chunk
        self._frames = [unfilled(size) for size in sizes]
        self._frame = 0  # the frame that is being filled
        self._filled = 0  # the bytes of that frame that have arrived

    def take(self, number: int, index: int, data: Buffer) -> bool:
        """Add the data of chunk ``index`` of message ``number``; return False if it does not continue this message."""
        rest = memoryview(data)
        # If the connection broke in one message and is back in the next one, the index alone would fit.
        if number != self._number or index != self._next or len(rest) > self.left:
            return False
        self._next += 1
        self.heard = time.monotonic()
        self.left -= len(rest)
        while len(rest):
            frame = self._frames[self._frame]
            count = min(len(rest), len(frame) - self._filled)
            copy(frame[self._filled : self._filled + count], rest[:count])
            rest = rest[count:]
            self._filled += count
            if self._filled == len(frame):
                self._frame, self._filled = self._frame + 1, 0
        return True

    def finished(self) -> list[Buffer]:
        """Return the frames."""
        return [frame if len(frame) >= NOT_COPIED_FROM else bytes(frame) for frame in self._frames]
