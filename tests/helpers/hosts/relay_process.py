"""The process of a relay, `relay.py`, which copies frames between two TAP devices: ``relay_process.py NEAR FAR``.

It makes the devices. It reads one JSON object a line, which sets its values, and answers each with its counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque

__all__ = ["open_tap"]

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LARGEST_FRAME = 65_535
_AT_ONCE = 64
"""Frames that are read from one side before those that are due are written."""


def open_tap(name: str) -> int:
    """Open a new TAP device; it ends when the file is closed."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    except OSError:
        os.close(file)
        raise
    return file


class _Way:
    """One direction: frames that wait for their time to go out on the other side."""

    def __init__(self, name: str, source: int, target: int) -> None:
        self.name, self.source, self.target = name, source, target
        self.waiting: deque[tuple[float, bytes]] = deque()
        """Frames with the times at which they go out, in the order of these."""


class _Carrier:
    """What the relay's process does with frames."""

    def __init__(self, near: int, far: int) -> None:
        self._ways = {near: _Way("from", near, far), far: _Way("to", far, near)}
        self._random = random.Random(0)
        self.delay, self.loss = 0.0, 0.0
        self.frozen = ""
        """The frozen ways: ``from`` the host, ``to`` it, ``both``, or none."""
        self._resets_until = 0.0
        """The time until which connections are reset."""
        self._spared: set[bytes] = set()
        """The connections that have been reset, or have begun, since the resets began."""
        self._counts = {"carried": 0, "lost": 0, "reset": 0}

    def serve(self) -> None:
        """Carry frames until the standard input ends."""
        while True:
            readable, _, _ = select.select([0, *self._ways], [], [], self._until_next())
            if 0 in readable and not self._obey(sys.stdin.readline()):
                return
            for source in readable:
                if source:
                    self._take(self._ways[source])
            for way in self._ways.values():
                if not self._is_frozen(way):
                    self._send_due(way)

    def _is_frozen(self, way: _Way) -> bool:
        return self.frozen in ("both", way.name)

    def _obey(self, line: str) -> bool:
        """Set the values of a line, and answer it; return False at the end of the input."""
        if line:
            for name, value in json.loads(line).items():
                if name == "reset":
                    self._resets_until = time.monotonic() + value
                    self._spared.clear()
                else:
                    setattr(self, name, value)
            print(json.dumps(self._counts), flush=True)
        return bool(line)

    def _until_next(self) -> float | None:
        """Return the seconds until a frame must go out; None if none waits, or all do until the thaw."""
        times = [way.waiting[0][0] for way in self._ways.values() if way.waiting and not self._is_frozen(way)]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _take(self, way: _Way) -> None:
        """Read frames from one side."""
        due = time.monotonic() + self.delay
        for _ in range(_AT_ONCE):
            try:
                frame = os.read(way.source, _LARGEST_FRAME)
            except OSError:  # no more for now, or the device is not up yet
                return
            if self.loss and self._random.random() < self.loss:
                self._counts["lost"] += 1
                continue
            if due - self.delay < self._resets_until:
                frame = self._reset(frame)
            way.waiting.append((due, frame))

    def _send_due(self, way: _Way) -> None:
        """Send on the frames whose time has come."""
        now = time.monotonic()
        while way.waiting and way.waiting[0][0] <= now:
            with contextlib.suppress(OSError):  # the device is not up: nobody is there
                os.write(way.target, way.waiting.popleft()[1])
            self._counts["carried"] += 1

    def _reset(self, frame: bytes) -> bytes:
        """Return a reset in place of the first frame of a TCP connection; return other frames as they are."""
        connection, is_new = _connection_of(frame)
        if connection is None or connection in self._spared:
            return frame
        self._spared.add(connection)
        if is_new:
            return frame
        self._counts["reset"] += 1
        return _as_reset(frame)


_ETHERNET, _IPV4, _TCP, _SYN = 14, b"\x08\x00", 6, 0x02


def _connection_of(frame: bytes) -> tuple[bytes | None, bool]:
    """Return the two ends of a frame's TCP connection, the same for both ways, and whether the frame opens it.

    The ends are None if the frame is not TCP over IPv4.
    """
    if frame[12:14] != _IPV4 or frame[_ETHERNET + 9] != _TCP:
        return None, False
    tcp = _ETHERNET + (frame[_ETHERNET] & 15) * 4
    one = frame[_ETHERNET + 12 : _ETHERNET + 16] + frame[tcp : tcp + 2]
    other = frame[_ETHERNET + 16 : _ETHERNET + 20] + frame[tcp + 2 : tcp + 4]
    return b"".join(sorted((one, other))), bool(frame[tcp + 13] & _SYN)


def _as_reset(frame: bytes) -> bytes:
    """Return the frame of a TCP connection with its data left out and the reset flag set."""
    addresses, tcp = frame[_ETHERNET + 12 : _ETHERNET + 20], _ETHERNET + (frame[_ETHERNET] & 15) * 4
    segment = frame[tcp : tcp + 12] + struct.pack(">BBHHH", 5 << 4, 0x14, 0, 0, 0)  # 5 words; RST and ACK
    segment = segment[:16] + _checksum(addresses + struct.pack(">HH", _TCP, 20) + segment) + segment[18:]
    head = frame[_ETHERNET : _ETHERNET + 2] + struct.pack(">H", 40) + frame[_ETHERNET + 4 : _ETHERNET + 10]
    head = b"\x45" + head[1:] + b"\0\0" + addresses
    return frame[:_ETHERNET] + head[:10] + _checksum(head) + head[12:] + segment


def _checksum(data: bytes) -> bytes:
    """Return the Internet's checksum of an even number of bytes."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack(">H", ~total & 0xFFFF)


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(-20)  # a relay that waits for a core would delay frames by more than it should
    _Carrier(open_tap(sys.argv[1]), open_tap(sys.argv[2])).serve()
