"""What an agent has of the arenas of others: their blocks, mapped where they lie, each until its last tensor dies.

A lease begins when a message is accepted, whatever becomes of the message then, and ends when nothing refers to the
memory any more. Anything may make it end, a collection in the midst of some other lock too: so its end is only noted
here, for the agent to tell the block's owner.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable
from typing import NamedTuple

from nbdist.channel.arena import PROBE, PROBE_SIZE, file_name
from nbdist.channel.memory import Mapping, MemoryFailure, open_of
from nbdist.holds import Holds
from nbdist.wire.messages import Place, Record
from nbdist.wire.tensors import Buffer, Unreadable

__all__ = ["Ended", "Leases"]

_UNUSED = 30.0
"""Seconds after which a segment that nothing refers to is unmapped; it may be one that its owner has closed."""

_forks = 0


def _on_fork() -> None:
    global _forks
    _forks += 1


# On both sides of it: what other threads begin meanwhile is the child's as well.
os.register_at_fork(before=_on_fork, after_in_parent=_on_fork)


class Ended(NamedTuple):
    """A lease that has ended."""

    owner: int
    segment: int
    offset: int
    length: int
    is_shared: bool
    """Whether a forked process may still read the block."""


class _Segment:
    """Another agent's segment, mapped here."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.used_at = 0.0


class Leases:
    """An agent's leases."""

    def __init__(self) -> None:
        self._holds: Holds[tuple[Ended, int]] = Holds()
        """Of the memory of each lease: what its end gives back, and the number of forks until it began."""
        self.ended = self._holds.ended
        """Not empty while leases have ended that nobody has taken."""
        self.begun = 0
        self.over = 0
        self._segments: dict[tuple[int, int], _Segment] = {}
        self._lock = threading.Lock()

    def can_read(self, owner: Record) -> bool:
        """Whether this process can read an agent's arena, if it has one."""
        if owner.arena is None:
            return False
        try:
            open_of(owner.pid, owner.arena, file_name(owner.incarnation, PROBE), PROBE_SIZE)
        except MemoryFailure:
            return False
        return True

    def begin(self, owner: Record, places: Iterable[Place], now: float) -> list[Buffer]:
        """Return the memory at those places, leased until nothing refers to it.

        A place that this process cannot map is `Unreadable`, with the reason: whoever decodes the message answers
        with that.
        """
        return [self._begin(owner, place, now) for place in places]

    def _begin(self, owner: Record, place: Place, now: float) -> Buffer:
        what = Ended(owner.incarnation, place.segment, place.offset, place.length, False)
        hold = self._holds.hold((what, _forks))  # where this returns without the memory, the lease ends at once
        self.begun += 1
        if not 0 <= place.offset <= place.offset + place.length <= place.size:
            return Unreadable("the place is not in the sender's shared memory")
        try:
            mapping = self._segment(owner, place, now)
        except MemoryFailure as error:
            return Unreadable(str(error))
        block = (ctypes.c_char * place.length).from_address(mapping.address + place.offset)
        block.lease = hold, mapping  # type: ignore[attr-defined]
        return memoryview(block).cast("B")

    def _segment(self, owner: Record, place: Place, now: float) -> Mapping:
        with self._lock:
            segment = self._segments.get((owner.incarnation, place.segment))
            if segment is None or segment.mapping.size != place.size:
                name = file_name(owner.incarnation, place.segment)
                segment = _Segment(open_of(owner.pid, place.file, name, place.size))
                self._segments[owner.incarnation, place.segment] = segment
            segment.used_at = now
            return segment.mapping

    def take_ended(self) -> list[Ended]:
        """Return the leases that have ended since this was last asked.

        One that ended before a fork and is taken after it counts as shared, too, which is on the safe side.
        """
        taken = [what if forks == _forks else what._replace(is_shared=True) for what, forks in self._holds.take_ended()]
        self.over += len(taken)
        return taken

    def forget(self, owner: int) -> None:
        """An agent is gone; what there is of its memory stays for as long as its tensors do."""
        with self._lock:
            for key in [key for key in self._segments if key[0] == owner]:
                del self._segments[key]

    def trim(self, now: float) -> None:
        """Unmap what has not been used for a while."""
        with self._lock:
            for key in [key for key, segment in self._segments.items() if now - segment.used_at > _UNUSED]:
                del self._segments[key]

    def close(self) -> None:
        """Map nothing any more but what tensors hold."""
        with self._lock:
            self._segments.clear()

    def statistics(self) -> dict[str, int]:
        """Counters; leases that have ended and of which no owner has been told count."""
        return {"arena_blocks_held": self.begun - self.over, "arena_segments_mapped": len(self._segments)}
