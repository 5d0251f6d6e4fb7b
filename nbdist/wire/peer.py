"""The protocol with one other agent: each message exactly once, in any order, or the peer is lost.

Pure: time and messages go in, frames to transmit come out. A message that must arrive gets a number and is kept
until acknowledged; acknowledgements ride on whatever goes the other way, or go alone after a moment. A `UserDelete`,
for which nobody waits, rides on the next message that must arrive (`Peer.send_later`), or goes alone as well. Nothing
is resent on suspicion: a *ping* that overtakes nothing asks what has arrived, and only what the answer lacks is sent
again. The receiver drops what it has seen, so a call runs at most once (G2) on a channel that loses, doubles and
reorders.

Silence makes a remote peer suspect and then lost (G3). A peer in a process of this host is never judged by
its silence, which a long C call explains; that its process lives is watched elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from nbdist.wire.messages import (
    Envelope,
    Message,
    Nothing,
    Ping,
    Pong,
    UserDelete,
    encode_envelope,
)
from nbdist.wire.tensors import Buffer

__all__ = [
    "PING_FIRST",
    "Lost",
    "Outgoing",
    "Peer",
    "PeerLimits",
    "SeqSet",
    "Standing",
    "Suspect",
    "Transmit",
    "Undelivered",
]

_ACK_DELAY = 0.05
_ACK_BYTES = 1 << 20
_DELETE_DELAY = 0.05
"""Seconds for which a released fork waits for a message that can take it along."""
PING_FIRST = 0.5
"""Seconds after which the first ping asks for a message: what was just sent wants nothing done before."""
_PING_MOST = 5.0
_RETRY_FIRST = 0.05
_RETRY_MOST = 2.0
_MORE = 64


@dataclass(frozen=True)
class PeerLimits:
    """When to lose patience; all in seconds but ``retries``."""

    suspect_after: float = 5.0
    lost_after: float = 12.0
    heartbeat: float = 1.0
    retries: int = 20


class Standing(Enum):
    """What is believed of a peer."""

    LIVE = "live"
    SUSPECT = "suspect"
    LOST = "lost"


class Outgoing:
    """A message ready for the channel; ``seq`` is 0 where nobody waits for its arrival, and else it is kept."""

    __slots__ = ("back", "deletes", "frames", "holds", "message", "pings", "retry_at", "sent_at", "seq", "tries")

    def __init__(
        self,
        seq: int,
        message: Message,
        frames: list[Buffer],
        back: list[tuple[int, int]],
        deletes: list[UserDelete],
        holds: Any,
        now: float,
        pings: int,
    ) -> None:
        self.seq = seq
        self.message = message
        self.frames = frames
        self.back = back
        """The blocks that it gives back."""
        self.deletes = deletes
        """The released forks that it takes along."""
        self.holds = holds
        self.sent_at = now
        self.pings = pings
        """How many pings had gone out before it did."""
        self.tries = 1
        self.retry_at = math.inf


class Transmit(NamedTuple):
    """Do: hand this to the channel."""

    outgoing: Outgoing


class Suspect(NamedTuple):
    """Know: the peer has been silent for a while."""

    silent: float


class Lost(NamedTuple):
    """Know: the peer has been silent for too long."""

    silent: float


class Undelivered(NamedTuple):
    """Know: a message was tried as often as allowed, and is given up."""

    message: Message


Action = Transmit | Suspect | Lost | Undelivered


class SeqSet:
    """A growing set of numbers from 1 on, as a mark below which all are in, and the few above it."""

    def __init__(self) -> None:
        self.mark = 0
        self.above: set[int] = set()

    def add(self, number: int) -> bool:
        """Whether ``number`` was new."""
        if number == self.mark + 1 and not self.above:
            self.mark = number
            return True
        if number <= self.mark or number in self.above:
            return False
        self.above.add(number)
        self._settle()
        return True

    def advance(self, mark: int) -> None:
        """Take all up to ``mark`` as in."""
        if mark > self.mark:
            self.mark = mark
            self.above = {number for number in self.above if number > mark}
            self._settle()

    def _settle(self) -> None:
        while self.mark + 1 in self.above:
            self.mark += 1
            self.above.discard(self.mark)


class Peer:
    """What one agent knows about the exchange with another."""

    def __init__(self, me: int, other: int, limits: PeerLimits, now: float, *, watch_silence: bool) -> None:
        self.standing = Standing.LIVE
        self.doing = ""
        self.doing_at = -math.inf
        self.definitions: set[str] = set()
        self.lacking: set[str] = set()
        self.duplicates = 0
        self.resent = 0
        self._me = me
        self._other = other
        self._limits = limits
        self._watch = watch_silence
        self._heard = now
        self.next_seq = 1
        """The number that the next message which must arrive will have."""
        self._first = 1  # the lowest that is kept, or the next one: a dict whose front is deleted is slow to find it
        self._kept: dict[int, Outgoing] = {}
        self._arrived = SeqSet()
        self.ack_due = math.inf
        """When an acknowledgement is to go out alone: all that a message which has come may want done soon."""
        self._ack_bytes = 0
        self._deletes: list[UserDelete] = []
        self._deletes_due = math.inf
        self._pings = 0
        self._ping_sent = -math.inf
        self._ping_wait = PING_FIRST
        self._retrying = 0

    @property
    def outstanding(self) -> int:
        """How many messages the peer has not acknowledged. Queued deletes count."""
        return len(self._kept) + len(self._deletes)

    def silent_for(self, now: float) -> float:
        """Seconds since anything was heard."""
        return now - self._heard

    def is_unacknowledged(self, seq: int) -> bool:
        """Whether message ``seq`` is not known to have arrived."""
        return seq in self._kept

    def keeps(self, message: Message) -> bool:
        """Return whether a message has been sent that must arrive and is not known to have."""
        return any(kept.message is message for kept in self._kept.values())

    # -- what goes out ------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        frames: Sequence[Buffer],
        now: float,
        holds: Any = None,
        back: list[tuple[int, int]] | None = None,
    ) -> Outgoing:
        """The message as it goes to the channel; ``holds`` lives until it has arrived.

        ``back`` are blocks that it gives back; only a message that must arrive can.
        """
        seq = self.next_seq if message.must_arrive else 0
        if back is None:
            back = []
        deletes = self._deletes if seq and self._deletes else []
        first = self._envelope(seq, message, back, deletes)
        outgoing = Outgoing(seq, message, [first, *frames], back, deletes, holds, now, self._pings)
        if seq:
            # In this order, and last: a Ctrl-C before leaves the peer as it was, and no number without its message.
            self._kept[seq] = outgoing
            self.next_seq = seq + 1
            if deletes:
                self._deletes, self._deletes_due = [], math.inf
        return outgoing

    def send_later(self, message: UserDelete, now: float) -> float:
        """Queue a delete for the next message that must arrive. Return the time at which it is sent alone."""
        self._deletes.append(message)
        self._deletes_due = min(self._deletes_due, now + _DELETE_DELAY)
        return self._deletes_due

    def send_waiting(self, now: float) -> Outgoing | None:
        """Return a message that takes along all that `send_later` has queued; None if there is nothing."""
        if not self._deletes:
            self._deletes_due = math.inf
            return None
        last = self._deletes.pop()
        try:
            outgoing = self.send(last, (), now)  # it takes the others along
        except BaseException:  # Ctrl-C
            self._deletes.append(last)
            raise
        self._deletes_due = math.inf
        return outgoing

    def _envelope(self, seq: int, message: Message, back: list[tuple[int, int]], deletes: list[UserDelete]) -> bytes:
        """Write an envelope, which acknowledges what has arrived until now."""
        arrived = self._arrived
        more = sorted(arrived.above)[:_MORE] if arrived.above else []
        self.ack_due = math.inf
        self._ack_bytes = 0
        return encode_envelope(
            Envelope(self._me, self._other, seq, self._first, arrived.mark, more, message, back, deletes)
        )

    def refused(self, outgoing: Outgoing, now: float) -> None:
        """Forget a message that is not tried again, and queue once more the deletes that it carried."""
        self.withdraw(outgoing.seq)
        for delete in outgoing.deletes:
            self.send_later(delete, now)

    def withdraw(self, seq: int) -> None:
        """Forget a message: it has arrived, or is given up."""
        kept = self._kept.pop(seq, None)
        if kept is not None and kept.retry_at != math.inf:
            self._retrying -= 1
        while self._first < self.next_seq and self._first not in self._kept:
            self._first += 1

    def failed(self, seq: int, now: float) -> None:
        """The channel refused the message: try again after a while."""
        kept = self._kept.get(seq)
        if kept is not None:
            if kept.retry_at == math.inf:
                self._retrying += 1
            kept.retry_at = now + min(_RETRY_FIRST * 2 ** (kept.tries - 1), _RETRY_MOST)

    def ping(self, now: float) -> Outgoing:
        """Ask for a sign of life, now."""
        self._pings += 1
        self._ping_sent = now
        return self.send(Ping(self._pings), (), now)

    # -- what comes in ------------------------------------------------------------------------

    def receive(self, envelope: Envelope, size: int, now: float) -> bool:
        """Take note of an envelope; whether its message is new and to be acted upon."""
        self._heard = now
        if self.standing is Standing.SUSPECT:
            self.standing = Standing.LIVE
        if self._kept and (envelope.ack >= self._first or envelope.more):
            self._acknowledged(envelope.ack, envelope.more)
        arrived, seq = self._arrived, envelope.seq
        if envelope.base > arrived.mark + 1:
            arrived.advance(envelope.base - 1)
        if not seq:
            return True
        if seq == arrived.mark + 1 and not arrived.above:
            arrived.mark = seq  # in order, as almost all come
        elif not arrived.add(seq):
            self.duplicates += 1
            self.ack_due = now
            return False
        self._ack_bytes += size
        if self._ack_bytes > _ACK_BYTES:
            self.ack_due = now
        elif self.ack_due > now + _ACK_DELAY:
            self.ack_due = now + _ACK_DELAY
        return True

    def _acknowledged(self, mark: int, more: Sequence[int]) -> None:
        """Forget the messages up to ``mark``, and those in ``more``: they have arrived."""
        kept, first, following = self._kept, self._first, self.next_seq
        while first < following and (first <= mark or first not in kept):
            gone = kept.pop(first, None)
            if gone is not None and gone.retry_at != math.inf:
                self._retrying -= 1
            first += 1
        self._first = first
        for seq in more:
            self.withdraw(seq)
        if not kept:
            self._ping_wait = PING_FIRST

    def ponged(self, pong: Pong, now: float) -> list[Action]:
        """What has not arrived although the ping behind it has, goes again."""
        self.doing, self.doing_at = pong.doing, now
        late = [kept for kept in self._kept.values() if kept.pings < pong.number]
        if late:
            self._ping_wait = PING_FIRST  # it listens: what was lost is not to wait for long again
        return [action for kept in late for action in self._again(kept, now)]

    def _again(self, kept: Outgoing, now: float) -> list[Action]:
        if kept.retry_at != math.inf:
            kept.retry_at = math.inf
            self._retrying -= 1
        if kept.tries > self._limits.retries:
            self.refused(kept, now)
            return [Undelivered(kept.message)]
        kept.tries += 1
        kept.sent_at = now
        kept.pings = self._pings
        self.resent += 1
        kept.frames[0] = self._envelope(kept.seq, kept.message, kept.back, kept.deletes)
        return [Transmit(kept)]

    # -- time ---------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """What is due at ``now``."""
        if self.standing is Standing.LOST:
            return []
        actions: list[Action] = []
        silent = now - self._heard
        if self._watch and silent >= self._limits.lost_after:
            self.standing = Standing.LOST
            return [Lost(silent)]
        if self._watch and silent >= self._limits.suspect_after and self.standing is Standing.LIVE:
            self.standing = Standing.SUSPECT
            actions.append(Suspect(silent))
        if self._retrying:
            due = [kept for kept in self._kept.values() if kept.retry_at <= now]
            for kept in due:
                actions += self._again(kept, now)
        if now >= self._ping_due():
            if self._kept:
                self._ping_wait = min(self._ping_wait * 2, _PING_MOST)
            actions.append(Transmit(self.ping(now)))
        if now >= self._deletes_due and (waiting := self.send_waiting(now)) is not None:
            actions.append(Transmit(waiting))
        if now >= self.ack_due:
            actions.append(Transmit(self.send(Nothing(), (), now)))
        return actions

    def _ping_due(self) -> float:
        due = math.inf
        if self._kept:
            due = max(self._kept[self._first].sent_at, self._ping_sent) + self._ping_wait
        if self._watch:
            due = min(due, max(self._heard, self._ping_sent) + self._limits.heartbeat)
        return due

    def next_tick(self) -> float:
        """When `tick` has something to do, if nothing happens before."""
        if self.standing is Standing.LOST:
            return math.inf
        due = min(self.ack_due, self._deletes_due, self._ping_due())
        if self._retrying:
            due = min(due, *(kept.retry_at for kept in self._kept.values()))
        if self._watch:
            patience = self._limits.suspect_after if self.standing is Standing.LIVE else self._limits.lost_after
            due = min(due, self._heard + patience)
        return due

    def lose(self) -> None:
        """The peer is gone: forget what was kept for it."""
        self.standing = Standing.LOST
        self._kept.clear()
        self._first = self.next_seq
        self._retrying = 0
        self._deletes.clear()
        self.ack_due = self._deletes_due = math.inf
