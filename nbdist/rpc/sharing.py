"""Large tensors between agents of one host: who can read whose arena, and how blocks find their way back.

Two agents find out as they meet: each looks whether it can read the other's memory, and says so. What is sent to one
that cannot goes in frames.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbdist.channel.arena import Arena, Space
from nbdist.channel.leases import Leases
from nbdist.channel.liveness import is_alive
from nbdist.errors import NbdistError
from nbdist.wire.messages import Call, Cast, GiveBack, Message, Place, Record, Reply
from nbdist.wire.tensors import Buffer

if TYPE_CHECKING:
    from nbdist.rpc.agent import Agent

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

    def __init__(self, agent: Agent, arena: Arena | None) -> None:
        self._agent = agent
        self._arena = arena
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
        agent.handle(GiveBack, self._on_give_back)
        agent.on_lost(self._on_lost)
        agent.at_close(self.close)

    # -- meeting ------------------------------------------------------------------------------

    def can_read(self, owner: Record) -> bool:
        """Whether this agent can read the arena of another."""
        known = self._readable.get(owner.incarnation)
        if known is None:
            known = owner.host == self._agent.me.host and self._agent.options.arena_bytes != 0
            known = self._readable[owner.incarnation] = known and self._leases.can_read(owner)
        return known

    def meet_self(self) -> None:
        """What this agent sends to itself is read as anybody else's."""
        self.on_met(self._agent.me.incarnation, self.can_read(self._agent.me))

    def on_met(self, other: int, reads: bool) -> None:
        """Another agent has said whether it can read this one's arena."""
        if reads and self._arena is not None and other not in self.spaces:
            self.spaces[other] = Space(self._arena, other)

    # -- sending ------------------------------------------------------------------------------

    def undelivered(self, receiver: int, message: Message) -> None:
        """A message is given up, although it may have arrived."""
        if isinstance(message, Call | Reply | Cast) and message.payload.places and self._arena is not None:
            self._arena.lose(receiver, [(place.segment, place.offset) for place in message.payload.places])

    # -- receiving ----------------------------------------------------------------------------

    def begin(self, owner: Record, places: Sequence[Place]) -> list[Buffer] | None:
        """Return the memory that a message came with; None where its sender has died, and its memory with it."""
        memory = self._leases.begin(owner, places, time.monotonic())
        if not all(memory) and not is_alive(owner.pid, owner.started):
            return None
        return memory

    def tend(self, now: float) -> None:
        """What the thread that reads does between two messages."""
        if self.ended:
            self._collect(now)
        if self.owing:
            self._give_back(now)
        if now >= self.trim_at:
            self.trim_at = now + _TRIM_EVERY
            self._leases.trim(now)
            if self._arena is not None:
                self._arena.trim()

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

    def _give_back(self, now: float) -> None:
        """Send what has waited for a message to its owner for too long."""
        due: dict[int, list[tuple[int, int]]] = {}
        with self._lock:
            for to, owed in self.owing.items():
                if owed.due <= now:
                    due[to], owed.shared = owed.shared, []
                elif owed.due < self._agent.links.due:
                    self._agent.links.due = owed.due  # this is the reader, which need not be woken
        for to, shared in due.items():
            with contextlib.suppress(NbdistError):  # who is gone has no use for them
                self._agent.post(to, GiveBack(shared))

    def on_back(self, sender: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Another agent needs these no longer."""
        if self._arena is not None:
            self._arena.give_back(sender, blocks)

    def _on_give_back(self, message: GiveBack, sender: int, _: list[bytes]) -> None:
        if self._arena is not None:
            self._arena.lose(sender, message.shared)

    # -- the end ------------------------------------------------------------------------------

    def _on_lost(self, record: Record, why: str) -> None:
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
