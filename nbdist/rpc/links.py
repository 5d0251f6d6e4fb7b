"""The connections of an agent to the others: what is sent over them, and the clock by which they are kept up.

A connection joins what the protocol knows of another agent (`nbdist.wire.peer`, which is pure) with the way
there. Many threads send, so the lock is here; and the time at which some connection wants something done is
here, because whoever sends may have to move it forward under a reader that sleeps.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nbdist import trace
from nbdist.channel.contract import Buffer, Channel, ChannelError, Link
from nbdist.errors import NbdistError, WorkerLost
from nbdist.finalisers import this_thread
from nbdist.rpc.calls import Pending, PendingCalls
from nbdist.rpc.membership import Membership
from nbdist.rpc.sharing import Sharing
from nbdist.signals import Deferral
from nbdist.wire.messages import (
    Call,
    Envelope,
    Goodbye,
    Message,
    Pong,
    Record,
    Refused,
    UserDelete,
    encode_envelope,
)
from nbdist.wire.peer import PING_FIRST, Lost, Outgoing, Peer, PeerLimits, Suspect, Transmit, Undelivered
from nbdist.wire.tensors import Slot

__all__ = ["Connection", "Links"]

_SLEEP = 0.2
"""The reader looks at the clock that often even if nothing comes, so that most senders need not wake it."""

_FILES = ("unix://", "ipc://")
"""How addresses begin that are files, which on another host are not there, or are somebody else's."""

_log = logging.getLogger("nbdist.rpc")


class Held(Protocol):
    """An object that a message keeps alive until it has arrived, such as the references in its arguments."""

    is_sent: bool
    """Whether the message may reach its receiver. `Links.post` sets it before it sends."""

    def take_back(self) -> None:
        """Undo what was done for the message, unless it may go out."""


@dataclass
class Connection:
    """What is known of another agent, and the way to it."""

    record: Record
    peer: Peer
    link: Link
    sent: int = 0
    """Bytes that have gone there, those in shared memory included."""


