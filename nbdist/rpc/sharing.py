"""Large tensors between agents of one host: who can read whose arena, and how blocks find their way back.

Two agents find out as they meet: each looks whether it can read the other's memory, and says so. What is sent to one
that cannot goes in frames.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from nbdist.channel.arena import Arena, Space
from nbdist.channel.leases import Leases
from nbdist.channel.liveness import is_alive
from nbdist.wire.messages import Carrier, GiveBack, Message, Place, Record
from nbdist.wire.tensors import Buffer

__all__ = ["Sharing"]

_TRIM_EVERY = 5.0
_PATIENCE = 0.02
"""Seconds for which a block waits for a message that goes to its owner anyhow."""
_MUCH = 8 << 20
"""Bytes that do not wait."""
_NOTHING: list[tuple[int, int]] = []


class _Owed:
    """What is to go back to one agent."""

    def __init__(self, due: float) -> None:
        self.blocks: list[tuple[int, int]] = []
        self.shared: list[tuple[int, int]] = []
        self.size = 0
        self.due = due


class Sharing:
    """One agent's arena, and its leases of those of others."""

    def __init__(self, me: Record, arena: Arena | None, *, reads: bool) -> None:
        self._me = me
        self._arena = arena
        self._reads = reads
        """Whether this agent reads the memory of others at all."""
        self._leases = Leases()
        self.spaces: dict[int, Space] = {}
        """The shared memory for large tensors, by receiver; tensors for a receiver without an entry go in frames."""
        self._readable: dict[int, bool] = {}
        self.ended = self._leases.ended
        """The leases that have ended and that nobody has looked at: `tend` does."""
        self.owing: dict[int, _Owed] = {}
        """The blocks that should go back to other agents, by agent."""
        self._lock = threading.Lock()
        """Guards `owing`."""
        self.trim_at = 0.0
        """When `tend` should be called although nothing is owed (of `time.monotonic`)."""

    # -- meeting ------------------------------------------------------------------------------

    def can_read(self, owner: Record) -> bool:
        """Whether this agent can read the arena of another."""
        known = self._readable.get(owner.incarnation)
        if known is None:
            known = self._reads and owner.host == self._me.host and self._leases.can_read(owner)
            self._readable[owner.incarnation] = known
        return known

    def meet_self(self) -> None:
        """What this agent sends to itself is read as anybody else's."""
        self.on_met(self._me.incarnation, self.can_read(self._me))

    def on_met(self, other: int, reads: bool) -> None:
        """Another agent has said whether it can read this one's arena."""
        if reads and self._arena is not None and other not in self.spaces:
            self.spaces[other] = Space(self._arena, other)

    # -- sending ------------------------------------------------------------------------------

    def undelivered(self, receiver: int, message: Message) -> None:
        """A message is given up, although it may have arrived."""
        if isinstance(message, Carrier) and message.payload.places and self._arena is not None:
            self._arena.lose(receiver, [(place.segment, place.offset) for place in message.payload.places])

    # -- receiving ----------------------------------------------------------------------------

    def begin(self, owner: Record, places: Sequence[Place]) -> list[Buffer] | None:
        """Return the memory that a message came with; None where its sender has died, and its memory with it."""
        memory = self._leases.begin(owner, places, time.monotonic())
        if not all(memory) and not is_alive(owner.pid, owner.started):
            return None
        return memory

    def tend(self, now: float) -> tuple[list[tuple[int, GiveBack]], float]:
        """Do what is due between two messages, in the thread that reads.

        Returns what to send to whom, and by when (of `time.monotonic`) this should be called again, if nothing
        happens before; as it should be where `ended`, `owing` or `trim_at` says so.
        """
        if self.ended:
            self._collect(now)
        due = self._due(now) if self.owing else ([], math.inf)
        if now >= self.trim_at:
            self.trim_at = now + _TRIM_EVERY
            self._leases.trim(now)
            if self._arena is not None:
                self._arena.trim()
        return due

    # -- giving back --------------------------------------------------------------------------

    def owed(self, to: int) -> list[tuple[int, int]]:
        """The blocks that a message to ``to`` can take back to it."""
        if self.ended:
            self._collect(time.monotonic())
        if not self.owing:
            return _NOTHING
        with self._lock:
            owed = self.owing.get(to)
            if owed is None:
                return _NOTHING
            if not owed.shared:
                del self.owing[to]
            blocks, owed.blocks = owed.blocks, []
            return blocks

    def owe(self, to: int, blocks: Sequence[tuple[int, int]]) -> None:
        """A message that had blocks to take back has certainly not gone out."""
        with self._lock:
            self.owing.setdefault(to, _Owed(time.monotonic())).blocks += blocks

    def _collect(self, now: float) -> None:
        """Note what has ended, for the next message to its owner."""
        with self._lock:
            for lease in self._leases.take_ended():
                owed = self.owing.get(lease.owner)
                if owed is None:
                    owed = self.owing[lease.owner] = _Owed(now + _PATIENCE)
                (owed.shared if lease.is_shared else owed.blocks).append((lease.segment, lease.offset))
                owed.size += lease.length
                if owed.size > _MUCH or lease.is_shared:
                    owed.due = now

    def _due(self, now: float) -> tuple[list[tuple[int, GiveBack]], float]:
        """Return what has waited for a message to its owner for too long, and when more of it will have."""
        due: list[tuple[int, GiveBack]] = []
        later = math.inf
        with self._lock:
            for to, owed in self.owing.items():
                if owed.due <= now:
                    due.append((to, GiveBack(owed.shared)))
                    owed.shared = []
                else:
                    later = min(later, owed.due)
        return due, later

    def on_back(self, sender: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Another agent needs these no longer."""
        if self._arena is not None:
            self._arena.give_back(sender, blocks)

    def on_give_back(self, message: GiveBack, sender: int, _: list[bytes]) -> None:
        """Free shared blocks that another agent needs no longer."""
        if self._arena is not None:
            self._arena.lose(sender, message.shared)

    # -- the end ------------------------------------------------------------------------------

    def on_lost(self, record: Record, why: str) -> None:
        """Forget the memory of a lost member, and the blocks that it read."""
        self.spaces.pop(record.incarnation, None)
        self._readable.pop(record.incarnation, None)
        with self._lock:
            self.owing.pop(record.incarnation, None)
        self._leases.forget(record.incarnation)
        if self._arena is not None:
            self._arena.forget(record.incarnation, is_dead=not is_alive(record.pid, record.started))

    def close(self) -> None:
        """Let go of all memory but what tensors hold."""
        self.trim_at = math.inf
        self.spaces.clear()
        self._leases.close()
        if self._arena is not None:
            self._arena.close()

    def statistics(self) -> dict[str, int]:
        """Counters."""
        mine = self._arena.statistics() if self._arena is not None else {}
        return {**mine, **self._leases.statistics()}
