"""Holds a kernel's messages while they wait for a notebook that reads more slowly than the kernel prints. Pure.

Messages wait in two queues, and leave from the first. If both are full, the oldest text of the second is dropped: the
middle of what the kernel has printed. A line takes its place and says how much it was::

    add ──> _first: until half the limit ──> take
       └──> _last: the other half ── a message that must arrive, or the line on what was dropped ──> _first
                    └── text ──> dropped
"""

from __future__ import annotations

from collections import deque

from nbdist import amounts
from nbdist.cluster.jupyter import jupyter_wire

Parcel = tuple[str, list[bytes]]  # a message: its channel, and its frames without the identity of a client

_LIMIT = 50 << 20  # bytes that may wait; more only if they must arrive
_BEYOND = 8 << 20  # bytes beyond half the limit that may wait in the first queue; then there is no room for anything


class WaitingOutput:
    """The messages that have been read from a kernel's sockets, and not been carried to the notebook.

    ``key`` signs the lines on what was dropped, as the kernel signs its messages. Not safe for threads.
    """

    def __init__(self, key: bytes, limit: int = _LIMIT) -> None:
        self._key = key
        self._half = limit // 2
        self._first: deque[Parcel] = deque()
        self._last: deque[Parcel] = deque()
        self._first_bytes = self._last_bytes = 0
        self._dropped: list[bytes] = []  # the frames of the last message that was dropped and not told of
        self._dropped_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._first or self._last)

    @property
    def nbytes(self) -> int:
        """The bytes that wait."""
        return self._first_bytes + self._last_bytes

    @property
    def has_room(self) -> bool:
        """False if so much waits that must arrive that nothing more may be read."""
        return self._first_bytes < self._half + _BEYOND

    def add(self, parcel: Parcel) -> None:
        """Let a message wait; drop the oldest text of the second queue if that is full."""
        if not self._last and self._first_bytes < self._half:
            self._append(parcel)
            return
        self._last.append(parcel)
        self._last_bytes += _size(parcel)
        while self._last_bytes > self._half:
            oldest = self._last.popleft()
            self._last_bytes -= _size(oldest)
            if jupyter_wire.is_text(oldest[1]):
                if self._dropped and jupyter_wire.parent_of(self._dropped) != jupyter_wire.parent_of(oldest[1]):
                    # Each cell is told what it lacks.
                    self._tell()
                self._dropped = oldest[1]
                self._dropped_bytes += _size(oldest)
            else:
                self._tell()
                self._append(oldest)

    def take(self, size: int) -> list[Parcel]:
        """Return and forget the messages that have waited longest: as many as fill ``size`` bytes, at least one."""
        batch: list[Parcel] = []
        while self and size > 0:
            if not self._first:
                # Before what the second queue has left: the line stands where text is missing.
                self._tell()
            if not self._first:
                self._first, self._last = self._last, self._first
                self._first_bytes, self._last_bytes = self._last_bytes, 0
            parcel = self._first.popleft()
            self._first_bytes -= _size(parcel)
            size -= _size(parcel)
            batch.append(parcel)
        return batch

    def _append(self, parcel: Parcel) -> None:
        self._first.append(parcel)
        self._first_bytes += _size(parcel)

    def _tell(self) -> None:
        """Put a line on what was dropped at the end of the first queue, if something was dropped."""
        if self._dropped:
            said = amounts.size(self._dropped_bytes)
            text = f"\n... {said} of output are left out: they came faster than the notebook could read them\n"
            self._append(("iopub", jupyter_wire.with_text(self._key, self._dropped, text)))
            self._dropped, self._dropped_bytes = [], 0


def _size(parcel: Parcel) -> int:
    return sum(map(len, parcel[1]))
