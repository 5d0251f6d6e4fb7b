"""The arena: shared memory in which an agent passes large tensors to other processes of its host.

The sender copies a tensor into a *block* once; the receiver reads the block in place
(`nbdist.channel.shared_memory.leases`). Memory comes in *segments*, files that are divided into blocks. The life of a
block, which `nbdist.channel.shared_memory.blocks` keeps track of::

    free ── `put` ──> Slot ── `send` ──> lent ──┬── `give_back` by the receiver ─────────────────────────────> free
                        │                       ├── `take_back`: its message was certainly not sent ─────────> free
                        │                       ├── `forget`: the receiver has died ─────────────────────────> free
                        │                       └── `lose`, or `forget` of a receiver that is alive ──> never again
                        └── the slot is collected unsent ────────────────────────────────────────────────────> free

Only one receiver at a time has a block, so it may also write to the tensors in it. A receiver that has left the world
but is alive may still use its tensors. Such a block is never used again, and the arena closes the file of its segment.
The memory then lives as long as the receiver has it mapped.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from nbdist.channel import machine
from nbdist.channel.after_fork import call_forked
from nbdist.channel.shared_memory import mapping
from nbdist.channel.shared_memory.blocks import SEGMENT_SIZE, Block, Blocks, Close, Empty, Instruction, Open
from nbdist.channel.shared_memory.mapping import MemoryFailure
from nbdist.finalisers import this_thread
from nbdist.gpus import staging
from nbdist.holds import Hold, Holds
from nbdist.signals import DeferredSignals
from nbdist.wire.messages import Place

PROBE = 0  # the number of an empty segment; a process that can open this segment can open the other ones, too
PROBE_SIZE = 4096  # the bytes of the empty segment


def file_name(incarnation: int, segment: int) -> str:
    """Return the name of a segment's file, in the arena of the agent with this incarnation."""
    return f"nbdist-{incarnation:x}-{segment}"  # readers check the name, so that they never map another file


def default_bound() -> int:
    """Return the bound, in bytes, of an arena for which none is given: a quarter of this process's memory limit."""
    return machine.memory() // 4


def open_arena(incarnation: int, bound: int | None, threshold: int) -> Arena | None:
    """Return an arena for an agent; None if ``bound`` is 0 or the system cannot provide one.

    ``bound`` is the most bytes that the arena may hold; None for `default_bound`. Tensors of at least ``threshold``
    bytes travel through the arena.
    """
    if bound == 0 or not mapping.is_available():
        return None
    try:
        arena = Arena(incarnation, default_bound() if bound is None else bound, threshold)
        return arena if arena.probe >= 0 else None
    except MemoryFailure:
        return None


class ArenaSlot:
    """A block with a copy of a tensor, for one receiver. If a slot is collected unsent, its block is free again."""

    __slots__ = ("_arena", "_block", "_hold", "_receiver", "place")

    def __init__(self, arena: Arena, block: Block, hold: Hold, receiver: int, place: Place) -> None:
        """Make a slot for ``block``. ``hold`` ends when the slot is collected: the arena then frees an unsent block."""
        self.place = place
        self._arena = arena
        self._block = block
        self._hold = hold
        self._receiver = receiver

    def send(self) -> None:
        """Lend the block to the receiver. Call this before the message that names `place` is sent."""
        with DeferredSignals():  # Ctrl-C in the middle would leave a block that is neither free nor lent
            self._arena.send(self._block, self._hold, self._receiver)

    def take_back(self) -> None:
        """Free the block after `send`, because its message was certainly not sent. Before `send`, does nothing."""
        self._arena.give_back(self._receiver, [(self.place.segment, self.place.offset)])


