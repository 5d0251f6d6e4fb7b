"""Cut the messages out of a stream of bytes, and write what goes in front of their frames.

A message is its length and its number of frames, their sizes, and the frames. `Cutter.feed` cuts a small message out of
the bytes it came in. A large one gets memory of its size as soon as its length is known, for the socket to write to:

    feed(beginning) -> room -> wrote(count) -> room -> wrote(count) -> [Large] -> frames()

Nobody fills that memory with zeros, as `bytearray(length)` would, so a header that announces much takes none of it
until the bytes come. `Large.frames` copies, which takes as long as the message is large, so it is called where no other
thread waits.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

from nbdist.channel import memory
from nbdist.errors import ProtocolError

__all__ = ["Cutter", "Large", "head"]

_HEAD = struct.Struct("<QI")
_SIZE = 8
_WEIGHED = 64 * 1024 * 1024
"""Bytes from which a message is compared with the memory that is left, which takes about 50 µs."""
_HEADS = [struct.Struct(f"<QI{count}Q") for count in range(8)]
"""By the number of frames: all that goes in front of a usual message."""

_unfilled: Callable[[None, int], bytearray] = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyByteArray_FromStringAndSize", ctypes.pythonapi)
)
"""A bytearray of so many bytes, whatever they are: the system maps large memory when it is first written to."""


def head(sizes: Sequence[int]) -> bytes:
    """What goes in front of frames of these sizes."""
    count = len(sizes)
    layout = _HEADS[count] if count < len(_HEADS) else struct.Struct(f"<QI{count}Q")
    return layout.pack(_SIZE * count + sum(sizes), count, *sizes)


class Large:
    """A message in the memory that it came into, not cut into frames yet."""

    def __init__(self, whole: memoryview) -> None:
        self._whole = whole

    def frames(self) -> list[bytes]:
        """Copy the frames out. Raises ProtocolError where their sizes are not those that the header announced."""
        return _frames(self._whole, 0, *_HEAD.unpack_from(self._whole))


class Cutter:
    """Cuts the bytes that come over one connection into messages."""

    def __init__(self, max_message: int) -> None:
        """``max_message`` is the length, in bytes, of the longest message that is taken."""
        self._max_message = max_message
        self._rest = b""
        self.large: memoryview | None = None
        """The memory of a large message that has begun: more bytes belong in `room` then, else into `feed`."""
        self._filled = 0

    @property
    def room(self) -> memoryview:
        """Where the rest of a large message should be written."""
        assert self.large is not None
        return self.large[self._filled :]

    def wrote(self, count: int) -> list[Large]:
        """Note that ``count`` bytes were written to `room`. Returns the message, if it is whole now."""
        assert self.large is not None
        self._filled += count
        if self._filled < len(self.large):
            return []
        whole, self.large = self.large, None
        return [Large(whole)]

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Take bytes that have come. Returns the messages that are whole now.

        Raises:
            ProtocolError: no link of nbdist sends such bytes, or the message is longer than ``max_message``.
            OSError, MemoryError: there is not as much memory as the message announces.
        """
        if self._rest:
            data = self._rest + data
            self._rest = b""
        messages: list[list[bytes]] = []
        start, end = 0, len(data)
        while end - start >= _HEAD.size:
            length, count = _HEAD.unpack_from(data, start)
            if length > self._max_message:
                raise ProtocolError(f"a message of {length} bytes, where no more than {self._max_message} are taken")
            if not 0 < _SIZE * count <= length:
                raise ProtocolError(f"a message of {length} bytes in {count} frames")
            if end - start < _HEAD.size + length:
                self._begin_large(data, start, _HEAD.size + length)
                return messages
            messages.append(_frames(data, start, length, count))
            start += _HEAD.size + length
        if start < end:
            self._rest = data[start:]
        return messages

    def _begin_large(self, data: bytes, start: int, length: int) -> None:
        """Get memory for a message of which only the beginning is there; the rest needs no search for its end."""
        if length >= _WEIGHED and length > (left := memory.available()):
            raise MemoryError(f"a message of {length} bytes, and the machine has {left} bytes of memory left")
        large = memoryview(_unfilled(None, length))
        self._filled = len(data) - start
        large[: self._filled] = memoryview(data)[start:]
        self.large = large


def _frames(data: bytes | memoryview, start: int, length: int, count: int) -> list[bytes]:
    """Copy the frames of the message that begins at ``start``."""
    if count < len(_HEADS):
        _, _, *sizes = _HEADS[count].unpack_from(data, start)
    else:
        sizes = list(struct.unpack_from(f"<{count}Q", data, start + _HEAD.size))
    if sum(sizes) + _SIZE * count != length:
        raise ProtocolError(f"a message of {length} bytes has frames of {sum(sizes)}")
    at = start + _HEAD.size + _SIZE * count
    frames = []
    for size in sizes:
        frames.append(bytes(data[at : at + size]))
        at += size
    return frames
