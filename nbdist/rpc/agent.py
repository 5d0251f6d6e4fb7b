"""An agent: the endpoint of one worker, which joins the parts.

Here is the way of every message: `post` numbers it, keeps it and sends it on the caller's thread; `_read`,
run by one thread of the pool at a time, takes what comes, lets the peer judge it, and passes it to the
handler of its type. A handler is quick and runs nobody's code; if there is something to run it returns a job,
and the thread that read it runs it after another has taken its turn at reading.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbdist import trace
from nbdist.channel.contract import Buffer, Channel, ChannelError, Link
from nbdist.channel.liveness import ProcessWatch
from nbdist.errors import NbdistError, ProtocolError, UnknownWorker, WorkerLost
from nbdist.ids import IdSource
from nbdist.rpc.calls import PendingCalls
from nbdist.rpc.dispatch import Job, Pool
from nbdist.rpc.membership import Membership, WorkerInfo
from nbdist.rpc.options import RpcBackendOptions
from nbdist.wire.messages import (
    Call,
    Envelope,
    Goodbye,
    Hello,
    Message,
    Nothing,
    Ping,
    Pong,
    Record,
    Refused,
    decode_envelope,
    encode_envelope,
    kind,
)
from nbdist.wire.peer import Lost, Outgoing, Peer, PeerLimits, Standing, Suspect, Transmit, Undelivered

__all__ = ["Agent", "Handler", "active_agent"]

Handler = Callable[[Any, int, list[bytes]], Job | None]
"""``handler(message, sender's incarnation, the frames behind the envelope)``."""

_SLEEP = 0.2
"""The reader looks at the clock that often even if nothing comes, so that most senders need not wake it."""

_log = logging.getLogger("nbdist.rpc")


class _PerThread(threading.local):
    agent: Agent | None = None


_thread = _PerThread()


def active_agent() -> Agent | None:
    """The agent for which the calling thread runs, if it is one of an agent's threads."""
    return _thread.agent


@dataclass
class _Connection:
    record: Record
    peer: Peer
    link: Link


class Agent:
    """One member of an RPC world."""

    def __init__(self, me: Record, channel: Channel, options: RpcBackendOptions) -> None:
        from nbdist.rpc.caller import Caller
        from nbdist.rpc.ending import Ending
        from nbdist.rpc.executor import Executor
        from nbdist.rpc.handshake import Handshake
        from nbdist.rpc.references import References

        self.me = me
        self.options = options
        self.channel = channel
        self.membership = Membership(me)
        self.ids = IdSource(me.id, me.incarnation)
        self.rpc_timeout = options.rpc_timeout
        self.pending = PendingCalls()
        self.closed = False
        self.pid = os.getpid()
        self.refused = 0
        self._limits = PeerLimits(options.suspect_after, options.lost_after, retries=options.retries)
        self._lock = threading.Lock()
        self._connections: dict[int, _Connection] = {}
        self._handlers: dict[type, Handler] = {}
        self._on_lost: list[Callable[[Record, str], None]] = []
        self._at_close: list[Callable[[], None]] = []
        self._due = math.inf
        self._asleep_until = 0.0
        self._watch = ProcessWatch(self._on_process_end)
        self.pool = Pool(options.num_worker_threads, self._read, channel.wake, f"nbdist-{me.name}")
        self.handle(Nothing, lambda *_: None)
        self.handle(Ping, self._on_ping)
        self.handle(Pong, self._on_pong)
        self.handle(Goodbye, self._on_goodbye)
        self.references = References(self)
        self.executor = Executor(self)
        self.caller = Caller(self)
        self.handshake = Handshake(self)
        self.ending = Ending(self)

    def __repr__(self) -> str:
        return f"<Agent {self.me.name!r} (id {self.me.id}){' closed' if self.closed else ''}>"

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to read; the world is joined by `handshake`."""
        self.connect(self.me)
        self.pool.start()

    def handle(self, message_type: type, handler: Handler) -> None:
        """Have messages of a type go to ``handler``."""
        self._handlers[message_type] = handler

    def on_lost(self, listener: Callable[[Record, str], None]) -> None:
        """Have ``listener(record, why)`` called when a member is lost; it must be quick."""
        self._on_lost.append(listener)

    def at_close(self, action: Callable[[], None]) -> None:
        """Have ``action`` called at the end of `close`."""
        self._at_close.append(action)

    @contextlib.contextmanager
    def activate(self) -> Iterator[Agent]:
        """Make this the agent of the calling thread, for as long as the block lasts."""
        before, _thread.agent = _thread.agent, self
        try:
            yield self
        finally:
            _thread.agent = before

    def close(self, why: str) -> None:
        """End at once: tell the others, fail what is pending, stop all threads."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            connections = list(self._connections.values())
        forked = os.getpid() != self.pid
        if not forked:
            for connection in connections:
                if connection.record is not self.me:
                    with contextlib.suppress(NbdistError):
                        goodbye = Goodbye(why, self.ending.completed)
                        self._transmit(connection, connection.peer.send(goodbye, (), time.monotonic()))
        for call in self.pending.all():
            self.pending.pop(call.id)
            call.outcome.try_settle(None, WorkerLost(f"{self.me.name} {why} before {call.worker} had answered"))
        self.references.clear()
        if forked:
            return  # the sockets and threads are the parent's
        self._watch.close()
        self.pool.close(2.0)
        self.channel.close()
        for action in self._at_close:
            action()
        trace.emit("agent.closed", agent=self.me.name, why=why)

    # -- sending ------------------------------------------------------------------------------

    def connect(self, record: Record) -> None:
        """Know another agent, and the way to it."""
        with self._lock:
            if record.incarnation in self._connections or self.closed:
                return
            local = record.host == self.me.host
            peer = Peer(
                self.me.incarnation,
                record.incarnation,
                self._limits,
                time.monotonic(),
                watch_silence=not local,
            )
            addresses = [a for a in record.addresses if local or not a.startswith("ipc://")]  # files of another host
            self._connections[record.incarnation] = _Connection(record, peer, self.channel.connect(addresses))
        if local and record.pid != os.getpid():
            self._watch.watch(record.pid, record.started)
        self.hurry(peer.next_tick())

    def disconnect(self, incarnation: int) -> None:
        """Forget an agent that never became a member."""
        with self._lock:
            connection = self._connections.pop(incarnation, None)
        if connection is not None:
            connection.link.close(at_once=True)

    def post(self, to: int, message: Message, frames: Sequence[Buffer] = (), holds: Any = None) -> int:
        """Send a message; its number, by which the peer knows whether it has arrived.

        ``holds`` lives until it has. A call that the channel refuses raises ChannelError; anything else that
        must arrive is tried again.
        """
        now = time.monotonic()
        with self._lock:
            connection = self._connections.get(to)
            if connection is None or self.closed:
                raise self._no_connection(to)
            outgoing = connection.peer.send(message, frames, now, holds)
            due = connection.peer.next_tick()
        self._transmit(connection, outgoing)
        if due < self._due:
            self.hurry(due)
        return outgoing.seq

    def _no_connection(self, to: int) -> NbdistError:
        if self.closed:
            return WorkerLost(f"{self.me.name} has ended")
        name = self.membership.name_of(to)
        return WorkerLost(f"{name} {self.membership.why_gone(name) or 'is not connected'}")

    def _transmit(self, connection: _Connection, outgoing: Outgoing) -> None:
        try:
            connection.link.send(outgoing.frames, kind(outgoing.message))
        except ChannelError:
            with self._lock:
                if isinstance(outgoing.message, Call):
                    connection.peer.withdraw(outgoing.seq)
                    raise
                connection.peer.failed(outgoing.seq, time.monotonic())
                due = connection.peer.next_tick()
            self.hurry(due)

    def hurry(self, due: float) -> None:
        """Have the clock looked at by then."""
        if due < self._due:
            self._due = due
        if due < self._asleep_until:
            self.wake()

    def wake(self) -> None:
        """Make the reader look around."""
        self.channel.wake()

    # -- reading ------------------------------------------------------------------------------

    def _read(self, timeout: float | None) -> Job | None:
        _thread.agent = self
        now = time.monotonic()
        self.references.reap()
        if now >= self._due:
            self._run_due(now)
        # Announce the nap before measuring it: who moves `_due` forward then sees that it must wake us.
        self._asleep_until = now + _SLEEP
        wait = min(_SLEEP, max(self._due - now, 0.0), timeout if timeout is not None else _SLEEP)
        frames = self.channel.receive(wait)
        self._asleep_until = 0.0
        return self._take(frames) if frames else None

    def _take(self, frames: list[bytes]) -> Job | None:
        try:
            envelope = decode_envelope(frames[0])
        except ProtocolError as error:
            self.refused += 1
            _log.warning("%s dropped a message: %s", self.me.name, error)
            return None
        message = envelope.message
        connection = self._connections.get(envelope.sender)
        if isinstance(message, Refused):  # perhaps from whoever listens now where the one we meant did
            if envelope.receiver == self.me.incarnation:
                self.handshake.on_refused(message)
            return None
        if isinstance(message, Hello) and connection is None:
            self.handshake.on_stranger(message)
            return None
        if connection is None or envelope.receiver != self.me.incarnation:
            self._refuse(envelope)
            return None
        with self._lock:
            fresh = connection.peer.receive(envelope, sum(map(len, frames)), time.monotonic())
            due = connection.peer.next_tick()
        if due < self._due:
            self._due = due
        if not fresh:
            return None
        handler = self._handlers.get(type(message))
        if handler is None:
            _log.warning("%s has no handler for %s", self.me.name, kind(message))
            return None
        try:
            return handler(message, envelope.sender, frames[1:])
        except NbdistError as error:
            _log.warning("%s could not act on %s: %s", self.me.name, kind(message), error)
            return None

    def _refuse(self, envelope: Envelope) -> None:
        """A message from a past incarnation, or to one: its sender must learn that it is out of date."""
        self.refused += 1
        if isinstance(envelope.message, Goodbye):
            return
        record = self.connected(envelope.sender) or self.membership.ever(envelope.sender)
        if record is not None:
            reason = f"{self.me.name} does not keep this connection (any more)"
            self.refuse(record, Refused(envelope.receiver, reason))

    def refuse(self, record: Record, refused: Refused) -> None:
        """Tell an agent, member or not, that its message was not taken."""
        answer = Envelope(self.me.incarnation, record.incarnation, 0, 1, 0, [], refused)
        with contextlib.suppress(ChannelError):
            link = self.channel.connect(record.addresses)
            link.send([encode_envelope(answer)], "refused")
            link.close()

    # -- time ---------------------------------------------------------------------------------

    def _run_due(self, now: float) -> None:
        lost: list[tuple[int, str]] = []
        transmit: list[tuple[_Connection, Outgoing]] = []
        with self._lock:
            for incarnation, connection in self._connections.items():
                for action in connection.peer.tick(now):
                    if isinstance(action, Transmit):
                        transmit.append((connection, action.outgoing))
                    elif isinstance(action, Lost):
                        lost.append((incarnation, f"has been silent for {action.silent:.1f} s"))
                    elif isinstance(action, Suspect):
                        _log.warning(
                            "%s has been silent for %.1f s; calls to it wait",
                            connection.record.name,
                            action.silent,
                        )
                        trace.emit("peer.suspect", name=connection.record.name, silent=action.silent)
                    elif isinstance(action, Undelivered):
                        self._gave_up(connection, action.message)
        for connection, outgoing in transmit:
            self._retransmit(connection, outgoing)
        for incarnation, why in lost:
            self.lose(incarnation, why)
        self.caller.run_due(now)
        with self._lock:
            due = min((connection.peer.next_tick() for connection in self._connections.values()), default=math.inf)
            self._due = min(due, self.pending.next_due())

    def _retransmit(self, connection: _Connection, outgoing: Outgoing) -> None:
        try:
            connection.link.send(outgoing.frames, kind(outgoing.message))
        except ChannelError:
            with self._lock:
                connection.peer.failed(outgoing.seq, time.monotonic())

    def _gave_up(self, connection: _Connection, message: Message) -> None:
        _log.error(
            "%s did not take a %s message in %d tries; it is given up",
            connection.record.name,
            kind(message),
            self.options.retries,
        )
        if isinstance(message, Call):
            self.pool.submit(lambda: self.caller.undelivered(message.id))

    def _on_ping(self, message: Ping, sender: int, _: list[bytes]) -> None:
        with contextlib.suppress(NbdistError):
            self.post(sender, Pong(message.number, self.executor.doing()))

    def _on_pong(self, message: Pong, sender: int, _: list[bytes]) -> None:
        connection = self._connections[sender]
        with self._lock:
            actions = connection.peer.ponged(message, time.monotonic())
        for action in actions:
            if isinstance(action, Transmit):
                self._retransmit(connection, action.outgoing)
            elif isinstance(action, Undelivered):
                self._gave_up(connection, action.message)

    def ask(self, to: int) -> None:
        """Ask an agent what it is doing; `status` knows when it has answered."""
        with self._lock:
            connection = self._connections.get(to)
            outgoing = connection.peer.ping(time.monotonic()) if connection else None
        if connection and outgoing:
            self._retransmit(connection, outgoing)

    def status(self, to: int, seq: int) -> str:
        """What is known of a call's fate: whether it arrived, and what its worker was doing."""
        with self._lock:
            connection = self._connections.get(to)
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
        connection = self._connections.get(incarnation)
        return connection.peer if connection is not None else None

    def connected(self, incarnation: int) -> Record | None:
        """The record of an agent that this one talks to, member or not yet."""
        connection = self._connections.get(incarnation)
        return connection.record if connection is not None else None

    def outstanding(self) -> int:
        """How many messages to members are unacknowledged."""
        with self._lock:
            return sum(connection.peer.outstanding for connection in self._connections.values())

    # -- death --------------------------------------------------------------------------------

    def _on_process_end(self, pid: int) -> None:
        for incarnation, connection in list(self._connections.items()):
            if connection.record.pid == pid and connection.record.host == self.me.host:
                self.lose(incarnation, f"died (process {pid} has ended)")

    def _on_goodbye(self, message: Goodbye, sender: int, _: list[bytes]) -> None:
        if message.orderly:
            self.ending.on_orderly_goodbye()
        self.lose(sender, message.reason)

    def lose(self, incarnation: int, why: str) -> None:
        """A member is gone: fail all that waits for it."""
        with self._lock:
            connection = self._connections.pop(incarnation, None)
            if connection is None or self.closed:
                return
            connection.peer.lose()
        record = connection.record
        self.membership.remove(incarnation, why)
        connection.link.close(at_once=True)
        trace.emit("peer.lost", name=record.name, why=why)
        going_on = self.references.on_lost(incarnation)
        calls = self.pending.to(incarnation)

        def tell() -> None:
            for call in calls:
                self.caller.lost(call, why, others=len(calls) - 1)
            for then in going_on:
                then()

        if calls or going_on:
            self.pool.submit(tell)
        for listener in self._on_lost:
            listener(record, why)

    # -- looking ------------------------------------------------------------------------------

    def find(self, to: str | int | WorkerInfo) -> Record:
        """The living member that ``to`` names; one that has gone is a WorkerLost that says why."""
        try:
            return self.membership.find(to)
        except UnknownWorker:
            why = self.membership.why_gone(to)
            if why is None:
                raise
            raise WorkerLost(f"{to.name if isinstance(to, WorkerInfo) else to} {why}") from None

    def timeout_of(self, timeout: float) -> float:
        """Seconds: the default where ``timeout`` is unset (negative); 0 for none."""
        return self.rpc_timeout if timeout < 0 else timeout

    def statistics(self) -> dict[str, int]:
        """Counters, for people and tests."""
        with self._lock:
            peers = [connection.peer for connection in self._connections.values()]
        forks = self.references.forks
        return {
            "members": len(self.membership.members()),
            "suspects": sum(peer.standing is Standing.SUSPECT for peer in peers),
            "pending_calls": len(self.pending),
            "running_calls": self.executor.active,
            "threads": self.pool.threads,
            "owned_values": forks.owners,
            "forks_of_owned": forks.forks,
            "used_references": forks.users,
            "pending_references": forks.pending,
            "unacknowledged": sum(peer.outstanding for peer in peers),
            "duplicates_dropped": sum(peer.duplicates for peer in peers),
            "messages_resent": sum(peer.resent for peer in peers),
            "messages_refused": self.refused,
        }
