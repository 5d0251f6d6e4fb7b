"""An agent: the endpoint of one worker, which joins the parts.

Here is the way of every message: `post`, which is the links', numbers it, keeps it and sends it on the
caller's thread; `read`, run by one or two threads of the pool, takes what comes, and then, one thread at a time,
lets the peer judge it and passes it to the handler of its type. A handler is quick and runs nobody's code; if there
is something to run it returns a job, and the thread that read it runs it while another reads.

The locks on the way of a call:

======================  =========================================================  ==================================
lock                    protects                                                   held while
======================  =========================================================  ==================================
`Agent._turn`           nothing; it orders messages, ticks and losses              a handler runs
`Exchange.lock`         calls, references, which thread runs which call            one event of the exchange
`Links._lock`           connections, and the protocol state of each (`wire.peer`)  a message is numbered or judged
======================  =========================================================  ==================================

A thread takes them from the top to the bottom. Neither of the last two is taken while the other is held, nor held
while a user's function, a pickler or a send runs. Two things do run under them: a user's ``__del__``, which Python may
call anywhere (what it calls under `Links._lock` goes out by another thread, see `nbdist.finalisers`; `Exchange.lock` is
reentrant), and under `Links._lock` the marking of blocks in shared memory and listeners of `nbdist.trace`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from nbdist import registry, trace
from nbdist.channel.arena import Arena
from nbdist.channel.contract import Channel
from nbdist.channel.liveness import ProcessWatch
from nbdist.errors import NbdistError
from nbdist.finalisers import this_thread
from nbdist.ids import GlobalId, IdSource
from nbdist.rpc.answers import Answers
from nbdist.rpc.caller import Caller, To
from nbdist.rpc.calls import Pending
from nbdist.rpc.dispatch import Job, Pool
from nbdist.rpc.ending import Ending
from nbdist.rpc.exchange import Exchange
from nbdist.rpc.executor import Executor
from nbdist.rpc.futures import Future, Latch, Promise
from nbdist.rpc.guest import Guest
from nbdist.rpc.handshake import Handshake
from nbdist.rpc.here import Active, here
from nbdist.rpc.links import Links
from nbdist.rpc.membership import Membership
from nbdist.rpc.options import RpcBackendOptions
from nbdist.rpc.outcomes import Outcomes
from nbdist.rpc.recording import Recorder
from nbdist.rpc.references import References
from nbdist.rpc.repeats import Repeats
from nbdist.rpc.rref import Home, RRef
from nbdist.rpc.sender import Sender
from nbdist.rpc.sharing import Sharing
from nbdist.rpc.stopping import Stopping
from nbdist.wire.messages import (
    NOT_A_MESSAGE,
    AskShutdown,
    Call,
    Carrier,
    Cast,
    ChildAccept,
    Envelope,
    ForkConfirm,
    ForkRequest,
    GiveBack,
    Goodbye,
    Hello,
    Nothing,
    Ping,
    Pong,
    Ready,
    Record,
    Refused,
    Reply,
    RRefState,
    ShutdownState,
    Stop,
    UserDelete,
    Welcome,
    decode,
)
from nbdist.wire.peer import PeerLimits, Standing

__all__ = ["Agent", "Handler", "active_agent"]

Handler = Callable[[Any, int, list[bytes]], Job | None]
"""``handler(message, sender's incarnation, the frames behind the envelope)``."""

_log = logging.getLogger("nbdist.rpc")


def _drop(listeners: list[Any], listener: Any) -> None:
    with contextlib.suppress(ValueError):  # it has been
        listeners.remove(listener)


def active_agent() -> Agent | None:
    """The agent for which the calling thread runs, if it is one of an agent's threads."""
    agent: Agent | None = here.agent
    return agent


_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


def _after_fork() -> None:
    for agent in list(_agents):
        agent.forked = True
        # A thread of the parent's may hold it, and there is no such thread here.
        agent.exchange.lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_after_fork)


