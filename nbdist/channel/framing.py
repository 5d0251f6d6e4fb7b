"""Messages in a stream of bytes: what goes in front of their frames, and how they are cut out again. Pure.

A message is its length and its number of frames, their sizes, and the frames. A small one is cut out of the bytes it
came in; a large one gets memory of its size as soon as its length is known, for the socket to write to.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from nbdist.errors import ProtocolError

__all__ = ["Cutter", "head"]

_HEAD = struct.Struct("<QI")
_SIZE = 8
_HEADS = [struct.Struct(f"<QI{count}Q") for count in range(8)]
"""By the number of frames: all that goes in front of a usual message."""


def head(sizes: Sequence[int]) -> bytes:
    """What goes in front of frames of these sizes."""
    count = len(sizes)
    layout = _HEADS[count] if count < len(_HEADS) else struct.Struct(f"<QI{count}Q")
    return layout.pack(_SIZE * count + sum(sizes), count, *sizes)


class Cutter:
    """Cuts what comes over one connection into messages."""

    def __init__(self, max_message: int) -> None:
        self._max_message = max_message
        self._rest = b""
        self._large: memoryview | None = None
        self._filled = 0

    @property
    def is_between(self) -> bool:
        """Whether bytes should come by `feed`, rather than be written to `room`."""
        return self._large is None

    @property
    def room(self) -> memoryview:
        """Where the rest of a large message should be written."""
        assert self._large is not None
        return self._large[self._filled :]

    def wrote(self, count: int) -> list[list[bytes]]:
        """So many bytes are in `room`; the message, if it is whole."""
        assert self._large is not None
        self._filled += count
        if self._filled < len(self._large):
            return []
        whole, self._large = self._large, None
        return [_frames(whole, 0, *_HEAD.unpack_from(whole))]

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Take bytes that have come; the messages that are whole. What no link of ours sends is a ProtocolError."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        messages: list[list[bytes]] = []
        start, end = 0, len(data)
        while end - start >= _HEAD.size:
            length, count = _HEAD.unpack_from(data, start)
            if length > self._max_message or not 0 < _SIZE * count <= length:
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
        """A message of which only the beginning is there; be it ever so small, the rest needs no search for its end."""
        self._filled = len(data) - start
        self._large = memoryview(bytearray(length))
        self._large[: self._filled] = memoryview(data)[start:]


def _frames(data: bytes | memoryview, start: int, length: int, count: int) -> list[bytes]:
    """The frames of the message that begins there."""
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
