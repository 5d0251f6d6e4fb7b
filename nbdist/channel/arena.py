"""An agent's own memory, in which it hands tensors to the other processes of this host: one copy in, none out.

A block is one receiver's from the moment it is written until that receiver gives it back (`nbdist.channel.leases`),
so a received tensor is the receiver's own, to write to as well. If the receiver dies, its blocks are free again. If
it is only gone from this world, it may still have its tensors: such a block is never used again, and its file is
closed, so that the memory is whose who has it mapped.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import weakref
from collections.abc import Sequence

from nbdist.channel import memory
from nbdist.channel.blocks import Block, Blocks, Close, Empty, Instruction, Open
from nbdist.channel.memory import Mapping, MemoryFailure
from nbdist.finalisers import this_thread
from nbdist.holds import Hold, Holds
from nbdist.signals import Deferral
from nbdist.wire.messages import Place

__all__ = ["PROBE", "Arena", "Slot", "default_bound", "file_name", "open_arena"]

PROBE = 0
"""The number of a segment that holds nothing: who can open that one can open the others."""
PROBE_SIZE = 4096


def file_name(incarnation: int, segment: int) -> str:
    """What a segment's file is called, by which others know that it is the right one."""
    return f"nbdist-{incarnation:x}-{segment}"


def default_bound() -> int:
    """Return the bound of an arena, in bytes, that is not given one: a quarter of the memory this process may have."""
    return memory.total() // 4


def open_arena(incarnation: int, bound: int | None, threshold: int) -> Arena | None:
    """An arena for an agent; None where it is not wanted (``bound`` is 0), or the system cannot have one."""
    if bound == 0 or not memory.is_available():
        return None
    try:
        return Arena(incarnation, default_bound() if bound is None else bound, threshold)
    except MemoryFailure:
        return None


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _after_fork() -> None:
    for arena in list(_arenas):
        arena.forked()


os.register_at_fork(after_in_child=_after_fork)


class Slot:
    """A block with something in it for one receiver; unless it is sent, it goes back."""

    __slots__ = ("_arena", "_block", "_hold", "_receiver", "place")

    def __init__(self, arena: Arena, block: Block, hold: Hold, receiver: int, place: Place) -> None:
        """``hold`` is of the block; its end, with that of the slot, gives the block back."""
        self.place = place
        self._arena = arena
        self._block = block
        self._hold = hold
        self._receiver = receiver

    def send(self) -> None:
        """It is the receiver's from now on."""
        with Deferral():  # or a Ctrl-C in between would leave it nobody's
            self._arena.send(self._block, self._hold, self._receiver)

    def take_back(self) -> None:
        """It certainly has not gone out."""
        self._arena.give_back(self._receiver, [(self.place.segment, self.place.offset)])


class Space:
    """The arena as it is for one receiver."""

    def __init__(self, arena: Arena, receiver: int) -> None:
        self.threshold = arena.threshold
        self._arena = arena
        self._receiver = receiver

    def put(self, pointer: int, length: int) -> Slot | None:
        """A copy of what is there; None where there is no room."""
        return self._arena.put(pointer, length, self._receiver)