class ArenaSpace:
    """An arena as the memory for tensors to one receiver."""

    def __init__(self, arena: Arena, receiver: int, gpus: Mapping[str, GpuSpace] | None = None) -> None:
        """Use ``arena`` for this receiver. ``gpus`` has the memory of GPUs that it can read, by its names for them."""
        self.threshold = arena.threshold
        self._arena = arena
        self._receiver = receiver
        self._gpus = gpus or {}

    def put(self, pointer: int, length: int) -> ArenaSlot | None:
        """Copy ``length`` bytes at the address ``pointer`` into a block; return None if there is no room."""
        return self._arena.put(pointer, length, self._receiver)

    def put_from_gpu(self, part: torch.Tensor, there: str | None) -> ArenaSlot | None:
        """Copy a tensor of bytes on a GPU into a block; return None if there is no room, or it is too small.

        ``there`` is the receiver's device for it. The copy is made after the work on the calling thread's stream. It is
        complete when this returns.
        """
        if part.numel() < max(self.threshold, 1):
            return None
        gpu = self._gpus.get(there or "")
        # The receiver wants the tensor on the very GPU where the tensor is.
        if gpu is not None and gpu.index == part.device.index:
            slot = gpu.put_tensor(part, self._receiver)
            if slot is not None:
                return slot
        return self._arena.put_tensor(part, self._receiver)


class GpuSpace(Protocol):
    """Memory of a GPU that receivers can read."""

    index: int  # the number of the GPU in this process

    def put_tensor(self, part: torch.Tensor, receiver: int) -> ArenaSlot | None:
        """Copy a tensor of bytes that is on the GPU into a block for ``receiver``; return None if there is no room."""


