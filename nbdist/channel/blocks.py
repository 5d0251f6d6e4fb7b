"""Which part of an arena's memory is whose. Pure: it touches no memory, it says what to do with it.

Memory comes in segments, each one file; a segment is cut into blocks of one size. A block that has been written to
has pages of its own, and a write to it again costs a tenth of the first: so a block that comes back is kept *warm*,
and the one that came back last is taken first. What is kept is bounded by what was lately in use. A block is *cold*
before its first use, and after its pages have been given up; a segment all of whose blocks are cold is closed.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import NamedTuple

__all__ = ["Block", "Blocks", "Close", "Empty", "Instruction", "Open", "size_class"]

_SMALLEST = 1 << 16
_SEGMENT = 1 << 24
"""Bytes of a segment that has several blocks: a file for each small block would be many files."""
_KEPT = 4
"""How many times what was lately in use may be held."""


def size_class(length: int) -> int:
    """The size of block for so many bytes: four sizes between a power of two and the next."""
    if length <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((length - 1).bit_length() - 3)
    return -(-length // step) * step


class Segment:
    """One file's worth of memory."""

    __slots__ = ("blocks", "is_retired", "number", "size", "warm")

    def __init__(self, number: int, block_size: int) -> None:
        count = max(1, _SEGMENT // block_size)
        self.number = number
        self.size = count * block_size
        self.blocks = {index * block_size: Block(self, index * block_size, block_size) for index in range(count)}
        self.warm = 0
        """How many blocks have pages that are the arena's."""
        self.is_retired = False


class Block:
    """One storage's worth of a segment."""

    __slots__ = ("freed", "offset", "segment", "size")

    def __init__(self, segment: Segment, offset: int, size: int) -> None:
        self.segment = segment
        self.offset = offset
        self.size = size
        self.freed = 0


class Open(NamedTuple):
    """Do: make a segment."""

    segment: int
    size: int


class Empty(NamedTuple):
    """Do: give up the pages of a block, which nobody reads any more."""

    segment: int
    offset: int
    size: int


class Close(NamedTuple):
    """Do: let go of a segment; who still reads it keeps it alive."""

    segment: int


Instruction = Open | Empty | Close


class Blocks:
    """The books of one arena."""

    def __init__(self, bound: int, segments: int) -> None:
        """Never hold more than ``bound`` bytes, in that many segments."""
        self.held = 0
        """Bytes of all blocks that have pages."""
        self.used = 0
        """Bytes of those that are taken, or with somebody."""
        self._bound = bound
        self._most = segments
        self._segments: dict[int, Segment] = {}
        self._numbers = itertools.count(1)
        self._frees = itertools.count(1)
        self._warm: dict[int, deque[Block]] = {}
        self._cold: dict[int, list[Block]] = {}
        self._with: dict[int, dict[tuple[int, int], Block]] = {}
        self._peak = self._peak_before = 0

    @property
    def segments(self) -> int:
        """How many there are."""
        return len(self._segments)

    @property
    def outstanding(self) -> int:
        """How many blocks are with receivers."""
        return sum(map(len, self._with.values()))

    # -- out ----------------------------------------------------------------------------------

    def take(self, length: int) -> tuple[Block | None, list[Instruction]]:
        """A block for so many bytes; None where the bound allows none."""
        size = size_class(length)
        if self.used + size > self._bound:
            return None, []
        self._peak = max(self._peak, self.used + size)
        instructions: list[Instruction] = []
        warm = self._warm.get(size)
        if warm:
            block = warm.pop()
        else:
            self._empty_until(min(self._bound, self._worth_holding()) - size, instructions)
            cold = self._cold.setdefault(size, [])
            if not cold:
                if len(self._segments) >= self._most:
                    return None, instructions
                segment = Segment(next(self._numbers), size)
                self._segments[segment.number] = segment
                cold += reversed(segment.blocks.values())
                instructions.append(Open(segment.number, segment.size))
            block = cold.pop()
            block.segment.warm += 1
            self.held += size
        self.used += size
        return block, instructions

    def send(self, block: Block, to: int) -> None:
        """A block that was taken is now with a receiver, until it gives it back."""
        self._with.setdefault(to, {})[block.segment.number, block.offset] = block

    # -- and back -----------------------------------------------------------------------------

    def put_back(self, block: Block) -> list[Instruction]:
        """A block that was taken has not been sent."""
        return self._free(block)

    def discard(self, block: Block) -> list[Instruction]:
        """The segment of a block that was taken could not be made."""
        block.segment.is_retired = True
        return self._free(block)

    def give_back(self, by: int, segment: int, offset: int) -> list[Instruction]:
        """A receiver needs a block no longer. What it does not have it cannot give back."""
        block = self._with.get(by, {}).pop((segment, offset), None)
        return [] if block is None else self._free(block)

    def lose(self, by: int, segment: int, offset: int) -> list[Instruction]:
        """A receiver no longer needs a block, but it may still be read: it is never used again."""
        block = self._with.get(by, {}).pop((segment, offset), None)
        return [] if block is None else self._lose(block)

    def forget(self, receiver: int, *, is_dead: bool) -> list[Instruction]:
        """A receiver is gone; if it may live on, so may its tensors."""
        instructions: list[Instruction] = []
        for block in self._with.pop(receiver, {}).values():
            instructions += self._free(block) if is_dead else self._lose(block)
        return instructions

    def _free(self, block: Block) -> list[Instruction]:
        self.used -= block.size
        if block.segment.is_retired:
            return self._empty(block)
        block.freed = next(self._frees)
        self._warm.setdefault(block.size, deque()).append(block)
        return []

    def _lose(self, block: Block) -> list[Instruction]:
        self.used -= block.size
        self.held -= block.size
        segment = block.segment
        instructions: list[Instruction] = []
        if not segment.is_retired:  # the sooner its file is closed, the sooner the memory is the reader's alone
            segment.is_retired = True
            self._cold[block.size] = [cold for cold in self._cold.get(block.size, ()) if cold.segment is not segment]
            warm = self._warm.setdefault(block.size, deque())
            for idle in [idle for idle in warm if idle.segment is segment]:
                warm.remove(idle)
                instructions += self._empty(idle)
        segment.warm -= 1
        return instructions + self._close_if_idle(segment)

    # -- what is kept -------------------------------------------------------------------------

    def trim(self) -> list[Instruction]:
        """A while has passed: give up what was not needed in this one and the one before."""
        instructions: list[Instruction] = []
        self._empty_until(self._worth_holding(), instructions)
        self._peak, self._peak_before = self.used, self._peak
        return instructions

    def _worth_holding(self) -> int:
        return _KEPT * max(self._peak, self._peak_before)

    def _empty_until(self, most: int, instructions: list[Instruction]) -> None:
        """Give up warm blocks, the longest unused first, until no more than that is held."""
        while self.held > most:
            oldest = min((warm for warm in self._warm.values() if warm), key=lambda warm: warm[0].freed, default=None)
            if oldest is None:
                return
            instructions += self._empty(oldest.popleft())

    def _empty(self, block: Block) -> list[Instruction]:
        segment = block.segment
        self.held -= block.size
        segment.warm -= 1
        if not segment.is_retired:
            self._cold.setdefault(block.size, []).append(block)
        return [Empty(segment.number, block.offset, block.size), *self._close_if_idle(segment)]

    def _close_if_idle(self, segment: Segment) -> list[Instruction]:
        if segment.warm:
            return []
        size = next(iter(segment.blocks.values())).size
        self._cold[size] = [cold for cold in self._cold.get(size, ()) if cold.segment is not segment]
        del self._segments[segment.number]
        return [Close(segment.number)]