class Links:
    """The connections of one agent, by the other's incarnation; one of them leads to itself."""

    def __init__(
        self,
        channel: Channel,
        limits: PeerLimits,
        membership: Membership,
        pending: PendingCalls,
        sharing: Sharing,
        *,
        watch: Callable[[int, int], None],
        on_undelivered: Callable[[Call], None],
    ) -> None:
        """Make the table, without any connection.

        ``watch(pid, started)`` is to have the process of a member of this host watched, and ``on_undelivered(call)``
        is told of a call that was not taken in all tries.
        """
        self.connections: dict[int, Connection] = {}
        self.closed = False
        self.due = math.inf
        self._asleep_until = 0.0
        self._sent_to_gone = 0
        """The number of messages that had to arrive and were sent to agents which are gone now."""
        self._channel = channel
        self._limits = limits
        self._membership = membership
        self._me = membership.me
        self._pending = pending
        self._sharing = sharing
        self._watch = watch
        self._on_undelivered = on_undelivered
        self._lock = threading.Lock()

    # -- coming and going ---------------------------------------------------------------------

    def connect(self, record: Record) -> None:
        """Know another agent, and the way to it."""
        with self._lock:
            if record.incarnation in self.connections or self.closed:
                return
            local = record.host == self._me.host
            now = time.monotonic()
            peer = Peer(self._me.incarnation, record.incarnation, self._limits, now, watch_silence=not local)
            addresses = [a for a in record.addresses if local or not a.startswith(_FILES)]
            self.connections[record.incarnation] = Connection(record, peer, self._channel.connect(addresses))
        if local and record.pid != os.getpid():
            self._watch(record.pid, record.started)
        self.hurry(peer.next_tick())

    def disconnect(self, incarnation: int) -> None:
        """Forget an agent that never became a member."""
        with self._lock:
            connection = self._remove(incarnation)
        if connection is not None:
            connection.link.close(at_once=True)

    def lose(self, incarnation: int) -> Connection | None:
        """Give up an agent that is gone; its connection, unless that has been done before."""
        with self._lock:
            connection = self._remove(incarnation)
            if connection is None or self.closed:
                return None
            connection.peer.lose()
        return connection

    def _remove(self, incarnation: int) -> Connection | None:
        connection = self.connections.pop(incarnation, None)
        if connection is not None:
            self._sent_to_gone += connection.peer.next_seq - 1
        return connection

    def close(self, goodbye: Goodbye | None) -> bool:
        """Let nothing more out, but for a goodbye to the others; whether that had not been done before."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            connections = list(self.connections.values())
        if goodbye is not None:
            for connection in connections:
                if connection.record is not self._me:
                    with contextlib.suppress(NbdistError):
                        self._transmit(connection, connection.peer.send(goodbye, (), time.monotonic()))
        return True

    # -- sending ------------------------------------------------------------------------------

    def post(
        self,
        to: int,
        message: Message,
        frames: Sequence[Buffer] = (),
        holds: Held | None = None,
        slots: Sequence[Slot] = (),
    ) -> int:
        """Send a message; return its number, by which the peer knows whether it has arrived.

        ``holds`` lives until it has; ``slots`` are what it refers to in shared memory. A call that the channel
        refuses raises ChannelError; anything else that must arrive is tried again. Wherever this raises and the
        message certainly does not go out, ``holds`` and ``slots`` are taken back. After Ctrl-C it may yet go out.
        """
        was_closed = this_thread.is_closed
        try:
            this_thread.is_closed = True
            now = time.monotonic()
            sharing = self._sharing
            back: list[tuple[int, int]] | None = None
            try:
                if (sharing.ended or sharing.owing) and message.gives_back:
                    with Deferral():
                        back = sharing.owed(to)
                with self._lock:
                    connection = self.connections.get(to)
                    if connection is None or self.closed:
                        raise self._no_connection(to)
                    if holds is not None:
                        holds.is_sent = True
                    for slot in slots:
                        slot.send()  # before it can be seen, and before the receiver can be given up
                        connection.sent += slot.place.length
                    outgoing = connection.peer.send(message, frames, now, holds, back)
                    connection.sent += sum(map(len, outgoing.frames))
            except BaseException:  # the receiver is gone, or Ctrl-C
                if not self._keeps(to, message):
                    self._take_back(to, holds, slots, back)
                raise
            try:
                connection.link.send(outgoing.frames, message.kind)
            except ChannelError:
                if isinstance(message, Call):
                    with self._lock:
                        connection.peer.refused(outgoing, now)
                        due = connection.peer.next_tick()
                    self.hurry(due)
                    self._take_back(to, holds, slots, back)
                    if self.closed or self.connections.get(to) is None:
                        raise self._no_connection(to) from None  # it was lost in between
                    raise
                self.hurry(self._postpone(connection, outgoing))
            finally:  # also after Ctrl-C: the peer keeps the message, and will see that it has not arrived
                if now + PING_FIRST < self.due:
                    self.hurry(now + PING_FIRST)
            return outgoing.seq
        finally:
            this_thread.is_closed = was_closed

    def note_call(self, call: Pending) -> None:
        """Note that a call has gone out: its callee is to be asked for news when half of its time is over."""
        if call.timeout > 0 and call.started + call.timeout * 0.5 < self.due:
            self.hurry(call.started + call.timeout * 0.5)
        if trace.listeners:
            trace.emit("call.sent", agent=self._me.name, to=call.worker, function=call.function, id=call.id)

    def _keeps(self, to: int, message: Message) -> bool:
        """Return whether the peer of agent ``to`` keeps a message: it has gone out, or will be sent again."""
        with self._lock:
            connection = self.connections.get(to)
            return connection is not None and connection.peer.keeps(message)

    def _take_back(
        self, to: int, holds: Held | None, slots: Sequence[Slot], back: list[tuple[int, int]] | None
    ) -> None:
        """Undo what has been done for a message that certainly does not go out."""
        if holds is not None:
            holds.is_sent = False
            holds.take_back()
        for slot in slots:
            slot.take_back()
        if back and to in self.connections and not self.closed:  # who is gone has no use for them
            self._sharing.owe(to, back)

    def post_later(self, to: int, message: UserDelete) -> None:
        """Queue a delete for the next message to that agent; if none goes, it goes after 50 ms, or 0.25 s at most."""
        with self._lock:
            connection = self.connections.get(to)
            if connection is None or self.closed:
                raise self._no_connection(to)
            due = connection.peer.send_later(message, time.monotonic())
        self.note(due)

    def post_waiting(self) -> None:
        """Send now what `post_later` has queued."""
        now = time.monotonic()
        with self._lock:
            waiting = [(each, each.peer.send_waiting(now)) for each in self.connections.values()]
        for connection, outgoing in waiting:
            if outgoing is not None:
                self._transmit(connection, outgoing)

    def _no_connection(self, to: int) -> NbdistError:
        if self.closed:
            return WorkerLost(f"{self._me.name} has ended")
        membership = self._membership
        name = membership.name_of(to)
        otherwise = "is gone; a new worker has taken its name" if membership.is_gone(to) else "is not connected"
        return WorkerLost(f"{name} {membership.why_gone(name) or otherwise}")

    def _transmit(self, connection: Connection, outgoing: Outgoing) -> None:
        """Send what the peer wants sent; if the channel refuses it, the peer will want it again."""
        try:
            connection.link.send(outgoing.frames, outgoing.message.kind)
        except ChannelError:
            self._postpone(connection, outgoing)

    def _postpone(self, connection: Connection, outgoing: Outgoing) -> float:
        """The channel did not take a message; when the clock must be looked at for that."""
        with self._lock:
            connection.peer.failed(outgoing.seq, time.monotonic())
            return connection.peer.next_tick()

    def refuse(self, record: Record, refused: Refused) -> None:
        """Tell an agent, member or not, that its message was not taken."""
        answer = Envelope(self._me.incarnation, record.incarnation, 0, 1, 0, [], refused)
        with contextlib.suppress(ChannelError):
            link = self._channel.connect(record.addresses)
            link.send([encode_envelope(answer)], "refused")
            link.close()

    # -- for the thread that reads ------------------------------------------------------------

    def nap(self, now: float, timeout: float | None) -> float:
        """Return for how many seconds the reader may wait for a message before it must look at the clock."""
        # Announce the nap before measuring it: who moves `due` forward then sees that it must wake us.
        self._asleep_until = now + _SLEEP
        wait = self.due - now
        if not 0.0 <= wait <= _SLEEP:
            wait = _SLEEP if wait > 0.0 else 0.0
        return wait if timeout is None or wait < timeout else timeout

    def accept(self, connection: Connection, envelope: Envelope, size: int) -> bool:
        """Take note of an envelope; whether its message is new and to be acted upon."""
        with self._lock:
            fresh = connection.peer.receive(envelope, size, time.monotonic())
            due = connection.peer.ack_due
        if due < self.due:
            self.due = due  # this is the reader, which need not be woken
        return fresh

    def tick(self, now: float) -> list[tuple[int, str]]:
        """Do what is due; the agents that have been silent for too long, and the words for it."""
        lost: list[tuple[int, str]] = []
        transmit: list[tuple[Connection, Outgoing]] = []
        with self._lock:
            for incarnation, connection in self.connections.items():
                for action in connection.peer.tick(now):
                    if isinstance(action, Transmit):
                        transmit.append((connection, action.outgoing))
                    elif isinstance(action, Lost):
                        lost.append((incarnation, f"has been silent for {action.silent:.1f} s"))
                    elif isinstance(action, Suspect):
                        name = connection.record.name
                        _log.warning("%s has been silent for %.1f s; calls to it wait", name, action.silent)
                        trace.emit("peer.suspect", name=name, silent=action.silent)
                    elif isinstance(action, Undelivered):
                        self._gave_up(connection, action.message)
        for connection, outgoing in transmit:
            self._transmit(connection, outgoing)
        return lost

    def set_clock(self) -> None:
        """After a `tick`: find out when something is due next."""
        with self._lock:
            due = min((connection.peer.next_tick() for connection in self.connections.values()), default=math.inf)
            self.due = min(due, self._pending.next_due())
        self.hurry(self.due)  # this thread may get something to run, and another be asleep

    def note(self, due: float) -> None:
        """Have the clock looked at by then; for the thread that reads, which need not be woken."""
        if due < self.due:
            self.due = due

    def hurry(self, due: float) -> None:
        """Have the clock looked at by then."""
        if due < self.due:
            self.due = due
        if due < self._asleep_until:
            self._channel.wake()

    def _gave_up(self, connection: Connection, message: Message) -> None:
        _log.error(
            "%s did not take a %s message in %d tries; it is given up",
            connection.record.name,
            message.kind,
            self._limits.retries,
        )
        self._sharing.undelivered(connection.record.incarnation, message)
        if isinstance(message, Call):
            self._on_undelivered(message)

    def on_pong(self, message: Pong, sender: int, _: list[bytes]) -> None:
        """Note what another agent says it is doing."""
        connection = self.connections.get(sender)
        if connection is None:
            return  # it is gone
        with self._lock:
            actions = connection.peer.ponged(message, time.monotonic())
            due = connection.peer.next_tick()
        self.note(due)
        for action in actions:
            if isinstance(action, Transmit):
                self._transmit(connection, action.outgoing)
            elif isinstance(action, Undelivered):
                self._gave_up(connection, action.message)

    # -- what is known ------------------------------------------------------------------------

    def ask(self, to: int) -> None:
        """Ask an agent what it is doing; `status` knows when it has answered."""
        with self._lock:
            connection = self.connections.get(to)
            outgoing = connection.peer.ping(time.monotonic()) if connection else None
        if connection and outgoing:
            self._transmit(connection, outgoing)

    def status(self, to: int, seq: int) -> str:
        """What is known of a call's fate: whether it arrived, and what its worker was doing."""
        with self._lock:
            connection = self.connections.get(to)
            if connection is None:
                return "it is gone"
            peer, now = connection.peer, time.monotonic()
            if peer.is_unacknowledged(seq):
                return f"it has not acknowledged the call; nothing was heard of it for {peer.silent_for(now):.1f} s"
            if peer.doing and now - peer.doing_at < 60:
                return f"{now - peer.doing_at:.1f} s before, it was running {peer.doing}"
        return "it has acknowledged the call"

    def peer(self, incarnation: int) -> Peer | None:
        """The protocol state with one agent."""
        connection = self.connections.get(incarnation)
        return connection.peer if connection is not None else None

    def peers(self) -> list[Peer]:
        """The protocol state with each agent."""
        return [connection.peer for connection in list(self.connections.values())]

    def connected(self, incarnation: int) -> Record | None:
        """The record of an agent that this one talks to, member or not yet."""
        connection = self.connections.get(incarnation)
        return connection.record if connection is not None else None

    def sent(self) -> dict[str, int]:
        """How many bytes have been sent to whom."""
        return {each.record.name: each.sent for each in list(self.connections.values())}

    def traffic(self) -> tuple[int, int]:
        """Return how many messages that must arrive have been sent so far, and how many are not acknowledged.

        The first number never falls: it counts those to agents that are gone, too.
        """
        with self._lock:
            peers = [connection.peer for connection in self.connections.values()]
            sent = self._sent_to_gone + sum(peer.next_seq - 1 for peer in peers)
            return sent, sum(peer.outstanding for peer in peers)

    def outstanding(self) -> int:
        """Return how many messages are not acknowledged."""
        return self.traffic()[1]