class Arena:
    """The shared memory of one agent. Any thread may use it.

    The caller of `_take_block`, `_collect` and `_carry_out` holds the lock. ``receiver`` is an incarnation, and
    ``blocks`` has their segments and offsets. Blocks that are not lent to the receiver are ignored.
    """

    def __init__(
        self, incarnation: int, bound: int, threshold: int, *, first: int = 1, segment_size: int = SEGMENT_SIZE
    ) -> None:
        """Make an empty arena that grows to at most ``bound`` bytes.

        The segments are numbered from ``first`` on; those of small blocks have ``segment_size`` bytes.
        """
        self.threshold = threshold
        """The size in bytes of the smallest tensor that travels through the arena."""
        self._unsent: Holds[Block] = Holds()  # a hold for the block of each slot that is not sent
        self.falls_back = 0
        """The number of times that `put` or `put_tensor` had no room, so that a tensor travelled in another way."""
        self._incarnation = incarnation
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Segments of large blocks have one file each: leave most of this process's files to others.
        most = max(8, files // 8) if files != resource.RLIM_INFINITY else 1 << 16
        self._blocks = Blocks(bound, most, first, segment_size)
        self._lock = threading.Lock()
        self._is_closed = False
        self._files: dict[int, int] = {}  # the descriptor of each segment, by its number
        self._mappings: dict[int, Any] = {}
        call_forked(self)

    @property
    def probe(self) -> int:
        """The number of a file that this process has open. Agents that can open it by ``/proc`` can read this arena.

        Raises MemoryFailure if the system refuses the file, which is made when it is first needed.
        """
        with self._lock:
            if PROBE not in self._files:
                self._files[PROBE] = mapping.create(file_name(self._incarnation, PROBE), PROBE_SIZE)
            return self._files[PROBE]

    # -- out ----------------------------------------------------------------------------------

    def put(self, pointer: int, length: int, receiver: int) -> ArenaSlot | None:
        """Copy ``length`` bytes at the address ``pointer`` into a block; return None if `take` has none."""
        slot, mapped = self.take(length, receiver)
        if slot is not None:
            ctypes.memmove(mapped.address + slot.place.offset, pointer, length)
        return slot

    def put_tensor(self, part: torch.Tensor, receiver: int) -> ArenaSlot | None:
        """Copy a tensor of bytes from a GPU into a block; return None if `take` has none."""
        slot, mapped = self.take(part.numel(), receiver)
        if slot is not None:
            memory = (ctypes.c_char * part.numel()).from_address(mapped.address + slot.place.offset)
            staging.to_host(part, torch.frombuffer(memory, dtype=torch.uint8))
        return slot

    def take(self, length: int, receiver: int) -> tuple[ArenaSlot | None, Any]:
        """Take a block of ``length`` bytes for ``receiver``; return it with the mapping of its segment.

        The mapping stays as long as the caller has it, even if another thread closes the arena. Returns None
        for both, and counts that in `falls_back`, if the arena has no room or is closed.
        """
        was_closed = this_thread.is_closed
        try:
            this_thread.is_closed = True  # a finaliser of the user's may run here, and must not wait for a call
            with DeferredSignals(), self._lock:  # else Ctrl-C after `_take_block` would lose the block for good
                block = None if self._is_closed else self._take_block(length)
                if block is None:
                    self.falls_back += 1
                    return None, None
                segment = block.segment
                file, mapped = self._files[segment.number], self._mappings[segment.number]
                place = Place(segment.number, file, segment.size, block.offset, length)
                return ArenaSlot(self, block, self._unsent.hold(block), receiver, place), mapped
        finally:
            this_thread.is_closed = was_closed

    def _take_block(self, length: int) -> Block | None:
        """Return a block for ``length`` bytes; None if there is no room or memory."""
        self._collect()
        block, instructions = self._blocks.take(length)
        try:
            self._carry_out(instructions)
        except MemoryFailure:
            if block is not None:
                self._carry_out(self._blocks.discard(block))
            return None
        return block

    def send(self, block: Block, hold: Hold, receiver: int) -> None:
        """Record that a block is lent, so that ``hold`` does not free it. The caller defers signals."""
        with self._lock:
            self._unsent.forget(hold)
            self._blocks.send(block, receiver)

    # -- and back -----------------------------------------------------------------------------

    def give_back(self, receiver: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Free ``blocks`` that ``receiver`` has given back."""
        with DeferredSignals(), self._lock:
            for segment, offset in blocks:
                self._carry_out(self._blocks.give_back(receiver, segment, offset))

    def lose(self, receiver: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Never use ``blocks`` again: it is uncertain whether ``receiver`` has them, or a forked process reads them.

        Blocks that are not lent to ``receiver`` are ignored.
        """
        with DeferredSignals(), self._lock:
            for segment, offset in blocks:
                self._carry_out(self._blocks.lose(receiver, segment, offset))

    def forget(self, receiver: int, *, is_dead: bool) -> None:
        """Take back all blocks of a receiver that is gone; never use them again unless its process is dead."""
        with DeferredSignals(), self._lock:
            self._carry_out(self._blocks.forget(receiver, is_dead=is_dead))

    def trim(self) -> None:
        """Free memory of free blocks, beyond 4 times the most lately in use at once. An agent calls this every 5 s."""
        with DeferredSignals(), self._lock:
            self._collect()
            self._carry_out(self._blocks.trim())

    def _collect(self) -> None:
        """Free the blocks of slots that were collected and never sent."""
        for block in self._unsent.take_ended():
            self._carry_out(self._blocks.put_back(block))

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        """Make and close segments, and free memory, as `Blocks` asks. May raise MemoryFailure."""
        if self._is_closed:
            return
        for instruction in instructions:
            if isinstance(instruction, Open):
                self._make(instruction.segment, instruction.size)
            elif isinstance(instruction, Empty):
                mapped = self._mappings.get(instruction.segment)
                if mapped is not None:  # None if the segment could not be made
                    mapped.empty(instruction.offset, instruction.size)
            elif isinstance(instruction, Close):
                self._close(instruction.segment)

    def _make(self, segment: int, size: int) -> None:
        file = mapping.create(file_name(self._incarnation, segment), size)
        self._files[segment] = file
        self._mappings[segment] = mapping.Mapping(file, size)

    def _close(self, segment: int) -> None:
        self._mappings.pop(segment, None)
        if (file := self._files.pop(segment, None)) is not None:
            os.close(file)

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Release all segments, once. Memory that receivers have mapped lives until they unmap it."""
        with self._lock:
            self.forked()

    def forked(self) -> None:
        """Release the parent's segments in a forked process."""
        # Without the lock: the thread that held it at the fork does not exist in the child.
        self._is_closed = True
        for segment in list(self._files):
            self._close(segment)

    def statistics(self) -> dict[str, int]:
        """Return counters for `nbdist.views`: bytes held and used, blocks lent, segments, and failed `put` calls."""
        with DeferredSignals(), self._lock:
            self._collect()
            return {
                "arena_bytes": self._blocks.held,
                "arena_bytes_used": self._blocks.used,
                "arena_blocks_out": self._blocks.outstanding,
                "arena_segments": self._blocks.segments,
                "arena_falls_back": self.falls_back,
            }
