"""Large tensors between agents of one host: which agent can read which arena, and how blocks return to their owner.

An *arena* is the shared memory of one agent, divided into *blocks*. An agent that reads a block of another agent has a
*lease* of it.

When two agents meet, each tests whether it can read the other's memory, and says so (`Hello.reads`). Tensors for an
agent that cannot read it travel in frames.

The life of a block::

    owner                                       receiver
    Space.put    copy a tensor in
    Slot.send    lend the block  ── Call ────>  Sharing.begin     read it in place; a lease begins
                                                (the last tensor in it is collected)
                                                Sharing.tend      the lease has ended: the block is owed
    Sharing.on_back   free it  <── any message ─ Sharing.owed      a `GiveBack`, if no other message goes in 20 ms
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from nbdist.channel.process_watch import is_alive
from nbdist.channel.shared_memory.arena import Arena, ArenaSpace
from nbdist.channel.shared_memory.gpu_arena import Gpus
from nbdist.channel.shared_memory.gpu_memory import GpuBytes
from nbdist.channel.shared_memory.leases import Leases
from nbdist.gpus import staging
from nbdist.wire.messages import Carrier, GiveBack, Message, Place, Record
from nbdist.wire.tensors import Buffer

_TRIM_EVERY_SECONDS = 5.0  # between two searches for memory that was not used lately
_RIDE_WAIT_SECONDS = 0.02  # so long a block waits for another message that can take it back to its owner
_RETURN_AT_ONCE_BYTES = 8 << 20  # if more must go back to one agent, it goes at once
_NO_BLOCKS: list[tuple[int, int]] = []  # what `owed` usually returns


class _Owed:
    """The blocks that must go back to one agent, their owner, each as its segment and offset."""

    def __init__(self, due: float) -> None:
        self.blocks: list[tuple[int, int]] = []  # the owner may use these again
        self.shared: list[tuple[int, int]] = []  # a forked process may still read these: they must not be reused
        self.size = 0  # the bytes of all these blocks
        self.due = due  # when they go back in a message of their own


class Sharing:
    """One agent's shared memory for large tensors (its arena), and the blocks of other agents' arenas that it reads.

    Moments are as of `time.monotonic`; a block is a pair of segment and offset.
    """

    def __init__(self, me: Record, arena: Arena | None, *, reads: bool, gpus: Gpus | None = None) -> None:
        self._me = me
        self._arena = arena
        self._gpus = gpus
        # All arenas of this agent, on the CPU and on GPUs. Each ignores blocks of other arenas.
        self._arenas = [each for each in (arena, *(gpus.arenas if gpus is not None else ())) if each is not None]
        self._reads = reads  # True if this agent may read the memory of others at all
        self._leases = Leases(gpus)
        self.spaces: dict[int, ArenaSpace] = {}
        """The shared memory by receiver; tensors for a receiver without an entry go in frames."""
        self._readable: dict[int, bool] = {}  # for each agent whose arena was tested, by incarnation
        self.ended = self._leases.ended
        """The leases that have ended and that `tend` has not handled yet; usually empty."""
        self.owing: dict[int, _Owed] = {}
        """The blocks that must go back, by their owner's incarnation."""
        self._lock = threading.Lock()  # guards `owing`
        self.trim_at = 0.0
        """The moment at which `tend` must be called even if nothing is owed."""

    # -- meeting another agent ----------------------------------------------------------------

    def can_read(self, owner: Record) -> bool:
        """Return whether this agent can read the arena of another agent. Tests this once for each agent."""
        known = self._readable.get(owner.incarnation)
        if known is None:
            known = self._reads and owner.host == self._me.host and self._leases.can_read(owner)
            self._readable[owner.incarnation] = known
        return known

    def meet_self(self) -> None:
        """Use shared memory for large tensors that this agent sends to itself."""
        self.on_met(self._me, self.can_read(self._me))

    def on_met(self, other: Record, reads: bool) -> None:
        """Note whether another agent can read this agent's arena: if so, large tensors for it go there from now on."""
        if reads and self._arena is not None and other.incarnation not in self.spaces:
            gpus = self._gpus.reachable(other.gpu_uuids) if self._gpus is not None else {}
            self.spaces[other.incarnation] = ArenaSpace(self._arena, other.incarnation, gpus)

    # -- sending ------------------------------------------------------------------------------

    def undelivered(self, receiver: int, message: Message) -> None:
        """Retire the blocks of a message that was given up but may have arrived: they are never used again."""
        if isinstance(message, Carrier) and message.payload.places:
            for arena in self._arenas:
                arena.lose(receiver, [(place.segment, place.offset) for place in message.payload.places])

    # -- receiving ----------------------------------------------------------------------------

    def begin(self, owner: Record, places: Sequence[Place]) -> list[Buffer | GpuBytes] | None:
        """Borrow the memory of the tensors that a message brought, until no tensor refers to it; None if it is gone."""
        # Decoding an `Unreadable`, a place that cannot be mapped, raises DecodeError.
        memory = self._leases.begin(owner, places, time.monotonic())
        return memory if all(memory) or is_alive(owner.pid, owner.started) else None  # an `Unreadable` is false

    def tend(self, now: float) -> tuple[list[tuple[int, GiveBack]], float]:
        """Return the messages that give ended blocks back, and when to call this again; free memory not used lately."""
        # The reading thread calls this if `ended` or `owing` is not empty, or `trim_at` has come.
        if self.ended:
            self._collect(now)
        due = self._due(now) if self.owing else ([], math.inf)
        if now >= self.trim_at:
            self.trim_at = now + _TRIM_EVERY_SECONDS
            self._leases.trim(now)
            for arena in self._arenas:
                arena.trim()
        return due

    # -- giving back --------------------------------------------------------------------------

    def owed(self, to: int) -> list[tuple[int, int]]:
        """Take the blocks that the next message to agent ``to`` gives back; call `owe` if that message is not sent."""
        if self.ended:
            self._collect(time.monotonic())
        if not self.owing:
            return _NO_BLOCKS
        with self._lock:
            owed = self.owing.get(to)
            if owed is None:
                return _NO_BLOCKS
            if not owed.shared:  # else the entry stays for `_due`, whose message alone can say that blocks are shared
                del self.owing[to]
            blocks, owed.blocks = owed.blocks, []
            return blocks

    def owe(self, to: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Put back blocks that `owed` returned for a message to agent ``to`` that was certainly not sent."""
        with self._lock:
            self.owing.setdefault(to, _Owed(time.monotonic())).blocks += blocks

    def _collect(self, now: float) -> None:
        """Move the blocks that no tensor here refers to any more into `owing`, for the next message to each owner."""
        with self._lock:
            for lease in self._leases.take_ended():
                owed = self.owing.get(lease.owner)
                if owed is None:
                    owed = self.owing[lease.owner] = _Owed(now + _RIDE_WAIT_SECONDS)
                (owed.shared if lease.is_shared else owed.blocks).append((lease.segment, lease.offset))
                owed.size += lease.length
                if owed.size > _RETURN_AT_ONCE_BYTES or lease.is_shared:
                    owed.due = now

    def _due(self, now: float) -> tuple[list[tuple[int, GiveBack]], float]:
        """Return the messages that give back blocks which have waited too long, and when the next ones are due."""
        due: list[tuple[int, GiveBack]] = []
        later = math.inf
        with self._lock:
            for to, owed in self.owing.items():
                if owed.due <= now:
                    due.append((to, GiveBack(owed.shared)))  # its envelope takes `owed.blocks` along
                    owed.shared = []
                else:
                    later = min(later, owed.due)
        return due, later

    def on_back(self, sender: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Free blocks of this agent's arena that ``sender`` has given back; those that were not lent to it stay."""
        for arena in self._arenas:
            arena.give_back(sender, blocks)

    def on_give_back(self, message: GiveBack, sender: int, _: list[bytes]) -> None:
        """Retire blocks that another agent gives back although a process forked from it may still read them."""
        for arena in self._arenas:
            arena.lose(sender, message.shared)

    # -- the end ------------------------------------------------------------------------------

    def on_lost(self, record: Record, why: str) -> None:
        """Forget a lost member's arena, and take back the blocks of this agent's arena that it was reading."""
        self.spaces.pop(record.incarnation, None)
        self._readable.pop(record.incarnation, None)
        with self._lock:
            self.owing.pop(record.incarnation, None)
        self._leases.forget(record.incarnation)
        if self._gpus is not None:
            self._gpus.descriptors.forget(record.incarnation)
        # While its process runs, its tensors may be in these blocks: then they are never used again.
        for arena in self._arenas:
            arena.forget(record.incarnation, is_dead=not is_alive(record.pid, record.started))

    def close(self) -> None:
        """Release all memory except what tensors still refer to: these stay usable."""
        self.trim_at = math.inf
        self.spaces.clear()
        self._leases.close()
        if self._arena is not None:
            self._arena.close()
        if self._gpus is not None:
            self._gpus.close()
        staging.free()

    def statistics(self) -> dict[str, int]:
        """Return counters by name: of this agent's arena, and of the blocks of other agents' arenas that it reads."""
        mine = self._arena.statistics() if self._arena is not None else {}
        on_gpus: dict[str, int] = {}
        for arena in self._gpus.arenas if self._gpus is not None else ():
            for name, number in arena.statistics().items():
                on_gpus[f"gpu_{name}"] = on_gpus.get(f"gpu_{name}", 0) + number
        return {**mine, **on_gpus, **self._leases.statistics()}