class Arena:
    """The memory of one agent."""

    def __init__(self, incarnation: int, bound: int, threshold: int) -> None:
        self.threshold = threshold
        self._unsent: Holds[Block] = Holds()
        """Of the blocks of slots that are not sent."""
        self.falls_back = 0
        self._incarnation = incarnation
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._blocks = Blocks(bound, max(8, files // 8) if files != resource.RLIM_INFINITY else 1 << 16)
        self._lock = threading.Lock()
        self._is_closed = False
        self._files: dict[int, int] = {PROBE: memory.create(file_name(incarnation, PROBE), PROBE_SIZE)}
        self._mappings: dict[int, Mapping] = {}
        _arenas.add(self)

    @property
    def probe(self) -> int:
        """The file by which others find out whether they can read this arena."""
        return self._files[PROBE]

    # -- out ----------------------------------------------------------------------------------

    def put(self, pointer: int, length: int, receiver: int) -> Slot | None:
        """Copy what is there into a block for ``receiver``; None where there is no room."""
        was_closed = this_thread.is_closed
        try:
            this_thread.is_closed = True
            with Deferral(), self._lock:
                block = None if self._is_closed else self._take(length)
                if block is None:
                    self.falls_back += 1
                    return None
                segment = block.segment
                # The mapping is held here, too: the arena may be closed while this thread copies.
                file, mapping = self._files[segment.number], self._mappings[segment.number]
                place = Place(segment.number, file, segment.size, block.offset, length)
                slot = Slot(self, block, self._unsent.hold(block), receiver, place)
        finally:
            this_thread.is_closed = was_closed
        ctypes.memmove(mapping.address + block.offset, pointer, length)
        return slot

    def _take(self, length: int) -> Block | None:
        self._collect()
        block, instructions = self._blocks.take(length)
        try:
            self._do(instructions)
        except MemoryFailure:
            if block is not None:
                self._do(self._blocks.discard(block))
            return None
        return block

    def send(self, block: Block, hold: Hold, receiver: int) -> None:
        """Note that a block is with its receiver. A `Deferral` must be around it (`Slot.send`)."""
        with self._lock:
            self._unsent.forget(hold)
            self._blocks.send(block, receiver)

    # -- and back -----------------------------------------------------------------------------

    def give_back(self, receiver: int, blocks: Sequence[tuple[int, int]]) -> None:
        """A receiver needs these no longer."""
        with Deferral(), self._lock:
            for segment, offset in blocks:
                self._do(self._blocks.give_back(receiver, segment, offset))

    def lose(self, receiver: int, blocks: Sequence[tuple[int, int]]) -> None:
        """A receiver needs these no longer, but somebody may still read them."""
        with self._lock:
            for segment, offset in blocks:
                self._do(self._blocks.lose(receiver, segment, offset))

    def forget(self, receiver: int, *, is_dead: bool) -> None:
        """A receiver is gone."""
        with self._lock:
            self._do(self._blocks.forget(receiver, is_dead=is_dead))

    def trim(self) -> None:
        """To be called every few seconds: let go of memory that was not needed lately."""
        with self._lock:
            self._collect()
            self._do(self._blocks.trim())

    def _collect(self) -> None:
        for block in self._unsent.take_ended():
            self._do(self._blocks.put_back(block))

    def _do(self, instructions: Sequence[Instruction]) -> None:
        if self._is_closed:
            return
        for instruction in instructions:
            if isinstance(instruction, Open):
                file = memory.create(file_name(self._incarnation, instruction.segment), instruction.size)
                self._files[instruction.segment] = file
                self._mappings[instruction.segment] = Mapping(file, instruction.size)
            elif isinstance(instruction, Empty):
                mapping = self._mappings.get(instruction.segment)
                if mapping is not None:  # it is a segment that could be made
                    mapping.empty(instruction.offset, instruction.size)
            elif isinstance(instruction, Close):
                self._close(instruction.segment)

    def _close(self, segment: int) -> None:
        self._mappings.pop(segment, None)
        file = self._files.pop(segment, None)
        if file is not None:
            os.close(file)

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of everything; what receivers have mapped is theirs."""
        with self._lock:
            self._is_closed = True
            for segment in list(self._files):
                self._close(segment)

    def forked(self) -> None:
        """In a child process: nothing of the parent's is to be held here. No lock: its holder may not be here."""
        self._is_closed = True
        for segment in list(self._files):
            self._close(segment)

    def statistics(self) -> dict[str, int]:
        """Counters."""
        with Deferral(), self._lock:
            self._collect()
            return {
                "arena_bytes": self._blocks.held,
                "arena_bytes_used": self._blocks.used,
                "arena_blocks_out": self._blocks.outstanding,
                "arena_segments": self._blocks.segments,
                "arena_falls_back": self.falls_back,
            }
