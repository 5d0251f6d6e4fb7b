"""The protocol with one other agent: each message that must arrive is handled once, in any order.

A message is not handled only if the peer is lost, or if the sender gives the message up after many tries.

Pure: messages and the time go in, frames to transmit come out. The life of a message that must arrive::

    send ──> kept ──┬── acknowledged ────────────────────────────────> forgotten
              ^     ├── the channel refuses it (`failed`) ──┐
              │     ├── a pong shows it missing (`ponged`) ──┤
              │     │                                        v
              └─────┼─────────────────────────────────── sent again (`_resend`)
                    └── sent 1 + `retries` times ──> `Undelivered` ──> forgotten

This is the `Standing` of a *watched* peer on another host. `lose` makes any peer LOST. Until then, a peer on this host,
or one that is not watched, is LIVE::

    LIVE ── silent for 5 s ──> SUSPECT ── silent for 12 s ──> LOST
     ^                            │
     └───── a message arrives ────┘

A message that must arrive gets a number, and the sender keeps it until it is acknowledged. An acknowledgement travels
inside the next message in the other direction, or alone after a moment. A `UserDelete`, for which no thread waits,
travels inside the next message that must arrive (`Peer.send_later`), or alone after a moment.

The sender does not send a message again only because time has passed. Its *ping* asks what has arrived. It sends a
message again if it sent the message before the ping and the answer does not acknowledge it, or if the channel refused
it. The receiver drops a message that it has received before. So a call runs at most once, even if the channel
loses, doubles and reorders messages.

Large messages travel over a link of their own, so that neither small messages nor heartbeats wait behind them. A small
message often arrives before a large one that was sent earlier. So each kind has its own `Peer`, with its own numbers,
acknowledgements and pings. Only the `Peer` of the small messages declares an agent lost after silence.

A watched peer gets a heartbeat after each second of silence, or earlier if `suspect_after` is short.
`nbdist.rpc.core.watching` says which peers are watched: in a large world only those that matter to this agent, and a
few more. A peer that gets no heartbeats need not speak, so its silence proves nothing. So silence counts only from the
call of `Peer.watch` on.

A peer on this host may be silent only because it is in a long call into C. So its silence does not count;
`nbdist.channel.process_watch` watches its process instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from nbdist.wire.messages import Envelope, Message, Nothing, Ping, Pong, UserDelete, encode_envelope
from nbdist.wire.tensors import Buffer

_ACK_DELAY = 0.05  # seconds for which an acknowledgement waits for a message that can carry it
# If more bytes than this are not acknowledged, the acknowledgement is sent at once, so the sender can free them.
_ACK_BYTES = 1 << 20
_DELETE_DELAY = 0.05  # seconds for which the delete of a fork waits for a message that can carry it
# The bytes of frames from which on a message is large. A connection of 10 MB/s takes 26 ms for so many bytes.
LARGE_BYTES = 1 << 18
PING_FIRST = 0.5  # seconds after which the first ping asks about a message; most messages are acknowledged earlier
_PING_MOST = 5.0  # the most seconds between two pings about unacknowledged messages; the time doubles up to this
# Of two agents, the one with the higher incarnation waits this many times as long before it sends a heartbeat. By then
# the other agent's heartbeat has arrived, which proves the same. With equal waits, both would often send one.
_HEARTBEAT_OF_THE_OTHER = 1.25
_HEARTBEATS_BEFORE_SUSPECT = 3  # about how many heartbeats, or more, a peer leaves unanswered before it is suspected
# Seconds after which a message that the channel refused is tried again; doubled with each try, to `_RETRY_MOST`.
_RETRY_FIRST = 0.05
_RETRY_MOST = 2.0
_MOST_NUMBERS_ABOVE_MARK = 64  # the most numbers above the mark (see `SeqSet`) that one envelope acknowledges


@dataclass(frozen=True)
class PeerLimits:
    """The limits at which a peer is given up. ``retries`` counts repeats of a message; the others are in seconds."""

    suspect_after: float = 5.0  # seconds of silence after which a peer on another host is suspect
    lost_after: float = 12.0  # seconds of silence after which it is lost
    heartbeat: float = 1.0  # seconds of silence after which one of two agents pings the other, at most (`_heartbeat`)
    retries: int = 20


class Standing(Enum):
    """Says whether a peer is believed to be alive."""

    LIVE = "live"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(eq=False, repr=False, slots=True)
class Outgoing:
    """A message ready for the channel. ``seq`` is its number, and 0 for a message that need not arrive."""

    seq: int
    message: Message
    frames: list[Buffer]  # the envelope and the frames after it
    back: list[tuple[int, int]]  # the blocks of the receiver's arena that the message gives back
    deletes: list[UserDelete]  # the deletes that the message carries
    holds: Any  # kept alive as long as this object, that is, until the message has arrived
    sent_at: float
    pings: int  # the number of pings that were sent before the message
    tries: int = 1  # the number of times that the message was given to the channel
    # The moment at which to try again after the channel refused the message; infinite otherwise.
    retry_at: float = math.inf


class Transmit(NamedTuple):
    """Instruction: give this message to the channel."""

    outgoing: Outgoing


class Suspect(NamedTuple):
    """Notice: the peer has been silent for ``silent`` seconds."""

    silent: float


class Lost(NamedTuple):
    """Notice: the peer has been silent for too long, and is lost."""

    silent: float


class Undelivered(NamedTuple):
    """Notice: a message was tried as often as allowed, and is given up."""

    message: Message


Action = Transmit | Suspect | Lost | Undelivered


class SeqSet:
    """A growing set of numbers from 1 on. It has all numbers up to the *mark*, and a few above it."""

    def __init__(self) -> None:
        self.mark = 0
        self.above: set[int] = set()

    def add(self, number: int) -> bool:
        """Add ``number``; return whether it was new."""
        if number == self.mark + 1 and not self.above:
            self.mark = number
            return True
        if number <= self.mark or number in self.above:
            return False
        self.above.add(number)
        self._settle()
        return True

    def advance(self, mark: int) -> None:
        """Add all numbers up to ``mark``. A mark lower than the current one changes nothing."""
        if mark > self.mark:
            self.mark = mark
            self.above = {number for number in self.above if number > mark}
            self._settle()

    def _settle(self) -> None:
        while self.mark + 1 in self.above:
            self.mark += 1
            self.above.discard(self.mark)


class Peer:
    """The state of the protocol with one other agent, for its small or its large messages.

    Not thread-safe: the caller holds `Links._lock`. ``now`` is in seconds of one monotonic clock, and so are all
    moments that methods return. A message that a method returns as `Outgoing` is for the channel.
    """

    def __init__(
        self, me: int, other: int, limits: PeerLimits, now: float, *, watch_silence: bool, is_large: bool = False
    ) -> None:
        """Begin with nothing sent or received between the agents ``me`` and ``other``, which are incarnations.

        ``watch_silence`` is True for a peer on another host: silence makes it suspect and then lost. Such a peer is
        watched at first. ``is_large`` is True for the large messages.
        """
        self.is_large = is_large  # True for the large messages
        self.standing = Standing.LIVE  # LIVE until silence or `lose` changes it; a LOST peer stays lost
        self.doing = ""  # a short text about what the peer was running, from its last pong
        self.doing_at = -math.inf  # the moment of that pong
        # The digests of the definitions of our ``__main__`` that the peer is known to have.
        self.definitions: set[str] = set()
        self.lacking: set[str] = set()  # the digests of the definitions that the peer has reported as missing
        self.duplicates = 0  # the number of messages that were dropped because they had been received before
        self.resent = 0  # the number of times that a message was sent again
        self._me = me
        self._other = other
        self._limits = limits
        self._may_watch = watch_silence  # True for a peer on another host, which `watch` may watch
        self.is_watched = watch_silence  # True while the peer is watched: it gets heartbeats, and its silence counts
        # The moment from which the peer's silence counts. Before it, the peer had no reason to speak.
        self._watched_since = now
        self._doubted = -math.inf  # the moment at which another agent last reported that it does not hear the peer
        every = min(limits.heartbeat, limits.suspect_after / _HEARTBEATS_BEFORE_SUSPECT)
        # Seconds of silence after which the peer gets a heartbeat, if it is watched.
        self._heartbeat = every * (_HEARTBEAT_OF_THE_OTHER if me > other else 1.0)
        self._heard = now  # the moment at which anything last arrived from the peer
        self.next_seq = 1  # the number of the next message that must arrive
        self._first = 1  # the lowest kept number, or the next one: finding it in a dict with a deleted front is slow
        self._kept: dict[int, Outgoing] = {}  # the messages that are sent and not acknowledged, by number
        self.arrived = SeqSet()  # the numbers of the peer's messages that have arrived
        self.ack_due = math.inf  # the moment at which an acknowledgement must be sent alone; infinite if none is due
        self._ack_bytes = 0  # bytes of messages that have arrived and are not acknowledged yet
        self._deletes: list[UserDelete] = []  # the deletes that wait for a message that can carry them
        self._deletes_due = math.inf  # the moment at which these deletes are sent alone
        self._pings = 0  # the number of pings sent
        self._ping_sent = -math.inf  # the moment of the last ping
        self._ping_wait = PING_FIRST  # seconds from the last ping, or the oldest message, to the next ping
        self._to_retry: set[int] = set()  # the numbers of the kept messages that the channel refused

    @property
    def outstanding(self) -> int:
        """The number of messages that the peer has not acknowledged. Queued deletes count."""
        return len(self._kept) + len(self._deletes)

    def silent_for(self, now: float) -> float:
        """Return the seconds since anything was received from the peer."""
        return now - self._heard

    def is_unacknowledged(self, seq: int) -> bool:
        """Return whether message ``seq`` is kept: not known to have arrived, and not given up."""
        return seq in self._kept

    def keeps(self, message: Message) -> bool:
        """Return whether a message that must arrive is kept: it is not known to have arrived, and not given up."""
        return any(kept.message is message for kept in self._kept.values())

    # -- watching -----------------------------------------------------------------------------

    def watch(self, since: float) -> None:
        """Send heartbeats to a peer on another host, and count its silence from the moment ``since`` on."""
        if self._may_watch and not self.is_watched:
            self.is_watched = True
            self._watched_since = since

    def rest(self) -> None:
        """Stop watching the peer, unless it is suspect, or nothing has arrived from it since `doubt`."""
        if self.standing is Standing.LIVE and self._heard >= self._doubted:
            self.is_watched = False

    def doubt(self, silent: float, now: float) -> None:
        """Watch the peer until something arrives from it: another agent has not heard it for ``silent`` seconds."""
        self.watch(now - silent)
        # That silence counts for this agent, too, unless it has heard the peer meanwhile.
        self._watched_since = min(self._watched_since, now - silent)
        self._doubted = now

    # -- sending ------------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        frames: Sequence[Buffer],
        now: float,
        holds: Any = None,
        back: list[tuple[int, int]] | None = None,
    ) -> Outgoing:
        """Return a message for the channel; keep it, with a number, if it must arrive.

        ``holds`` is kept alive until the message has arrived or is given up. ``back`` has blocks of the peer's shared
        memory, by segment and offset; only a message that must arrive may give some back.
        """
        seq = self.next_seq if message.must_arrive else 0
        if back is None:
            back = []
        deletes = self._deletes if seq and self._deletes else []
        first = self._envelope(seq, message, back, deletes)
        outgoing = Outgoing(seq, message, [first, *frames], back, deletes, holds, now, self._pings)
        if seq:
            # Last, and in this order, so that no number is without a message. Ctrl-C before this leaves the peer as it
            # was, except that an acknowledgement may be lost; the other agent's next ping asks for it.
            self._kept[seq] = outgoing
            self.next_seq = seq + 1
            if deletes:
                self._deletes, self._deletes_due = [], math.inf
        return outgoing

    def send_later(self, message: UserDelete, now: float) -> float:
        """Queue a delete for the next message that must arrive; return the moment at which `tick` sends it alone."""
        self._deletes.append(message)
        self._deletes_due = min(self._deletes_due, now + _DELETE_DELAY)
        return self._deletes_due

    def send_waiting(self, now: float) -> Outgoing | None:
        """Return a message that carries all queued deletes; None if there are none."""
        if not self._deletes:
            self._deletes_due = math.inf
            return None
        last = self._deletes.pop()
        try:
            outgoing = self.send(last, (), now)  # this message carries the other deletes
        except BaseException:  # Ctrl-C: the delete must still arrive
            self._deletes.append(last)
            raise
        self._deletes_due = math.inf
        return outgoing

    def _envelope(self, seq: int, message: Message, back: list[tuple[int, int]], deletes: list[UserDelete]) -> bytes:
        """Return the encoded envelope of a message, which also acknowledges what has arrived from the peer."""
        arrived = self.arrived
        more = sorted(arrived.above)[:_MOST_NUMBERS_ABOVE_MARK] if arrived.above else []
        self.ack_due = math.inf
        self._ack_bytes = 0
        return encode_envelope(
            Envelope(self._me, self._other, seq, self._first, arrived.mark, more, message, back, deletes, self.is_large)
        )

    def refused(self, outgoing: Outgoing, now: float) -> None:
        """Forget a message that will not be sent again, but not the deletes that it carried: these must arrive."""
        self.withdraw(outgoing.seq)
        for delete in outgoing.deletes:
            self.send_later(delete, now)

    def withdraw(self, seq: int) -> None:
        """Forget message ``seq``, which has arrived or is given up, and free its ``holds``."""
        self._kept.pop(seq, None)
        self._to_retry.discard(seq)
        while self._first < self.next_seq and self._first not in self._kept:
            self._first += 1

    def failed(self, seq: int, now: float) -> None:
        """Record that the channel refused message ``seq``: `tick` will try it again later, if it must arrive."""
        if (kept := self._kept.get(seq)) is not None:
            self._to_retry.add(seq)
            kept.retry_at = now + min(_RETRY_FIRST * 2 ** (kept.tries - 1), _RETRY_MOST)

    def ping(self, now: float) -> Outgoing:
        """Return a ping, to be passed to the channel: it asks whether the peer is alive and what has arrived."""
        self._pings += 1
        self._ping_sent = now
        return self.send(Ping(self._pings, self.is_large), (), now)

    # -- receiving ----------------------------------------------------------------------------

    def receive(self, envelope: Envelope, size: int, now: float) -> bool:
        """Process an envelope that has arrived; return whether its message is new and must be handled.

        A message that need not arrive has no number and always counts as new. ``size`` is the message's size in bytes.
        """
        self._heard = now  # what `heard` does, without the cost of a call for each message
        if self.standing is Standing.SUSPECT:
            self.standing = Standing.LIVE
        if self._kept and (envelope.ack >= self._first or envelope.more):
            self._forget_arrived(envelope.ack, envelope.more)
        arrived, seq = self.arrived, envelope.seq
        # The sender has given these messages up. Do not wait for them.
        if envelope.base > arrived.mark + 1:
            arrived.advance(envelope.base - 1)
        if not seq:
            return True
        if seq == arrived.mark + 1 and not arrived.above:
            arrived.mark = seq  # in order, as almost all messages are
        elif not arrived.add(seq):
            self.duplicates += 1
            # At once: the sender repeats what it has not seen acknowledged.
            self.ack_due = now
            return False
        self._ack_bytes += size
        if self._ack_bytes > _ACK_BYTES:
            self.ack_due = now
        elif self.ack_due > now + _ACK_DELAY:
            self.ack_due = now + _ACK_DELAY
        return True

    def heard(self, now: float) -> None:
        """Record that something arrived from the peer that did not go through `receive` of this object."""
        self._heard = now
        if self.standing is Standing.SUSPECT:
            self.standing = Standing.LIVE

    def _forget_arrived(self, mark: int, more: Sequence[int]) -> None:
        kept, to_retry, first, following = self._kept, self._to_retry, self._first, self.next_seq
        while first < following and (first <= mark or first not in kept):
            kept.pop(first, None)
            to_retry.discard(first)
            first += 1
        self._first = first
        for seq in more:
            self.withdraw(seq)
        if not kept:
            self._ping_wait = PING_FIRST

    def ponged(self, pong: Pong, now: float) -> list[Action]:
        """Process a pong; return what to do with the messages that it shows to be late.

        A message is late if it was last sent before the ping and is not known to have arrived. Pass the pong's envelope
        to `receive` first, which applies its acknowledgements.
        """
        self.doing, self.doing_at = pong.doing, now
        late = [kept for kept in self._kept.values() if kept.pings < pong.number]
        if late:
            self._ping_wait = PING_FIRST  # the peer is alive: lost messages should not wait long for the next ping
        return [self._resend(kept, now) for kept in late]

    def _resend(self, kept: Outgoing, now: float) -> Action:
        """Return the action for a kept message: send it again, or give it up after too many tries."""
        self._to_retry.discard(kept.seq)
        kept.retry_at = math.inf
        if kept.tries > self._limits.retries:
            self.refused(kept, now)
            return Undelivered(kept.message)
        kept.tries += 1
        kept.sent_at = now
        kept.pings = self._pings
        self.resent += 1
        # The same number, by which the receiver recognises the message, but current acknowledgements.
        kept.frames[0] = self._envelope(kept.seq, kept.message, kept.back, kept.deletes)
        return Transmit(kept)

    # -- the clock ----------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Return what is due at ``now``: messages to transmit, messages that are given up, and notices about the peer.

        `Lost` is returned once, and alone: nothing is due for a lost peer.
        """
        if self.standing is Standing.LOST:
            return []
        actions: list[Action] = []
        silent = now - max(self._heard, self._watched_since)
        if self.is_watched and silent >= self._limits.lost_after:
            self.standing = Standing.LOST
            return [Lost(silent)]
        if self.is_watched and silent >= self._limits.suspect_after and self.standing is Standing.LIVE:
            self.standing = Standing.SUSPECT
            actions.append(Suspect(silent))
        if self._to_retry:
            due = [kept for kept in self._kept.values() if kept.retry_at <= now]
            actions += [self._resend(kept, now) for kept in due]
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
        """Return when to ping next: about the oldest unacknowledged message, or as a heartbeat."""
        due = math.inf
        if self._kept:
            due = max(self._kept[self._first].sent_at, self._ping_sent) + self._ping_wait
        if self.is_watched:
            due = min(due, max(self._heard, self._ping_sent) + self._heartbeat)
        return due

    def next_tick(self) -> float:
        """Return the moment at which `tick` has something to do if nothing happens before, or infinity."""
        if self.standing is Standing.LOST:
            return math.inf
        due = min(self.ack_due, self._deletes_due, self._ping_due())
        if self._to_retry:
            due = min(due, *(kept.retry_at for kept in self._kept.values()))
        if self.is_watched:
            patience = self._limits.suspect_after if self.standing is Standing.LIVE else self._limits.lost_after
            due = min(due, max(self._heard, self._watched_since) + patience)
        return due

    def lose(self) -> None:
        """Mark the peer as lost, and forget everything that was kept for it. No tick does anything afterwards."""
        self.standing = Standing.LOST
        self._kept.clear()
        self._first = self.next_seq
        self._to_retry.clear()
        self._deletes.clear()
        self.ack_due = self._deletes_due = math.inf
