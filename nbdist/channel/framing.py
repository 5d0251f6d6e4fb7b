"""Cuts messages out of a stream of bytes, and makes the head that precedes each message's frames.

A message in the stream::

    length   8 bytes: the number of bytes after `count`
    count    4 bytes: the number of frames
    sizes    8 bytes each: the length of each frame
    frames   one after the other

If a message has arrived as a whole, it is cut at once (`FrameCutter.feed`). For any other message, the cutter allocates
memory of the message's length as soon as it has read the length, and the caller reads the rest from the socket into
this memory::

    feed(beginning) -> room -> wrote(count) -> room -> wrote(count) -> the message -> split(message)

The memory is not filled with zeros, as `bytearray(length)` would be. So a head that announces many bytes takes no
memory until the bytes arrive. `split` copies the whole message, so call it where no other thread waits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from nbdist.channel import machine
from nbdist.errors import ProtocolError
from nbdist.large_memory import unfilled

_HEAD = struct.Struct("<QI")
_SIZE = 8  # the bytes of each frame's size in the head
# The layout of the whole head by the number of frames, for messages of up to 7 frames.
_HEADS = [struct.Struct(f"<QI{count}Q") for count in range(8)]


def head(sizes: Sequence[int]) -> bytes:
    """Return the bytes to write before the frames of a message; ``sizes`` has the size of each frame, in bytes."""
    count = len(sizes)
    layout = _HEADS[count] if count < len(_HEADS) else struct.Struct(f"<QI{count}Q")
    return layout.pack(_SIZE * count + sum(sizes), count, *sizes)


def split(whole: bytes | memoryview) -> list[bytes]:
    """Return copies of the frames of a whole message. Raises ProtocolError for bytes that are not one message."""
    length, count = _HEAD.unpack_from(whole) if len(whole) >= _HEAD.size else (0, 0)
    if _HEAD.size + length != len(whole) or not 0 < _SIZE * count <= length:
        raise _garbage(f"a message of {length} bytes claims {count} frames")
    return _copy_frames(whole, 0, length, count)


class FrameCutter:
    """Cuts the bytes of one connection into messages. Only one thread at a time may use it."""

    def __init__(self, max_message: int) -> None:
        """Accept messages of at most ``max_message`` bytes."""
        self._max_message = max_message
        self._rest = b""
        self.large: memoryview | None = None
        """The memory of a message that has arrived in part. While it is set, read into `room`; else call `feed`."""
        self._filled = 0

    @property
    def room(self) -> memoryview:
        """The memory into which the rest of the message must be read, while `large` is set."""
        assert self.large is not None
        return self.large[self._filled :]

    def wrote(self, count: int) -> memoryview | None:
        """Record that ``count`` bytes were written to `room`; return the message if it is whole now."""
        assert self.large is not None
        self._filled += count
        if self._filled < len(self.large):
            return None
        whole, self.large = self.large, None
        return whole

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Take bytes that have arrived while `large` is None; return the whole messages, each as its frames.

        Keeps the bytes of an incomplete message. If they tell its length, sets `large`.
        Raises:
            ProtocolError: no link of nbdist sends such bytes, or the message is longer than ``max_message``.
            OSError, MemoryError: the machine has less memory left than the message announces.
        """
        if self._rest:
            data = self._rest + data
            self._rest = b""
        messages: list[list[bytes]] = []
        start, end = 0, len(data)
        while end - start >= _HEAD.size:
            length, count = _HEAD.unpack_from(data, start)
            # Both checks come before any memory is taken: the bytes may be another program's.
            if length > self._max_message:
                raise ProtocolError(
                    f"a message of {length} bytes is too long: this agent accepts {self._max_message}. Raise its "
                    "option max_message, or send less at once"
                )
            if not 0 < _SIZE * count <= length:
                raise _garbage(f"a message of {length} bytes claims {count} frames")
            if end - start < _HEAD.size + length:
                machine.require_memory(_HEAD.size + length)
                self.large = unfilled(_HEAD.size + length)
                self._filled = end - start
                self.large[: self._filled] = memoryview(data)[start:]
                return messages
            messages.append(_copy_frames(data, start, length, count))
            start += _HEAD.size + length
        if start < end:
            self._rest = data[start:]
        return messages


def _garbage(what: str) -> ProtocolError:
    return ProtocolError(
        f"{what}: its sender is another program, or has another version of nbdist. Install the same version everywhere"
    )


def _copy_frames(data: bytes | memoryview, start: int, length: int, count: int) -> list[bytes]:
    """Return copies of the ``count`` frames of the message whose head, which tells ``length``, begins at ``start``."""
    if count < len(_HEADS):
        _, _, *sizes = _HEADS[count].unpack_from(data, start)
    else:
        sizes = list(struct.unpack_from(f"<{count}Q", data, start + _HEAD.size))
    if sum(sizes) + _SIZE * count != length:
        raise _garbage(f"a message of {length} bytes claims frames of {sum(sizes)}")
    at = start + _HEAD.size + _SIZE * count
    frames = []
    for size in sizes:
        frames.append(bytes(data[at : at + size]))
        at += size
    return frames
