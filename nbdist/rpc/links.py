"""The connections of an agent to the others, and the clock that says when one of them needs attention.

A `Connection` has two protocol states about another agent (`nbdist.wire.peer`, which is pure) and two links of the
channel to it: one state and one link for messages of 256 KiB or more, and one of each for all others. So no small
message waits behind a large one. Many threads send, so the lock is here. The clock is here, too: if a thread that sends
makes something due earlier, it may have to wake the sleeping reader.

The *reader* is the thread of the agent that waits for messages (`nbdist.rpc.pool`). A *tick* is one look of the
reader at all connections, in which it does what is due.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from nbdist import trace
from nbdist.amounts import duration
from nbdist.channel.contract import Buffer, Channel, ChannelError, Link, TooManyFiles
from nbdist.errors import NbdistError, WorkerLost
from nbdist.finalisers import this_thread
from nbdist.rpc import devices
from nbdist.rpc.core.members import Membership, lost_error
from nbdist.rpc.core.pending import Pending, PendingCalls
from nbdist.rpc.core.watching import ALL_WATCH_ALL, watched_by
from nbdist.rpc.shared_tensors import Sharing
from nbdist.signals import DeferredSignals
from nbdist.wire.devices import Devices
from nbdist.wire.messages import (
    Call,
    Envelope,
    Goodbye,
    Message,
    Ping,
    Pong,
    Record,
    Refused,
    UserDelete,
    encode_envelope,
)
from nbdist.wire.peer import LARGE_BYTES, PING_FIRST, Lost, Outgoing, Peer, PeerLimits, Suspect, Transmit, Undelivered
from nbdist.wire.tensors import Slot

# Seconds after which a reader looks at the clock even if nothing comes. So most senders need not wake the reader.
_LONGEST_NAP_SECONDS = 0.2

# The shortest time between two ticks, in seconds for each connection. A tick takes 2 to 5 µs for each, so ticks take at
# most a tenth of a core: an agent with 20 connections pauses for 1 ms, one with 1,000 for 50 ms, and acknowledgements,
# pings and repetitions are late by up to that time. Without the pause, the heartbeats of 1,000 connections, due at
# 1,000 moments of each second, would take more than one core.
_PAUSE_PER_CONNECTION = 5e-5

# Seconds after which an agent of a large world chooses again which members it watches, as it has made calls since.
_CHOOSE_EVERY = PING_FIRST

# Addresses that are files: on another host, the file does not exist, or belongs to another agent.
_FILE_SCHEMES = ("unix://", "ipc://")

_log = logging.getLogger("nbdist.rpc")


class HeldByLinks(Protocol):
    """An object that a message keeps alive until it has arrived, such as the references in its arguments."""

    is_sent: bool
    """True once the message may reach its receiver. `Links.post` sets it before it sends."""

    def take_back(self) -> None:
        """Undo what was done for the message, such as its forks, unless `is_sent` is True. Harmless a second time."""


@dataclass
class Connection:
    """Another agent as this one knows it: its record, the protocol states, and the links to it."""

    record: Record
    addresses: list[str]  # those that this agent can reach
    peer: Peer  # the protocol state of all messages but the large ones
    link: Link
    calls: Devices  # its devices for the arguments of calls to it
    results: Devices  # its devices for the results of its calls
    sent: int = 0  # bytes, those in shared memory included
    large_peer: Peer | None = None  # for large messages; None before the first one
    large_link: Link | None = None  # None before the first large message is sent

    @property
    def peers(self) -> list[Peer]:
        """The protocol states: that of small messages, and that of large ones if there was one."""
        return [self.peer] if self.large_peer is None else [self.peer, self.large_peer]

    def next_tick(self) -> float:
        """Return the first moment at which `Peer.tick` of one of the states has something to do."""
        due = self.peer.next_tick()
        return due if self.large_peer is None else min(due, self.large_peer.next_tick())

    def close(self) -> None:
        """Close the links at once. A second call does nothing."""
        for link in (self.link, self.large_link):
            if link is not None:
                link.close(at_once=True)


def try_post(links: Links, to: int, message: Message) -> None:
    """Send a message as `Links.post` does; if the receiver is gone, drop it."""
    with contextlib.suppress(NbdistError):
        links.post(to, message)


@dataclass(eq=False, repr=False)
class Links:
    """The connections of one agent, by the other agent's incarnation. One of them leads to the agent itself.

    Any thread may call its methods, except `nap`, `accept`, `tick` and `set_clock`: only the reading thread calls them,
    the last three under `Agent._turn`. Moments, such as ``now`` and ``due``, are as of `time.monotonic`.
    """

    _channel: Channel
    _limits: PeerLimits
    _membership: Membership
    _pending: PendingCalls
    _sharing: Sharing
    _watch: Callable[[int, int], None]  # watches a process of this host, by its pid and start
    _on_undelivered: Callable[[Call], None]  # takes a call that was not acknowledged after all tries
    connections: dict[int, Connection] = field(default_factory=dict)
    """Changed under the lock; a lookup needs none."""
    closed: bool = False
    due: float = math.inf
    """The moment at which some connection or call needs attention."""
    _ticked: float = -math.inf  # the moment of the last tick
    _asleep_until: float = 0.0  # until then, a reader may sleep without looking at `due`
    _sent_to_gone: int = 0  # the messages that had to arrive and were sent to agents that are gone now
    meets_all: bool = True
    """True if all members connect to each other. False if one agent connects to all, and the others only to it."""
    _chooses: bool = False  # True if this agent watches only some members, because the world is large
    _is_large: bool = False  # True if the world was large when `_ring` was computed
    # The members that this agent watches for the others; empty in a small world.
    _ring: set[int] = field(default_factory=set)
    _is_stale: bool = True  # True if `_ring` must be computed again: an agent was connected or lost
    # The members that a block of `attend` watches, with the number of blocks.
    _attended: Counter[int] = field(default_factory=Counter)
    _doubted_all: float = -math.inf  # the moment of the last `doubt_all`
    # Guards `connections` and the `Peer` of each. Held for short steps only, never while something is sent.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._me = self._membership.me

    # -- connecting and disconnecting ---------------------------------------------------------

    def connect(self, record: Record) -> None:
        """Connect to another agent. A second call for the same incarnation and a call after `close` do nothing."""
        with self._lock:
            if record.incarnation in self.connections or self.closed:
                return
            local = record.host == self._me.host
            now = time.monotonic()
            # A member of this host is lost when its process ends, never by its silence: it may be stopped
            # (test_a_stopped_local_process_is_not_lost).
            peer = Peer(self._me.incarnation, record.incarnation, self._limits, now, watch_silence=not local)
            addresses = [a for a in record.addresses if local or not a.startswith(_FILE_SCHEMES)]
            calls, results = devices.for_call(self._me, record), devices.for_result(self._me, record)
            link = self._channel.connect(addresses)
            self.connections[record.incarnation] = Connection(record, addresses, peer, link, calls, results)
            self._is_stale = True
        if local and record.pid != os.getpid():
            self._watch(record.pid, record.started)
        self.hurry(peer.next_tick())

    def disconnect(self, incarnation: int) -> None:
        """Close the connection to an agent that never became a member. Does nothing without a connection."""
        with self._lock:
            connection = self._remove(incarnation)
        if connection is not None:
            connection.close()

    def lose(self, incarnation: int) -> Connection | None:
        """Remove the connection to an agent that is gone, and return it for the caller to close.

        Returns None if it was removed before, or after `close`.
        """
        with self._lock:
            connection = self._remove(incarnation)
            if connection is None or self.closed:
                return None
            for peer in connection.peers:
                peer.lose()  # forgets the messages kept for another try, and releases their references
        return connection

    def _remove(self, incarnation: int) -> Connection | None:
        """Take a connection out of the table and return it; None if there is none. The caller holds the lock."""
        connection = self.connections.pop(incarnation, None)
        if connection is not None:
            self._is_stale = True
            self._sent_to_gone += sum(peer.next_seq - 1 for peer in connection.peers)
        return connection

    def close(self, goodbye: Goodbye | None) -> bool:
        """Stop sending, after a goodbye to the other agents; return False if the links are closed already."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            connections = list(self.connections.values())
        if goodbye is not None:  # a forked child says none: the agent still lives in the parent
            for connection in connections:
                if connection.record is not self._me:
                    with contextlib.suppress(NbdistError):
                        self._transmit(connection, connection.peer, connection.peer.send(goodbye, (), time.monotonic()))
        return True

    # -- sending ------------------------------------------------------------------------------

    def post(
        self,
        to: int,
        message: Message,
        frames: Sequence[Buffer] = (),
        holds: HeldByLinks | None = None,
        slots: Sequence[Slot] = (),
        is_large: bool = False,
    ) -> int:
        """Send a message; return its number, negative for a large one, with which `status` can tell if it has arrived.

        ``holds`` is kept until the message has arrived; ``slots`` are the copies of its large tensors in shared memory.
        With ``is_large``, a small message counts as a large one, such as the answer to a ping of the large ones'
        `Peer`; it still goes over the link for small ones.

        Raises WorkerLost if the agent is not connected, and ChannelError if the channel refuses a call. Another message
        that the channel refuses is sent again later if it must arrive, and dropped if not. If this raises an error and
        the message certainly does not go out, ``holds`` and ``slots`` are taken back. After Ctrl-C the message may
        still go out.
        """
        was_closed = this_thread.is_closed
        try:
            this_thread.is_closed = True
            now = time.monotonic()
            sharing = self._sharing
            back: list[tuple[int, int]] | None = None
            size = sum(map(len, frames))
            try:
                # 1. Find the blocks of shared memory that the message returns to the receiver.
                if (sharing.ended or sharing.owing) and message.gives_back:
                    with DeferredSignals():  # else Ctrl-C could come when the blocks are in nobody's list
                        back = sharing.owed(to)
                with self._lock:
                    # 2. Number the message and keep a copy.
                    connection = self.connections.get(to)
                    if connection is None or self.closed:
                        raise self._no_connection(to)
                    if holds is not None:
                        holds.is_sent = True
                    for slot in slots:
                        slot.send()  # before the receiver can see it, and before the receiver can be lost
                        connection.sent += slot.place.length
                    large = is_large or size >= LARGE_BYTES
                    peer = self._large_peer(connection) if large else connection.peer
                    outgoing = peer.send(message, frames, now, holds, back)
                    connection.sent += size + len(outgoing.frames[0])
            except BaseException:  # the receiver is gone, or the user pressed Ctrl-C
                if not self._peer_keeps(to, message):  # Ctrl-C may come anywhere: only the `Peer` knows
                    self._take_back(to, holds, slots, back)
                raise
            try:
                link = connection.link if size < LARGE_BYTES else self._link_for_large(connection)
                link.send(outgoing.frames, message.kind)
            except ChannelError:
                if isinstance(message, Call):  # its caller gets the error; nobody waits for another message to go
                    with self._lock:
                        peer.refused(outgoing, now)
                        due = peer.next_tick()
                    self.hurry(due)
                    self._take_back(to, holds, slots, back)
                    if self.closed or self.connections.get(to) is None:
                        raise self._no_connection(to) from None  # the receiver was lost in between
                    raise
                self.hurry(self._postpone(peer, outgoing))
            finally:  # also after Ctrl-C: `peer` keeps the message, and will notice that it has not arrived
                if now + PING_FIRST < self.due:
                    self.hurry(now + PING_FIRST)
            return -outgoing.seq if large else outgoing.seq
        finally:
            this_thread.is_closed = was_closed

    def note_call(self, call: Pending) -> None:
        """Note that a call was sent: at half of its time limit the reader asks the callee what it is doing."""
        if call.timeout > 0 and call.started + call.timeout * 0.5 < self.due:
            self.hurry(call.started + call.timeout * 0.5)
        if trace.listeners:
            about = {"to": call.worker, "function": call.function, "id": call.id, "started": call.started}
            trace.emit("call.sent", agent=self._me.name, **about)

    def _peer_keeps(self, to: int, message: Message) -> bool:
        """Return whether a `Peer` for agent ``to`` keeps a message: it was sent, or will be sent again."""
        with self._lock:
            connection = self.connections.get(to)
            return connection is not None and any(peer.keeps(message) for peer in connection.peers)

    def _take_back(
        self, to: int, holds: HeldByLinks | None, slots: Sequence[Slot], back: list[tuple[int, int]] | None
    ) -> None:
        """Undo what was done for a message to agent ``to`` that certainly does not go out."""
        if holds is not None:
            holds.is_sent = False
            holds.take_back()
        for slot in slots:
            slot.take_back()
        if back and to in self.connections and not self.closed:  # an owner that is gone does not need its memory
            self._sharing.owe(to, back)  # a later message returns these blocks

    def post_later(self, to: int, message: UserDelete) -> None:
        """Queue a delete, which tells agent ``to`` that a reference was released, for the next message to that agent.

        If no message goes there within 50 ms, the delete goes alone, within 0.25 s. Raises WorkerLost if the agent is
        not connected.
        """
        with self._lock:
            connection = self.connections.get(to)
            if connection is None or self.closed:
                raise self._no_connection(to)
            due = connection.peer.send_later(message, time.monotonic())
        self.note(due)  # wakes no reader, so the delete may be late by `_LONGEST_NAP_SECONDS`

    def post_waiting(self) -> None:
        """Send now the deletes that `post_later` has queued."""
        now = time.monotonic()
        with self._lock:
            waiting = [(each, each.peer.send_waiting(now)) for each in self.connections.values()]
        for connection, outgoing in waiting:
            if outgoing is not None:
                self._transmit(connection, connection.peer, outgoing)

    def _no_connection(self, to: int) -> NbdistError:
        """Return the error for an agent that is not connected: either this agent has ended, or that one is gone."""
        if self.closed:
            return WorkerLost(
                f"{self._me.name}, the agent of this process, has ended: RPC was shut down here. Start it again first: "
                "init_rpc, or %dist_init in a notebook"
            )
        membership = self._membership
        name, fate = membership.name_of(to), membership.fate(to)
        if fate is None:
            return WorkerLost(f"{name} is not connected")
        if name in membership.names:
            return WorkerLost(f"{name} {fate}; a new worker has taken its name")
        return lost_error(name, fate)

    def _transmit(self, connection: Connection, peer: Peer, outgoing: Outgoing) -> None:
        """Send an encoded message for which no caller waits, such as a ping or a repetition. Raises no ChannelError."""
        try:
            # Acknowledgements and pongs need not wait behind large messages. A ping must: it asks for those before it.
            goes_behind = peer.is_large and (outgoing.seq or isinstance(outgoing.message, Ping))
            link = self._link_for_large(connection) if goes_behind else connection.link
            link.send(outgoing.frames, outgoing.message.kind)
        except ChannelError:
            self._postpone(peer, outgoing)  # `peer` repeats it, if it must arrive

    def _postpone(self, peer: Peer, outgoing: Outgoing) -> float:
        """Note that the channel refused a message; return the moment at which `tick` must run next."""
        with self._lock:
            peer.failed(outgoing.seq, time.monotonic())
            return peer.next_tick()

    def _large_peer(self, connection: Connection) -> Peer:
        """Return the protocol state of large messages; the first call makes it. The caller holds the lock."""
        if connection.large_peer is None:
            connection.large_peer = Peer(
                *(self._me.incarnation, connection.record.incarnation, self._limits, time.monotonic()),
                watch_silence=False,  # the state of small messages watches
                is_large=True,
            )
        return connection.large_peer

    def _link_for_large(self, connection: Connection) -> Link:
        """Return the link for large messages; the first call makes it. Raises ChannelError. Takes the lock."""
        link = connection.large_link
        if link is None:
            with self._lock:
                if self.connections.get(connection.record.incarnation) is not connection:
                    # Lost meanwhile: nobody would close the link.
                    raise ChannelError(f"{connection.record.name} is gone")
                if connection.large_link is None:
                    try:
                        connection.large_link = self._channel.connect(connection.addresses, is_large=True)
                    except TooManyFiles:
                        return connection.link  # this process cannot open another file now
                link = connection.large_link
        return link

    def refuse(self, record: Record, refused: Refused) -> None:
        """Tell an agent, member or not, that its message was refused. Does nothing if the channel cannot send this."""
        answer = Envelope(self._me.incarnation, record.incarnation, 0, 1, 0, [], refused)
        with contextlib.suppress(ChannelError):
            link = self._channel.connect(record.addresses)  # the agent may not be connected: a link for this message
            link.send([encode_envelope(answer)], "refused")
            link.close()

    # -- for the thread that reads ------------------------------------------------------------

    def nap(self, now: float, timeout: float | None) -> float:
        """Return for how many seconds the reader may wait for a message before it must do what is due."""
        # Announce the nap before measuring it: a thread that makes `due` earlier then sees that it must wake this one.
        self._asleep_until = now + _LONGEST_NAP_SECONDS
        wait = self.due - now
        if not 0.0 <= wait <= _LONGEST_NAP_SECONDS:
            wait = _LONGEST_NAP_SECONDS if wait > 0.0 else 0.0
        return wait if timeout is None or wait < timeout else timeout

    def accept(self, connection: Connection, envelope: Envelope, size: int) -> bool:
        """Note a received envelope in the sender's `Peer`; return whether its message is new and must be handled."""
        with self._lock:
            now = time.monotonic()
            peer = connection.peer
            if envelope.is_large:
                peer.heard(now)
                peer = self._large_peer(connection)
            fresh = peer.receive(envelope, size, now)  # after many bytes it wants to acknowledge at once
            due = peer.ack_due
        if due < self.due:
            self.due = due  # this thread is the reader: it looks at `due` before it sleeps
        return fresh

    def tick(
        self, now: float, awaited: Callable[[], AbstractSet[int]] = frozenset
    ) -> tuple[list[tuple[int, str]], list[tuple[int, float]]]:
        """Do what is due: resend, ping, acknowledge. Return two lists of agents that are silent.

        The first list has the agents that are lost, each as a pair of its incarnation and a text that completes
        "worker1 ...". The second list has silent agents that this agent watches for the others, each with the seconds
        of its silence; the caller lets the other agents ask them. ``awaited()`` returns the agents for whose answer
        this one waits. `set_clock` must follow.
        """
        lost: list[tuple[int, str]] = []
        silent: list[tuple[int, float]] = []
        transmit: list[tuple[Connection, Peer, Outgoing]] = []
        self._ticked = now
        waits_for = awaited() if self._chooses else frozenset()  # without the lock: it takes `Exchange.lock`
        with self._lock:
            self._choose(waits_for, now)
            for incarnation, connection in self.connections.items():
                for peer in connection.peers:
                    for action in peer.tick(now):
                        if isinstance(action, Transmit):
                            transmit.append((connection, peer, action.outgoing))
                        elif isinstance(action, Lost):
                            lost.append((incarnation, f"has been silent for {duration(action.silent)}"))
                        elif isinstance(action, Suspect):
                            name = connection.record.name
                            _log.warning("%s has been silent for %s; calls to it wait", name, duration(action.silent))
                            trace.emit("peer.suspect", name=name, silent=action.silent)
                            if incarnation in self._ring:
                                silent.append((incarnation, action.silent))
                        elif isinstance(action, Undelivered):
                            self._gave_up(connection, action.message)
        for each in transmit:
            self._transmit(*each)
        return lost, silent

    def _choose(self, awaited: AbstractSet[int], now: float) -> None:
        """Choose the members that this agent watches (`nbdist.rpc.core.watching`). The caller holds the lock."""
        if self._is_stale:
            members = self._members()
            self._is_large = self.meets_all and len(members) > ALL_WATCH_ALL
            self._ring = watched_by(self._me, members) if self._is_large else set()
            self._is_stale = False
        if not self._is_large and not self._chooses:
            return
        self._chooses = self._is_large
        watched = {*self._ring, *awaited, *self._attended} if self._chooses else self.connections.keys()
        for incarnation, connection in self.connections.items():
            if incarnation in watched or any(peer.outstanding for peer in connection.peers):
                connection.peer.watch(now - PING_FIRST)  # the message for whose answer this agent waits is older
            else:
                connection.peer.rest()

    def _members(self) -> list[Record]:
        return [connection.record for connection in self.connections.values()]

    def set_clock(self) -> None:
        """Set `due` to the next moment at which a connection or a call needs attention, after a `tick`."""
        with self._lock:
            due = min((connection.next_tick() for connection in self.connections.values()), default=math.inf)
            # So one tick serves all connections that need one soon after each other. The pause does not delay calls.
            due = max(due, self._ticked + len(self.connections) * _PAUSE_PER_CONNECTION)
            if self._chooses:
                due = min(due, self._ticked + _CHOOSE_EVERY)
            self.due = min(due, self._pending.next_due())
        self.hurry(self.due)  # this thread may run a job next, while another reader sleeps

    def note(self, due: float) -> None:
        """Make sure that a reader does what is due by ``due``, or a little later. Wakes no reader, unlike `hurry`."""
        if due < self.due:
            self.due = due

    def hurry(self, due: float) -> None:
        """Make sure that a reader does what is due by ``due``; wake a reader that would sleep too long."""
        if due < self.due:
            self.due = due
        if due < self._asleep_until:
            self._channel.wake()

    def _gave_up(self, connection: Connection, message: Message) -> None:
        """Log a message that was not acknowledged in any try, retire its shared memory, and fail it if it is a call."""
        _log.error(
            "%s has not acknowledged a %s message, which was repeated %d times; the message is given up",
            connection.record.name,
            message.kind,
            self._limits.retries,
        )
        self._sharing.undelivered(connection.record.incarnation, message)
        if isinstance(message, Call):
            self._on_undelivered(message)

    def on_pong(self, message: Pong, sender: int, _: list[bytes]) -> None:
        """Note the activity that another agent's pong reports, and send again the messages that it shows missing."""
        connection = self.connections.get(sender)
        if connection is None:
            return  # the agent is gone
        with self._lock:
            peer = self._large_peer(connection) if message.is_large else connection.peer
            actions = peer.ponged(message, time.monotonic())
            due = peer.next_tick()
        self.note(due)
        for action in actions:
            if isinstance(action, Transmit):
                self._transmit(connection, peer, action.outgoing)
            elif isinstance(action, Undelivered):
                self._gave_up(connection, action.message)

    # -- watching -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def attend(self, members: Iterable[int]) -> Iterator[None]:
        """Watch some members, by incarnation, during the block, which waits for messages from them."""
        members = list(members)
        with self._lock:
            self._attended.update(members)
        try:
            yield
        finally:
            with self._lock:
                self._attended.subtract(members)
                self._attended += Counter()  # forgets those with 0 blocks

    def neighbours(self) -> list[int]:
        """Return the members that this agent watches for the others, by incarnation; none in a small world."""
        return [incarnation for incarnation in list(self._ring) if incarnation in self.connections]

    def doubt(self, incarnation: int, silent: float) -> bool:
        """Ask a member for a sign of life, because another agent has not heard from it for ``silent`` seconds.

        Without an answer, the member is lost after the usual time of silence, which includes these seconds. Does not
        ask a member on this host. Returns False if the member is not connected.
        """
        now = time.monotonic()
        with self._lock:
            connection = self.connections.get(incarnation)
            if connection is None:
                return False
            connection.peer.doubt(min(silent, self._limits.suspect_after), now)
        self.hurry(now)
        return True

    def doubt_all(self) -> None:
        """Ask all members for a sign of life: one has lost this agent, so others may have lost it, too."""
        now = time.monotonic()
        with self._lock:
            if not self._chooses or now - self._doubted_all < 1.0:
                return  # in a small world each agent watches all others; or they were asked a moment ago
            self._doubted_all = now
            for connection in self.connections.values():
                connection.peer.doubt(0.0, now)
        self.hurry(now)

    # -- inspecting ---------------------------------------------------------------------------

    def ask(self, to: int) -> None:
        """Ping an agent to ask what it is doing. Once it has answered, `status` includes its answer."""
        with self._lock:
            connection = self.connections.get(to)
            outgoing = connection.peer.ping(time.monotonic()) if connection else None
        if connection and outgoing:
            self._transmit(connection, connection.peer, outgoing)

    def status(self, to: int, seq: int) -> str:
        """Return a short text about a call: whether it has arrived, and what its worker was doing.

        ``seq`` is the number of the call's message, which `post` returned.
        """
        with self._lock:
            connection = self.connections.get(to)
            if connection is None:
                return "it is gone"
            peer, now = connection.peer, time.monotonic()
            state = self._large_peer(connection) if seq < 0 else peer
            if state.is_unacknowledged(abs(seq)):
                silent = duration(peer.silent_for(now))
                return f"it has not acknowledged the call; no message has come from it for {silent}"
            if peer.doing and now - peer.doing_at < 60:  # what it reported before that says nothing now
                return f"{duration(now - peer.doing_at)} before, it was running {peer.doing}"
        return "it has acknowledged the call"

    def peer(self, incarnation: int) -> Peer | None:
        """Return the protocol state of one agent's small messages; None if the agent is not connected."""
        connection = self.connections.get(incarnation)
        return connection.peer if connection is not None else None

    def peers(self) -> list[Peer]:
        """Return the protocol states of all connected agents, for small and for large messages."""
        return [peer for connection in list(self.connections.values()) for peer in connection.peers]

    def connected(self, incarnation: int) -> Record | None:
        """Return the record of a connected agent, even if it is not a member yet; None if it is not connected."""
        connection = self.connections.get(incarnation)
        return connection.record if connection is not None else None

    def sent(self) -> dict[str, int]:
        """Return how many bytes were sent to each connected agent, by name, those in shared memory included."""
        return {each.record.name: each.sent for each in list(self.connections.values())}

    def traffic(self) -> tuple[int, int]:
        """Return two counts of messages that must arrive: all that were sent so far, and those not acknowledged yet."""
        with self._lock:
            peers = [peer for connection in self.connections.values() for peer in connection.peers]
            # Messages to agents that are gone count, so that the number never falls: `Survey` compares two of them.
            sent = self._sent_to_gone + sum(peer.next_seq - 1 for peer in peers)
            return sent, sum(peer.outstanding for peer in peers)

    def outstanding(self) -> int:
        """Return how many messages to connected agents must arrive and are not acknowledged yet."""
        return self.traffic()[1]
