"""Keeps track of the blocks of an arena: which block is free, taken or lent, and to whom.

Pure: no function here touches memory. The functions return instructions (`Open`, `Empty`, `Close`), and the arena
carries them out in order. Memory comes in segments. Each segment is a file, cut into blocks of one size::

                           take                       send
    cold (no pages) ──┬────────────> taken (a slot) ────────> lent to a receiver
       ^              │                 │ put_back              │ give_back, forget(is_dead=True)
       │ `Empty`      │ take            v                       │
       └─────────── warm (keeps its pages) <────────────────────┘
                                        lose, forget(is_dead=False): the block is never used again, and its segment is
                                        *retired*: no other block of it is taken any more

A block that has been written to has pages. Writing to it again costs a tenth of the first time. So a free block keeps
its pages for a while (*warm*), and the block that was freed last is taken first. The arena holds at most 4 times
(`_HELD_PER_USED`) the bytes that were lately in use at once. Beyond that, warm blocks lose their pages (*cold*). A
segment in which no block is warm, taken or lent is closed.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

_SMALLEST_BLOCK = 1 << 16  # bytes
SEGMENT_SIZE = 1 << 24  # the bytes of a segment of small blocks: one file for each block would take too many files
_HELD_PER_USED = 4


def size_class(length: int) -> int:
    """Return the size of the block for ``length`` bytes: the next of four sizes for each power of two."""
    if length <= _SMALLEST_BLOCK:
        return _SMALLEST_BLOCK
    step = 1 << ((length - 1).bit_length() - 3)
    return -(-length // step) * step


class Segment:
    """The blocks of one file, all of one size."""

    __slots__ = ("blocks", "is_retired", "number", "size", "warm")

    def __init__(self, number: int, block_size: int, segment_size: int) -> None:
        count = max(1, segment_size // block_size)
        self.number = number
        self.size = count * block_size
        self.blocks = {index * block_size: Block(self, index * block_size, block_size) for index in range(count)}
        self.warm = 0  # the number of blocks that have pages: warm, taken and lent ones, without lost ones
        self.is_retired = False


@dataclass(eq=False, repr=False, slots=True)
class Block:
    """A part of a segment, for one storage."""

    segment: Segment
    offset: int
    size: int
    freed: int = 0  # the number of the event that last freed the block, among all such events


class Open(NamedTuple):
    """Tells the arena to make a segment: a file of ``size`` bytes."""

    segment: int
    size: int


class Empty(NamedTuple):
    """Tells the arena to free the pages of a block, which no process reads any more."""

    segment: int
    offset: int
    size: int


class Close(NamedTuple):
    """Tells the arena to close a segment. Processes that still read from the segment keep its memory alive."""

    segment: int


Instruction = Open | Empty | Close


class Blocks:
    """Keeps track of which blocks of an arena are free, taken or lent. Only one thread at a time may use it.

    Methods return instructions, which the arena must carry out in order.
    """

    def __init__(self, bound: int, segments: int, first: int = 1, segment_size: int = SEGMENT_SIZE) -> None:
        """Hold at most ``bound`` bytes, in at most ``segments`` segments, which are numbered from ``first`` on.

        Segments of small blocks have ``segment_size`` bytes.
        """
        self._segment_size = segment_size
        self.held = 0
        """The bytes of all blocks that have pages: warm, taken and lent ones."""
        self.used = 0
        """The bytes of all blocks that are taken or lent."""
        self._bound = bound
        self._most = segments
        self._segments: dict[int, Segment] = {}  # those that are not closed, by number
        self._numbers = itertools.count(first)
        self._frees = itertools.count(1)
        self._warm: dict[int, deque[Block]] = {}  # by size; the last one was freed last
        self._cold: dict[int, list[Block]] = {}  # by size
        # The lent blocks of each receiver, by segment and offset.
        self._with: dict[int, dict[tuple[int, int], Block]] = {}
        # The most bytes in use at once: since the last `trim`, and between the last two calls of it.
        self._peak = self._peak_before = 0

    @property
    def segments(self) -> int:
        """The number of segments that are not closed."""
        return len(self._segments)

    @property
    def outstanding(self) -> int:
        """The number of lent blocks."""
        return sum(map(len, self._with.values()))

    # -- out ----------------------------------------------------------------------------------

    def take(self, length: int) -> tuple[Block | None, list[Instruction]]:
        """Take a free block for ``length`` bytes; return None if the bounds allow none, still with instructions.

        If the arena cannot make a segment, it calls `discard` with the block.
        """
        size = size_class(length)
        if self.used + size > self._bound:
            return None, []
        self._peak = max(self._peak, self.used + size)
        instructions: list[Instruction] = []
        warm = self._warm.get(size)
        if warm:
            block = warm.pop()
        else:
            # Only in this branch: a warm block is held already.
            self._empty_until(min(self._bound, self._worth_holding()) - size, instructions)
            cold = self._cold.setdefault(size, [])
            if not cold:
                if len(self._segments) >= self._most:
                    return None, instructions
                segment = Segment(next(self._numbers), size, self._segment_size)
                self._segments[segment.number] = segment
                cold += reversed(segment.blocks.values())  # `pop` then takes them in the order of the file
                instructions.append(Open(segment.number, segment.size))
            block = cold.pop()
            block.segment.warm += 1
            self.held += size
        self.used += size
        return block, instructions

    def send(self, block: Block, to: int) -> None:
        """Lend a taken block to the receiver ``to``, until `give_back`, `lose` or `forget`."""
        self._with.setdefault(to, {})[block.segment.number, block.offset] = block

    # -- and back -----------------------------------------------------------------------------

    def discard(self, block: Block) -> list[Instruction]:
        """Forget a taken block, and retire its segment, because the arena could not make the segment."""
        block.segment.is_retired = True  # else `put_back` would keep the block for the next `take`
        return self.put_back(block)

    def give_back(self, by: int, segment: int, offset: int) -> list[Instruction]:
        """Free the block at ``segment`` and ``offset``. Does nothing if it is not lent to the receiver ``by``."""
        block = self._with.get(by, {}).pop((segment, offset), None)
        return [] if block is None else self.put_back(block)

    def lose(self, by: int, segment: int, offset: int) -> list[Instruction]:
        """Never use again a block that was lent to ``by``, nor others of its segment: a process may still read it.

        Does nothing if the block is not lent to ``by``.
        """
        block = self._with.get(by, {}).pop((segment, offset), None)
        return [] if block is None else self._strike_out(block)

    def forget(self, receiver: int, *, is_dead: bool) -> list[Instruction]:
        """Free all blocks that are lent to a dead receiver. If its process is alive, never use them again."""
        instructions: list[Instruction] = []
        for block in self._with.pop(receiver, {}).values():
            instructions += self.put_back(block) if is_dead else self._strike_out(block)
        return instructions

    def put_back(self, block: Block) -> list[Instruction]:
        """Free a taken or lent block. It keeps its memory for the next `take`, unless its segment is retired."""
        self.used -= block.size
        if block.segment.is_retired:
            return self._empty(block)
        block.freed = next(self._frees)
        self._warm.setdefault(block.size, deque()).append(block)
        return []

    def _strike_out(self, block: Block) -> list[Instruction]:
        """Remove a lost block from the counts, and retire its segment, whose free blocks lose their memory."""
        self.used -= block.size
        self.held -= block.size
        segment = block.segment
        instructions: list[Instruction] = []
        if not segment.is_retired:  # its file is closed as soon as possible, so that its memory ends with its readers
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
        """Free memory of free blocks, beyond 4 times the most bytes lately in use at once. Call it every 5 s."""
        instructions: list[Instruction] = []
        self._empty_until(self._worth_holding(), instructions)
        # Keep the peak of this period for one more: "lately" is since the call before the last one.
        self._peak, self._peak_before = self.used, self._peak
        return instructions

    def _worth_holding(self) -> int:
        return _HELD_PER_USED * max(self._peak, self._peak_before)

    def _empty_until(self, most: int, instructions: list[Instruction]) -> None:
        """Free the memory of free blocks, the longest free first, until at most ``most`` bytes are held."""
        while self.held > most:
            oldest = min((warm for warm in self._warm.values() if warm), key=lambda warm: warm[0].freed, default=None)
            if oldest is None:
                return
            instructions += self._empty(oldest.popleft())

    def _empty(self, block: Block) -> list[Instruction]:
        """Take away the memory of a free block, and close its segment if that is idle now."""
        segment = block.segment
        self.held -= block.size
        segment.warm -= 1
        if not segment.is_retired:  # else the block is never taken again
            self._cold.setdefault(block.size, []).append(block)
        return [Empty(segment.number, block.offset, block.size), *self._close_if_idle(segment)]

    def _close_if_idle(self, segment: Segment) -> list[Instruction]:
        """Close a segment if none of its blocks is taken, lent or has memory."""
        if segment.warm:
            return []
        size = next(iter(segment.blocks.values())).size
        self._cold[size] = [cold for cold in self._cold.get(size, ()) if cold.segment is not segment]
        del self._segments[segment.number]
        return [Close(segment.number)]