class Agent:
    """One member of an RPC world."""

    def __init__(self, me: Record, channel: Channel, options: RpcBackendOptions, arena: Arena | None = None) -> None:
        self.me = me
        self.options = options
        self.channel = channel
        self.pid = os.getpid()
        self.forked = False
        """Whether this process was forked from the agent's own: the agent's threads and sockets are the parent's."""
        self.refused = 0
        self.hosted = False
        """Whether a cluster keeps it, so that the user's `shutdown` does not end it."""
        self.explain_end: Callable[[int], str] | None = None
        """How a process ended, by its pid, where somebody knows more than that it did; may take a moment."""
        self.directory: Path | None = None
        """Where files lie that must go with this process, however it ends; None for the temporary directory."""
        self._cast_handlers: dict[str, Handler] = {}
        self._at_close: list[Callable[[], None]] = []
        self._turn = threading.RLock()
        """Held while a message is handled, what is due is done, or a member is lost: they happen one at a time.

        Also while the agent says what is under way here (`Ending`): it does not say so of a message half handled.
        """
        self.membership = Membership(me)
        self.ids = IdSource(me.id, me.incarnation)
        self.exchange = Exchange(me.incarnation, self.ids)
        self.pending = self.exchange.calls
        self.processes = ProcessWatch(self._on_process_end)
        self.sharing = Sharing(me, arena, reads=options.arena_bytes != 0)
        self.links = Links(
            channel,
            PeerLimits(options.suspect_after, options.lost_after, retries=options.retries),
            self.membership,
            self.pending,
            self.sharing,
            watch=self.processes.watch,
            on_undelivered=self._on_undelivered,
        )
        self.post = self.links.post
        self.pool = Pool(
            options.num_worker_threads,
            self.read,
            channel.wake,
            f"nbdist-{me.name}",
            readers=channel.readers,
            has_more=channel.has_more,
            begin=self._adopt,
        )
        self.references = References(self.ids, self.exchange, self.membership, self.links, self.submit)
        self._on_lost: list[Callable[[Record, str], None]] = [self.sharing.on_lost]
        self.recorder: Recorder = registry.make_recorder(self)
        self.executor = Executor(
            self.exchange,
            self.membership,
            self.links,
            self.references,
            self.recorder,
            Answers(me.name, self.exchange, self.links, self.references, self.sharing, self.recorder, self.activate),
        )
        self.outcomes = Outcomes(me, self.pending, self.references, self.links, self.recorder, self.submit)
        self.sender = Sender(
            options,
            self.pending,
            self.links,
            self.references,
            self.sharing,
            self.recorder,
            Repeats(self.pending, self.links, self.outcomes),
            self.exchange.is_deciding,
            self.outcomes.unsent,
        )
        self.caller = Caller(self.membership, self.ids, self.references, self.outcomes, self.sender)
        self.home = Home(self.references, self.caller, self.recorder.backward)
        """The agent, as far as references know it."""
        self.references.refer = partial(RRef._refer, self.home)
        self.find, self.timeout_of = self.caller.find, self.sender.timeout_of
        if channel.readers > 1:
            self.caller.read_as_guest = Guest(channel, self.links, self._read_as_guest, self.submit).read
            self.caller.expect, self.sender.expect_no_more = channel.expect, channel.expect_no_more
        self.stopping = self.executor.stopping = Stopping(
            me,
            self.exchange,
            self.links,
            call=self.caller.sync,
            give_up=self.outcomes.interrupt,
            submit=self.submit,
        )
        self.handshake = Handshake(
            self.membership, self.links, self.sharing, lose=self.lose, lost_after=options.lost_after
        )
        self.ending = Ending(self.membership, self.links, self.exchange, self.references, self._turn)
        self._on_lost += [self.handshake.on_lost, self.ending.on_lost]
        self._handlers: dict[type, Handler] = {
            Nothing: lambda *_: None,
            Hello: self.handshake.on_hello,
            Welcome: self.handshake.on_welcome,
            Ready: self.handshake.on_ready,
            Goodbye: self._on_goodbye,
            Ping: self._on_ping,
            Pong: self.links.on_pong,
            Call: self.executor.on_call,
            Reply: self.outcomes.on_reply,
            Stop: self._on_stop,
            ForkRequest: self.references.on_fork_request,
            ForkConfirm: self.references.on_fork_confirm,
            ChildAccept: self.references.on_child_accept,
            UserDelete: self.references.on_user_delete,
            RRefState: self.references.on_state,
            GiveBack: self.sharing.on_give_back,
            Cast: self._on_cast,
            AskShutdown: self.ending.on_ask,
            ShutdownState: self.ending.on_state,
        }
        """The function that handles each type of message."""
        _agents.add(self)

    def __repr__(self) -> str:
        return f"<Agent {self.me.name!r} (id {self.me.id}){' closed' if self.closed else ''}>"

    # -- life ---------------------------------------------------------------------------------

    @property
    def rpc_timeout(self) -> float:
        """Seconds that a call has which names no limit; 0 for none."""
        return self.sender.rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float) -> None:
        self.sender.rpc_timeout = seconds

    @property
    def read_as_guest(self) -> Callable[[Latch], None] | None:
        """Reads messages in a thread that waits for an answer; None if the channel has no place for such a reader."""
        return self.caller.read_as_guest

    def know_cells(
        self,
        origin: Callable[[], str] | None,
        around: Callable[[str], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        """Have calls carry the cell for which they are made.

        ``origin()`` names the cell for which the calling thread works; it travels with every call. ``around(origin)``
        is entered around a function that runs here for a call with such an origin.
        """
        self.sender.origin = origin
        self.executor.around = around

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self.links.closed

    def start(self) -> None:
        """Begin to read; the world is joined by `handshake`."""
        self.links.connect(self.me)
        self.sharing.meet_self()
        self.pool.start()

    def handle_cast(self, topic: str, handler: Handler) -> None:
        """Have the casts of a topic go to ``handler``."""
        self._cast_handlers[topic] = handler

    def _on_cast(self, message: Cast, sender: int, frames: list[bytes]) -> Job | None:
        handler = self._cast_handlers.get(message.topic)
        if handler is None:
            _log.warning("%s has no handler for %s", self.me.name, message.topic)
            return None
        return handler(message, sender, frames)

    def on_lost(self, listener: Callable[[Record, str], None]) -> Callable[[], None]:
        """Have ``listener(record, why)`` called when a member is lost; it must be quick. Returns what ends that."""
        self._on_lost.append(listener)
        return partial(_drop, self._on_lost, listener)

    def at_close(self, action: Callable[[], None]) -> None:
        """Have ``action`` called at the end of `close`."""
        self._at_close.append(action)

    def activate(self) -> contextlib.AbstractContextManager[Agent]:
        """Make this the agent of the calling thread, for as long as the block lasts."""
        return Active(self)

    def submit(self, job: Job) -> None:
        """Have a thread of the agent's run a job."""
        self.pool.submit(job)

    def close(self, why: str) -> None:
        """End at once: tell the others, fail what is pending, stop all threads."""
        if not self.links.close(None if self.forked else Goodbye(why, self.ending.completed)):
            return
        self.outcomes.close(why)
        self.references.clear()
        if self.forked:
            return  # the sockets and threads are the parent's
        self.processes.close()
        self.pool.close(2.0)
        self.outcomes.close(why)  # what a reader has taken out of the table meanwhile, for a job that will not run
        self.channel.close()
        self.sharing.close()
        for action in self._at_close:
            action()
        trace.emit("agent.closed", agent=self.me.name, why=why)

    # -- reading ------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """The calling thread is one of the pool's."""
        here.agent = self

    def read(self, timeout: float | None, soon: bool = False, guest: bool = False) -> Job | None:
        """Wait for a message and deal with it, and with what is due; return a job if there is something to run.

        ``guest`` is for a thread that reads beside those of the pool, one at a time; ``soon`` is as in
        `Channel.receive`.
        """
        now = time.monotonic()
        links, sharing = self.links, self.sharing
        if self.references.holds.ended:
            with self._turn:
                self.references.release_ended()
        if sharing.ended or sharing.owing or now >= sharing.trim_at:
            self._give_back(now)
        if now >= links.due:
            with self._turn:
                self._run_due(now)
        frames = self.channel.receive(links.nap(now, timeout), guest, soon)
        if not frames:
            return None
        with self._turn:
            return self._take(frames)

    def _read_as_guest(self, timeout: float | None) -> Job | None:
        """As `read`, in a thread that is none of the agent's."""
        before, here.agent = here.agent, self
        was_closed = this_thread.is_closed
        try:
            this_thread.is_closed = True
            return self.read(timeout, guest=True)
        finally:
            this_thread.is_closed = was_closed
            here.agent = before

    def _give_back(self, now: float) -> None:
        due, later = self.sharing.tend(now)
        for to, message in due:
            with contextlib.suppress(NbdistError):  # who is gone has no use for them
                self.post(to, message)
        self.links.note(later)

    def _run_due(self, now: float) -> None:
        for incarnation, why in self.links.tick(now):
            self.lose(incarnation, why)
        self.outcomes.run_due(now)
        self.links.set_clock()

    def _take(self, frames: list[bytes]) -> Job | None:
        try:
            envelope = decode(frames[0])
        except NOT_A_MESSAGE as error:
            self.refused += 1
            _log.warning("%s dropped a message: not a message of nbdist: %s", self.me.name, error)
            return None
        message = envelope.message
        connection = self.links.connections.get(envelope.sender)
        if isinstance(message, Refused):  # perhaps from whoever listens now where the one we meant did
            if envelope.receiver == self.me.incarnation:
                self.handshake.on_refused(message)
            return None
        if connection is None and isinstance(message, Hello):
            self.handshake.on_stranger(message)
            return None
        if connection is None or envelope.receiver != self.me.incarnation:
            self._refuse(envelope)
            return None
        if not self.links.accept(connection, envelope, sum(map(len, frames))):
            return None
        if envelope.back:
            self.sharing.on_back(envelope.sender, envelope.back)
        for delete in envelope.deletes:
            self.references.on_user_delete(delete, envelope.sender, [])
        handler = self._handlers.get(type(message))
        if handler is None:
            _log.warning("%s has no handler for %s", self.me.name, message.kind)
            return None
        if isinstance(message, Carrier) and message.payload.places:
            memory = self.sharing.begin(connection.record, message.payload.places)
            if memory is None:
                return None  # as if it had not come: its sender will be known to be lost in a moment
            frames += memory  # type: ignore[arg-type]
        try:
            return handler(message, envelope.sender, frames[1:])
        except NbdistError as error:
            _log.warning("%s could not act on %s: %s", self.me.name, message.kind, error)
            return None

    def _refuse(self, envelope: Envelope) -> None:
        """A message from a past incarnation, or to one: its sender must learn that it is out of date."""
        self.refused += 1
        if isinstance(envelope.message, Goodbye):
            return
        record = self.links.connected(envelope.sender) or self.membership.ever(envelope.sender)
        if record is not None:
            reason = f"{self.me.name} does not keep this connection (any more)"
            self.links.refuse(record, Refused(envelope.receiver, reason))

    # -- death --------------------------------------------------------------------------------

    def _on_process_end(self, pid: int) -> None:
        for incarnation, connection in list(self.links.connections.items()):
            if connection.record.pid == pid and connection.record.host == self.me.host:
                how = self.explain_end(pid) if self.explain_end is not None else ""
                self.lose(incarnation, how or f"died (process {pid} has ended)")

    def _on_ping(self, message: Ping, sender: int, _: list[bytes]) -> None:
        with contextlib.suppress(NbdistError):
            self.post(sender, Pong(message.number, self.executor.doing()))

    def _on_stop(self, message: Stop, sender: int, frames: list[bytes]) -> None:
        self.references.abandon(sender, message.id)
        self.stopping.on_stop(message, sender, frames)

    def _on_undelivered(self, call: Call) -> None:
        """Fail a call that its callee did not take in all tries."""
        self.submit(partial(self.outcomes.undelivered, call.id))

    def _on_goodbye(self, message: Goodbye, sender: int, _: list[bytes]) -> None:
        if message.orderly:
            self.ending.on_orderly_goodbye()
        self.lose(sender, message.reason)

    def lose(self, incarnation: int, why: str) -> None:
        """Give up a member that is gone: fail all that waits for it. ``why`` completes "worker1 ...".

        Any thread may call this. It waits for a message that is being handled: one from this member must not
        register a call or a fork after what the member holds has been dropped.
        """
        with self._turn:
            self._lose(incarnation, why)

    def _lose(self, incarnation: int, why: str) -> None:
        connection = self.links.lose(incarnation)
        if connection is None:
            return
        record = connection.record
        self.membership.remove(incarnation, why)
        connection.link.close(at_once=True)
        trace.emit("peer.lost", name=record.name, why=why)
        self.references.on_lost(incarnation)
        calls = self.pending.to(incarnation)

        def tell() -> None:
            for call in calls:
                self.outcomes.lost(call, why, others=len(calls) - 1)

        if calls:
            self.submit(tell)
        for listener in list(self._on_lost):
            try:
                listener(record, why)
            except Exception:  # the others are told all the same
                _log.exception("what was to be told of the loss of %s failed", record.name)

    # -- for the layers above -----------------------------------------------------------------

    def call(self, to: To, function: Any, *args: Any, timeout: float = -1.0) -> Future[Any]:
        """Call a function in another agent's process, and return a Future of what it returns.

        Args:
            to: the other agent's name, id or `WorkerInfo`.
            function: it travels by name, or by value if it is one of ``__main__``.
            args: its arguments.
            timeout: seconds until the future fails with `RpcTimeout`; 0 for no limit, negative for the agent's own.

        Raises UnknownWorker where there has never been an agent of that name. The future of one that is gone fails.
        """
        return self.caller.asynchronous(to, function, args, None, timeout)

    def call_each(
        self, workers: Iterable[str], function: Any, *args: Any, timeout: float = -1.0
    ) -> dict[str, Future[Any]]:
        """Call a function in the processes of several agents; return the Futures by name, as `call` makes them.

        An agent to which the call cannot be sent is left out.
        """
        called: dict[str, Future[Any]] = {}
        for name in workers:
            with contextlib.suppress(NbdistError):
                called[name] = self.call(name, function, *args, timeout=timeout)
        return called

    def begin(self, to: To, function: Any, *args: Any, timeout: float = -1.0) -> Latch:
        """Call a function in another agent's process, and return a latch on which one thread can wait for the result.

        A latch costs less than the Future of a `call`, for which anybody may wait. It fails where the agent is gone.
        """
        return self.caller.begin(to, function, args, timeout)

    def ask(self, to: To, function: Any, *args: Any, timeout: float = -1.0) -> Any:
        """Call a function in another agent's process, as `call` does, and wait for what it returns."""
        return self.caller.sync(to, function, args, None, timeout)

    def members(self) -> list[Record]:
        """Return the records of the living members of the world, by id."""
        return self.membership.members()

    def member(self, incarnation: int) -> Record | None:
        """Return the record of the agent of that incarnation; None if it is no member (any more)."""
        return self.membership.get(incarnation)

    def name_of(self, incarnation: int) -> str:
        """Return the name to show for an agent, dead or alive."""
        return self.membership.name_of(incarnation)

    def why_gone(self, name: str) -> str | None:
        """Return what became of the last member of that name, as in "worker1 ..."; None if it lives or never was."""
        return self.membership.why_gone(name)

    def freeze(self, who: int) -> None:
        """Stop the clock of all calls that this agent awaits, because the agent ``who`` has paused a backward pass."""
        self.pending.freeze(who, time.monotonic())

    def thaw(self, who: int) -> None:
        """Let the clock run again that `freeze` has stopped, unless another agent wants it stopped, too."""
        self.pending.thaw(who, time.monotonic())
        self.links.hurry(self.pending.next_due())

    def reap(self) -> None:
        """Tell the owners now which references have been let go of here; otherwise they hear of it within 0.25 s."""
        with self._turn:  # a reader may be about to do the same, and would have sent nothing yet
            self.references.reap()
            self.links.post_waiting()

    # -- looking ------------------------------------------------------------------------------

    def awaited(self) -> list[Pending]:
        """List the calls that this agent has made and that are not answered."""
        return self.pending.all()

    def owned(self) -> list[tuple[GlobalId, Promise[Any], set[int]]]:
        """List the values that live here, or are to, and which other agents hold references to each."""
        return self.references.owned()

    def sent(self) -> dict[str, int]:
        """Return how many bytes have been sent to whom."""
        return self.links.sent()

    def statistics(self) -> dict[str, int]:
        """Counters, for people and tests."""
        peers = self.links.peers()
        forks = self.references.forks
        return {
            "members": len(self.membership.members()),
            "suspects": sum(peer.standing is Standing.SUSPECT for peer in peers),
            "pending_calls": len(self.pending),
            "running_calls": self.exchange.active,
            "threads": self.pool.threads,
            "owned_values": forks.owners,
            "forks_of_owned": forks.forks,
            "used_references": forks.users,
            "pending_references": forks.pending,
            "unacknowledged": sum(peer.outstanding for peer in peers),
            "duplicates_dropped": sum(peer.duplicates for peer in peers),
            "messages_resent": sum(peer.resent for peer in peers),
            "messages_refused": self.refused,
            **self.sharing.statistics(),
        }
