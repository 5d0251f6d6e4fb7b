"""Maps the blocks that other agents have lent to this agent, and records when a block is not used any more.

An agent of the same host sends a large tensor by writing it into a block of its arena
(`nbdist.channel.shared_memory.arena`). The receiver maps the block and reads the tensor in place. That is a *lease*::

    begin ──> the block's memory, as a buffer ──> tensors are made on it ──> the last of them is collected
                                                                                     │
                    the agent gives the block back to its owner <── take_ended <─────┘

A lease of a GPU's memory takes one more step: when the last tensor is collected, work of the GPU on the tensors may
still wait in its streams. So such a lease ends only when the GPU has finished all earlier work.

A lease begins when a message is accepted, even if the message cannot be decoded afterwards. Python may collect the last
tensor at any moment, with any lock held, so the end of a lease is only recorded (`nbdist.holds`).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from nbdist.channel.shared_memory import quiet
from nbdist.channel.shared_memory.arena import PROBE, PROBE_SIZE, file_name
from nbdist.channel.shared_memory.gpu_arena import FIRST_GPU_SEGMENT, Gpus
from nbdist.channel.shared_memory.gpu_memory import GpuBytes, GpuMapping
from nbdist.channel.shared_memory.mapping import Mapping, MemoryFailure, open_of
from nbdist.holds import Hold, Holds
from nbdist.wire.messages import Place, Record
from nbdist.wire.tensors import Buffer, Unreadable

_UNMAP_AFTER = 30.0  # seconds without a new lease: the owner may have closed the segment
_forks = 0  # the number of forks that this process has begun, plus the number that it has completed


def _on_fork() -> None:
    global _forks
    _forks += 1


# Counted before and after a fork, because the child may also have a lease that another thread begins meanwhile.
os.register_at_fork(before=_on_fork, after_in_parent=_on_fork)


class LeaseEnded(NamedTuple):
    """A lease that has ended: the place of its block, and the owner to which the block goes back."""

    owner: int  # the incarnation of the agent that lent the block
    segment: int
    offset: int  # the place of the block in the segment, in bytes
    length: int  # the bytes of the block that were used
    is_shared: bool  # a forked process may still read the block, so the owner must not write to it again


class Leases:
    """Maps the blocks that other agents have lent to one agent, until no tensor uses them. Any thread may use it."""

    def __init__(self, gpus: Gpus | None = None) -> None:
        """Begin without leases. ``gpus`` is the agent's memory on GPUs; without it, leases of such memory fail."""
        self._gpus = gpus
        # A hold for each lease: its `LeaseEnded`, the value of `_forks` when it began, and its memory on a GPU.
        self._holds: Holds[tuple[LeaseEnded, int, GpuMapping | None]] = Holds()
        self.ended = self._holds.ended
        """Not empty if leases have ended that `take_ended` has not returned. Only test whether it is empty."""
        self.begun = 0  # the number of leases so far
        self.over = 0  # those that `take_ended` has returned so far
        # The mapped segments, by the owner's incarnation and the segment's number; with each, the moment at which the
        # last lease in it began, as of `time.monotonic`.
        self._segments: dict[tuple[int, int], tuple[Mapping | GpuMapping, float]] = {}
        self._lock = threading.Lock()

    def can_read(self, owner: Record) -> bool:
        """Return whether this process can map the arena of another agent; False if that agent has no arena."""
        if owner.arena is None:
            return False
        try:
            open_of(owner.pid, owner.arena, file_name(owner.incarnation, PROBE), PROBE_SIZE)
        except MemoryFailure:
            return False
        return True

    def begin(self, owner: Record, places: Iterable[Place], now: float) -> list[Buffer | GpuBytes]:
        """Map each of the ``places``, blocks that another agent has lent to this agent; return their memory.

        ``now`` is as of `time.monotonic`. For a place that cannot be mapped, the result has an `Unreadable` with the
        reason, which goes into the error with which the message is answered.
        """
        return [self._begin(owner, place, now) for place in places]

    def _begin(self, owner: Record, place: Place, now: float) -> Buffer | GpuBytes:
        what = LeaseEnded(owner.incarnation, place.segment, place.offset, place.length, False)
        hold = self._holds.hold((what, _forks, None))  # if this method returns no memory, the lease ends at once
        self.begun += 1
        if not 0 <= place.offset <= place.offset + place.length <= place.size:
            return Unreadable("the message names a place outside of the sender's shared memory")
        try:
            mapping = self._segment(owner, place, now)
        except MemoryFailure as error:
            return Unreadable(str(error))
        if isinstance(mapping, GpuMapping):
            hold.note.held = what, _forks, mapping
            return GpuBytes(mapping, place.offset, place.length, hold)
        block = (ctypes.c_char * place.length).from_address(mapping.address + place.offset)
        # Tensors on the view keep `block` alive, and with it the hold and the mapping.
        block.lease = hold, mapping  # type: ignore[attr-defined]
        return memoryview(block).cast("B")

    def _segment(self, owner: Record, place: Place, now: float) -> Mapping | GpuMapping:
        """Return the mapping of the segment of a place, which is used at ``now``. May raise MemoryFailure."""
        with self._lock:
            mapping, _ = self._segments.get((owner.incarnation, place.segment), (None, now))
            if mapping is None or mapping.size != place.size:
                mapping = self._open(owner, place)
            self._segments[owner.incarnation, place.segment] = mapping, now
            return mapping

    def _open(self, owner: Record, place: Place) -> Mapping | GpuMapping:
        if place.segment < FIRST_GPU_SEGMENT:
            return open_of(owner.pid, place.file, file_name(owner.incarnation, place.segment), place.size)
        if self._gpus is None:
            raise MemoryFailure("this process shares no memory of GPUs")
        return self._gpus.open(owner.incarnation, place.segment, place.size, owner.gpu_uuids)

    def take_ended(self) -> list[LeaseEnded]:
        """Return the leases that have ended since the last call. The agent gives their blocks back to the owners."""
        taken = []
        for what, forks, memory in self._holds.take_ended():
            if memory is not None:
                # Hold the lease again until the GPU has finished; then it ends for good.
                hold = self._holds.hold((what, _forks, None))
                # A list, which `_drop` empties: the thread of `quiet` still has the `partial` after its call.
                quiet.when_done(memory.index, partial(_drop, [hold, memory]))
                continue
            # A fork since the lease began: the child may still read the block. (Even if the lease ended before it, and
            # so the owner loses the block needlessly.)
            is_shared = forks != _forks and what.segment < FIRST_GPU_SEGMENT  # a forked process cannot use CUDA
            taken.append(what._replace(is_shared=True) if is_shared else what)
        self.over += len(taken)
        return taken

    def forget(self, owner: int) -> None:
        """Drop the mappings of an agent that is gone. Its memory stays mapped while tensors refer to it."""
        with self._lock:
            for key in [key for key in self._segments if key[0] == owner]:
                del self._segments[key]

    def trim(self, now: float) -> None:
        """Drop the mappings of segments in which no lease has begun for 30 s; a new lease maps its segment again."""
        with self._lock:
            for key, (_, used_at) in list(self._segments.items()):
                if now - used_at > _UNMAP_AFTER and key[1] < FIRST_GPU_SEGMENT:
                    del self._segments[key]
            # Memory of a GPU stays until its owner has closed it: its descriptor, which arrives only once, is gone.
            for key in self._gpus.take_closed() if self._gpus is not None else ():
                self._segments.pop(key, None)

    def close(self) -> None:
        """Drop all mappings. A segment stays mapped while tensors refer to it."""
        with self._lock:
            self._segments.clear()

    def statistics(self) -> dict[str, int]:
        """Return the number of leases that `take_ended` has not returned yet, and of mapped segments."""
        return {"arena_blocks_held": self.begun - self.over, "arena_segments_mapped": len(self._segments)}


def _drop(held: list[Hold | GpuMapping]) -> None:
    held.clear()
