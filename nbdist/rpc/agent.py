"""The agent: the RPC endpoint of one worker, which makes the other parts and joins them.

Every message passes here. `Agent.post` (the method of `Links`) numbers it, keeps a copy and sends it, on the caller's
thread. One or two threads of the pool run `Agent.read`, which receives messages. Then, one thread at a time, the reader
asks the `Peer` whether the message is new, and calls the handler for the message's type. A handler is quick and runs no
user code. If user code must run, the handler returns a job, and the thread that has read the message runs it. Another
thread reads the next message meanwhile, unless the job is short (`nbdist.rpc.pool`).

The locks on the way of a call:

======================  =========================================================  ==================================
lock                    protects                                                   held while
======================  =========================================================  ==================================
`Agent._turn`           no data: one message, loss or timer is handled at a time   a handler runs
`Exchange.lock`         calls, references, which thread runs which call            one event of the exchange
`Links._lock`           connections, and the protocol state of each (`wire.peer`)  a message is numbered or checked
======================  =========================================================  ==================================

A thread takes `Agent._turn` first, then one of the other two; it never holds both of these. It releases both before it
runs a user's function, a pickler or a send. But some code does run while they are held:

- A user's ``__del__``, which Python may call anywhere. A call that it makes under `Links._lock` is sent by another
  thread (`nbdist.finalisers`); `Exchange.lock` is reentrant.
- Under `Links._lock`: the code that marks blocks in shared memory as sent, and the listeners of `nbdist.trace`.
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
from nbdist.channel.contract import Channel
from nbdist.channel.process_watch import ProcessWatch
from nbdist.channel.shared_memory.arena import Arena
from nbdist.channel.shared_memory.gpu_arena import Gpus
from nbdist.errors import NbdistError
from nbdist.finalisers import this_thread
from nbdist.ids import GlobalId, IdSource
from nbdist.rpc.calls.answers import Answers
from nbdist.rpc.calls.caller import Caller, To
from nbdist.rpc.calls.executor import Executor
from nbdist.rpc.calls.outcomes import Outcomes
from nbdist.rpc.calls.repeats import Repeats
from nbdist.rpc.calls.sender import Sender
from nbdist.rpc.calls.stopping import Stopping
from nbdist.rpc.calls.waiting_reader import WaitingReader
from nbdist.rpc.core.exchange import Exchange
from nbdist.rpc.core.members import Membership
from nbdist.rpc.core.pending import Pending
from nbdist.rpc.futures import Future
from nbdist.rpc.here import Active, here
from nbdist.rpc.latch import Latch
from nbdist.rpc.links import Links
from nbdist.rpc.named import NamedObject, NamedObjects
from nbdist.rpc.options import RpcBackendOptions
from nbdist.rpc.pool import Job, Pool
from nbdist.rpc.promise import Promise
from nbdist.rpc.recording import CallRecorder
from nbdist.rpc.references.reference_table import References
from nbdist.rpc.references.rref import Home, refer
from nbdist.rpc.shared_tensors import Sharing
from nbdist.rpc.thread_switching import switching
from nbdist.rpc.world.handshake import Handshake
from nbdist.rpc.world.shutdown import Shutdown
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
    Silence,
    Stop,
    UserDelete,
    Welcome,
    decode,
)
from nbdist.wire.peer import PeerLimits, Standing

Handler = Callable[[Any, int, list[bytes]], Job | None]
"""Handles a message: ``handler(message, sender's incarnation, frames after the envelope)``. It may return a job."""

_log = logging.getLogger("nbdist.rpc")


def _drop(listeners: list[Any], listener: Any) -> None:
    """Remove a listener from a list. Does nothing if it is not in the list any more."""
    with contextlib.suppress(ValueError):  # removed before
        listeners.remove(listener)


def active_agent() -> Agent | None:
    """Return the agent for which the calling thread runs; None in a thread that belongs to no agent.

    An agent makes itself the agent of its own threads; other threads use `Agent.activate`.
    """
    agent: Agent | None = here.agent
    return agent


_agents: weakref.WeakSet[Agent] = weakref.WeakSet()
"""All agents of this process. A forked child finds its parent's agents here, and marks them."""


def _after_fork() -> None:
    """Mark the parent's agents as `forked` in a forked child, and free each `Exchange.lock`.

    Python calls this in the child. A thread of the parent, which the child does not have, may have held the lock.
    `Agent.close` leaves the sockets and threads of a forked agent alone: they belong to the parent.
    """
    switching.relax()  # nobody reads in the child, so nobody would do it later
    for agent in list(_agents):
        agent.forked = True
        # A thread of the parent may hold the lock. The child does not have that thread.
        agent.exchange.lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_after_fork)


class Agent:
    """A member of an RPC world: one worker's endpoint, made of the parts in this package."""

    def __init__(
        self,
        me: Record,
        channel: Channel,
        options: RpcBackendOptions,
        arena: Arena | None = None,
        gpus: Gpus | None = None,
    ) -> None:
        """Make the agent and its parts; it neither reads nor sends before `start`.

        ``me`` describes this agent to the others. The agent owns ``channel``, ``arena`` and ``gpus`` from now on, and
        closes them. ``arena`` is shared memory for large tensors on the CPU, ``gpus`` shared memory for tensors on
        GPUs; each is None if tensors of that kind are not shared.
        """
        self.me = me
        """The record that describes this agent to the others."""
        self.options = options
        self.channel = channel
        """Moves frames to and from other agents; closed with this agent."""
        self.pid = os.getpid()
        """The id of the process that made the agent. In a forked child, `os.getpid` differs from it."""
        self.forked = False
        """True in a forked child of the agent's process: the threads and sockets of the agent are the parent's."""
        self.refused = 0
        """The number of dropped frames that are no message, plus the number of refused messages (`Agent._refuse`)."""
        self.hosted = False
        """True if a cluster owns this agent: then the user's `shutdown` does not end it."""
        self.explain_end: Callable[[Record], str] | None = None
        """Returns how a member's process ended, given its record; an empty text if that is not known.

        The text completes "worker1 ...". A cluster sets this function. It may block for a moment.
        """
        self.directory: Path | None = None
        """The directory for files that must be deleted when this process ends; None for the temporary directory."""
        self._cast_handlers: dict[str, Handler] = {}
        """The handlers of one-way messages, by topic."""
        self._at_close: list[Callable[[], None]] = []
        """The functions that `close` calls last."""
        self._turn = threading.RLock()
        """Held while a message is handled, a timer is run, or a member is lost: one of these at a time.

        `Shutdown` also holds it while it counts unfinished calls and messages here, so that no message is half handled
        while it counts.
        """
        self.membership = Membership(me)
        """The members of the world, and the names of those that are gone."""
        self.named = NamedObjects()
        """The objects of this process whose methods other members may call: see `at`."""
        self.ids = IdSource(me.id, me.incarnation)
        """Makes ids for values and forks, unique in the world."""
        self.exchange = Exchange(me.incarnation, self.ids)
        """Decides what happens next to calls and references; has the lock around them."""
        self.pending = self.exchange.calls
        """The calls that this agent has made and that have no answer yet."""
        self.processes = ProcessWatch(self._on_process_end)
        """Watches the processes of members on this host, and reports each that ends."""
        self.sharing = Sharing(me, arena, reads=options.arena_bytes != 0, gpus=gpus)
        """Passes large tensors to agents of this host through shared memory."""
        self.links = Links(
            channel,
            PeerLimits(options.suspect_after, options.lost_after, retries=options.retries),
            self.membership,
            self.pending,
            self.sharing,
            watch=self.processes.watch,
            on_undelivered=self._on_undelivered,
        )
        """The connections to the other agents, and the timers."""
        self.post = self.links.post
        """Sends a message to an agent, by its incarnation (`Links.post`)."""
        self.pool = Pool(
            options.num_worker_threads,
            self.read,
            channel.wake,
            f"nbdist-{me.name}",
            readers=channel.readers,
            has_more=channel.has_more,
            begin=self._adopt,
        )
        """The threads of this agent."""
        self.references = References(self.ids, self.exchange, self.membership, self.links, self.submit)
        """The values that this agent owns, and the references that it uses."""
        self._on_lost: list[Callable[[Record, str], None]] = [self.sharing.on_lost]
        """The listeners that are called with the record of a lost member, and the reason."""
        self._on_joined: list[Callable[[Record], object]] = []
        """The listeners that are called with the record of a new member."""
        self.recorder: CallRecorder = registry.make_recorder(self)
        """Records calls for backward passes; made by `nbdist.autograd`."""
        self.executor = Executor(
            self.exchange,
            self.membership,
            self.links,
            self.references,
            self.recorder,
            Answers(me.name, self.exchange, self.links, self.references, self.sharing, self.recorder, self.activate),
        )
        """Runs the calls that other agents make to this one."""
        self.outcomes = Outcomes(me, self.pending, self.references, self.links, self.recorder, self.submit)
        """Ends the calls that this agent has made."""
        self.sender = Sender(
            me,
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
        """Encodes and posts calls."""
        self.caller = Caller(self.membership, self.ids, self.references, self.outcomes, self.sender)
        """Makes calls; the functions of `nbdist.rpc.api` use it."""
        self.home = Home(self.references, self.caller, self.recorder.backward)
        """This agent as its `RRef` objects see it."""
        self.references.refer = partial(refer, self.home)
        self.find, self.timeout_of = self.caller.find, self.sender.timeout_of
        if channel.readers > 1:
            self.caller.read_as_guest = WaitingReader(channel, self.links, self._read_as_guest, self.submit).read
            self.caller.expect, self.sender.expect_no_more = channel.expect, channel.expect_no_more
        self.stopping = self.executor.stopping = Stopping(
            me,
            self.exchange,
            self.links,
            call=self.caller.sync,
            give_up=self.outcomes.interrupt,
            submit=self.submit,
            is_blocked=self.pool.is_blocked,
        )
        """Stops calls after Ctrl-C, here and on other workers."""
        self.handshake = Handshake(
            self.membership,
            self.links,
            self.sharing,
            lose=self.lose,
            ended=self._on_process_end,
            joined=self._tell_joined,
            lost_after=options.lost_after,
        )
        """Joins the world, and lets new members in."""
        self.ending = Shutdown(
            self.membership, self.links, self.exchange, self.references, self._turn, self.executor.doing
        )
        """Ends the world in order."""
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
            Silence: self._on_silence,
        }
        """The function that handles each type of message."""
        _agents.add(self)

    def __repr__(self) -> str:
        return f"<Agent {self.me.name!r} (id {self.me.id}){' closed' if self.closed else ''}>"

    # -- start and end ------------------------------------------------------------------------

    @property
    def rpc_timeout(self) -> float:
        """The time limit in seconds of a call that names none; 0 for no limit."""
        return self.sender.rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float) -> None:
        self.sender.rpc_timeout = seconds

    @property
    def read_as_guest(self) -> Callable[[Latch], None] | None:
        """The function with which a thread that waits for an answer reads messages itself; None if it cannot.

        It takes the latch on which the thread waits, and reads until the latch is settled. It may return earlier; then
        the thread sleeps on the latch. None if the channel lets only one thread read at a time.
        """
        return self.caller.read_as_guest

    def know_cells(
        self,
        origin: Callable[[], str] | None,
        around: Callable[[str], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        """Attach to every call the cell for which it is made.

        ``origin()`` returns the id of the cell for which the calling thread works; the id travels with every call.
        With None, calls name no cell. ``around(id)`` returns a context manager to enter around each call that runs
        here; ``id`` is empty if no cell made the call. With None, nothing is entered.
        """
        self.sender.origin = origin
        self.executor.around = around

    @property
    def closed(self) -> bool:
        """True once the agent has ended. Calls then fail with `WorkerLost`."""
        return self.links.closed

    def start(self) -> None:
        """Start the threads that read. `Agent.handshake` then joins the world.

        The agent is connected to itself: calls to itself take the same way as all others.
        """
        self.links.connect(self.me)
        self.sharing.meet_self()
        self.pool.start()

    def handle_cast(self, topic: str, handler: Handler) -> None:
        """Call ``handler(message, sender, frames)`` for every one-way message of a topic; replaces an earlier handler.

        ``sender`` is the sender's incarnation, ``frames`` are the frames after the envelope. The handler runs in the
        reading thread, so it must be quick; it may return a job (a function without arguments), which a thread of the
        pool runs.
        """
        self._cast_handlers[topic] = handler

    def _on_cast(self, message: Cast, sender: int, frames: list[bytes]) -> Job | None:
        """Pass a one-way message to the handler of its topic; return the job that the handler returns, if any.

        A message whose topic has no handler is logged and dropped.
        """
        handler = self._cast_handlers.get(message.topic)
        if handler is None:
            _log.warning("%s has no handler for %s", self.me.name, message.topic)
            return None
        return handler(message, sender, frames)

    def on_lost(self, listener: Callable[[Record, str], None]) -> Callable[[], None]:
        """Call ``listener(record, why)`` when a member is lost; return a function that removes the listener.

        The listener runs under `_turn`, in whichever thread notices the loss, so it must be quick. Its errors are
        logged.
        """
        self._on_lost.append(listener)
        return partial(_drop, self._on_lost, listener)

    def on_joined(self, listener: Callable[[Record], object]) -> Callable[[], None]:
        """Call ``listener(record)`` when a member joins the world; return a function that removes the listener.

        The new member can be called by then. A restarted worker is a new member, too. The listener runs in the thread
        that reads the member's greeting, while other messages wait, so it must be quick. Its errors are logged.
        """
        self._on_joined.append(listener)
        return partial(_drop, self._on_joined, listener)

    def _tell_joined(self, record: Record) -> None:
        """Call the listeners of `on_joined`, all of them even if one fails."""
        for listener in list(self._on_joined):
            try:
                listener(record)
            except Exception:
                _log.exception("a listener to the arrival of %s failed", record.name)

    def at_close(self, action: Callable[[], None]) -> Callable[[], None]:
        """Call ``action`` at the end of `close`, in the thread that does it; return a function that removes the action.

        The action must not raise: `close` would skip the actions after it. After `close`, the action never runs.
        """
        self._at_close.append(action)
        return partial(_drop, self._at_close, action)

    def activate(self) -> contextlib.AbstractContextManager[Agent]:
        """Return a context manager that makes this the agent of the calling thread."""
        return Active(self)

    def submit(self, job: Job) -> None:
        """Run a job, a function without arguments, on a thread of the pool. Its errors are logged.

        After `close` the job may never run.
        """
        self.pool.submit(job)

    def close(self, why: str) -> None:
        """End at once: say goodbye to the other members, fail all pending calls with `WorkerLost`, stop the threads.

        ``why`` completes "worker0 ..." in the errors. A second call does nothing. Waits up to 2 s for threads that run
        user code. In a forked child, only fails the child's copies of the calls and references: the sockets and threads
        belong to the parent.
        """
        if not self.links.close(None if self.forked else Goodbye(why, self.ending.completed)):
            return
        self.outcomes.close(why)
        self.references.clear()
        if self.forked:
            return  # the sockets and threads belong to the parent
        # First end the threads that use the channel and the memory, then close these.
        self.processes.close()
        self.pool.close(2.0)
        self.outcomes.close(why)  # again: a reader may have taken calls out of the table, for a job that will not run
        self.channel.close()
        self.sharing.close()
        for action in list(self._at_close):
            action()
        trace.emit("agent.closed", agent=self.me.name, why=why)

    # -- reading ------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Make this agent the active one of a new thread of the pool."""
        here.agent = self

    def read(self, timeout: float | None, soon: bool = False, guest: bool = False) -> Job | None:
        """Do the work that is due, then receive one message and handle it; return a job if user code has to run.

        Work that may be due: release collected references, return borrowed shared memory, resend, ping, fail calls that
        have timed out. Waits for a message ``timeout`` seconds at most, and never longer than 0.2 s (`Links.nap`);
        returns None if none has arrived. ``guest`` marks a thread that is not of the pool and reads beside the pool's
        threads; there may be one such thread at a time. ``soon`` lets the channel poll for a moment before it sleeps
        (`Channel.receive`).
        """
        now = time.monotonic()
        links, sharing = self.links, self.sharing
        # Tell the owners of references that have been collected.
        if self.references.holds.ended:
            with self._turn:
                self.references.release_ended()
        if sharing.ended or sharing.owing or now >= sharing.trim_at:
            self._give_back(now)
        if now >= links.due:
            with self._turn:
                self._run_due(now)
        if now >= switching.look_at:
            switching.look(now, self.exchange.active + self.pool.active > 0)
        frames = self.channel.receive(links.nap(now, timeout), guest, soon)
        if not frames:
            return None
        with self._turn:
            return self._take(frames)

    def _read_as_guest(self, timeout: float | None) -> Job | None:
        """Call `read` in a thread that waits for an answer and is not one of the agent's threads."""
        before, here.agent = here.agent, self
        was_closed = this_thread.is_closed
        try:
            this_thread.is_closed = True
            return self.read(timeout, guest=True)
        finally:
            this_thread.is_closed = was_closed
            here.agent = before

    def _give_back(self, now: float) -> None:
        """Return shared memory to its owners if no other message has taken it back in time.

        Usually a call or an answer to the owner takes it back. Also frees shared memory that was not used lately. The
        reading thread calls this between two messages.
        """
        due, later = self.sharing.tend(now)
        for to, message in due:
            with contextlib.suppress(NbdistError):  # an owner that is gone does not need them
                self.post(to, message)
        self.links.note(later)

    def _run_due(self, now: float) -> None:
        """Resend and ping where it is time, `lose` silent members, and end calls that have timed out.

        The caller holds `_turn`.
        """
        lost, silent = self.links.tick(now, self.exchange.awaited)
        for incarnation, why in lost:
            self.lose(incarnation, why)
        for incarnation, seconds in silent:
            others = [record.incarnation for record in self.membership.others()]
            self._tell_of_silence(Silence(incarnation, seconds), others)
        self.outcomes.run_due(now)
        self.links.set_clock()

    def _tell_of_silence(self, message: Silence, others: Iterable[int]) -> None:
        """Send others the news that a member is silent, so that each asks that member itself."""
        for other in others:
            if other != message.of:
                with contextlib.suppress(NbdistError):  # it is gone, too
                    self.links.post(other, message)

    def _on_silence(self, message: Silence, sender: int, _: list[bytes]) -> None:
        """Ask a member that the sender does not hear for a sign of life; or lose a member that has lost this agent.

        An agent A that has lost B sends B nothing more, so B would wait for A until it times out. An agent that hears
        both, such as this one, therefore passes A's news on to B, and B then loses A.
        """
        if message.of == self.me.incarnation:
            if message.lost_by:
                self.lose(
                    message.lost_by, f"has lost the connection to {self.me.name}, and has given {self.me.name} up"
                )
        elif self.links.doubt(message.of, message.silent) and message.lost_by == sender:
            with contextlib.suppress(NbdistError):
                self.links.post(message.of, message)

    def _take(self, frames: list[bytes]) -> Job | None:
        """Decode one message, call its handler, and return the handler's job.

        The caller holds `_turn`. Frames that do not decode are dropped, and so is a message that has been received
        before. The handshake gets a `Refused`, and a `Hello` from an agent that is not connected. Any other message is
        refused (`_refuse`) if its sender is not connected, or if it is addressed to another incarnation than this
        agent's.
        """
        try:
            envelope = decode(frames[0])
        except NOT_A_MESSAGE as error:
            self.refused += 1
            _log.warning("%s dropped a damaged message, or one of another version (use one): %s", self.me.name, error)
            return None
        message = envelope.message
        # The sender must be connected, or introduce itself; the receiver must be this incarnation.
        connection = self.links.connections.get(envelope.sender)
        if isinstance(message, Refused):  # perhaps from an agent that now listens at the address of a dead one
            if envelope.receiver == self.me.incarnation:
                self.handshake.on_refused(message)
            return None
        if connection is None and isinstance(message, Hello):
            self.handshake.on_stranger(message)
            return None
        if connection is None or envelope.receiver != self.me.incarnation:
            self._refuse(envelope)
            return None
        # A message that was sent twice is handled once.
        if not self.links.accept(connection, envelope, sum(map(len, frames))):
            return None
        if envelope.seq:  # no ping: somebody waits for what follows
            switching.is_used = True
            if switching.is_relaxed:
                switching.hurry()
        if envelope.back:
            self.sharing.on_back(envelope.sender, envelope.back)
        for delete in envelope.deletes:
            self.references.on_user_delete(delete, envelope.sender, [])
        handler = self._handlers.get(type(message))
        if handler is None:
            _log.warning("%s has no handler for %s", self.me.name, message.kind)
            return None
        # Map the tensors in shared memory. This counts as borrowing the memory even if the handler fails.
        if isinstance(message, Carrier) and message.payload.places:
            memory = self.sharing.begin(connection.record, message.payload.places)
            if memory is None:
                return None  # the sender died, and its memory with it: this agent will notice that in a moment
            frames += memory  # type: ignore[arg-type]
        try:
            return handler(message, envelope.sender, frames[1:])
        except NbdistError as error:
            _log.warning(
                "%s dropped a message (%s) of %s: %s", self.me.name, message.kind, connection.record.name, error
            )
            return None

    def _refuse(self, envelope: Envelope) -> None:
        """Answer a message from a past incarnation, or to a past incarnation of this agent, with `Refused`.

        So its sender learns that it is out of date. A goodbye gets no answer, and neither does an agent that was never
        connected here and never a member.
        """
        self.refused += 1
        if isinstance(envelope.message, Goodbye):
            return
        record = self.links.connected(envelope.sender) or self.membership.ever(envelope.sender)
        if record is not None:
            reason = f"{self.me.name} does not keep this connection (any more)"
            self.links.refuse(record, Refused(envelope.receiver, reason))

    # -- losing members -----------------------------------------------------------------------

    def _on_process_end(self, pid: int) -> None:
        """Lose the members on this host whose process is ``pid``, because it has ended.

        The thread of `ProcessWatch` calls this, so that the death of a local worker is noticed at once.
        """
        for incarnation, connection in list(self.links.connections.items()):
            if connection.record.pid == pid and connection.record.host == self.me.host:
                how = self.explain_end(connection.record) if self.explain_end is not None else ""
                self.lose(incarnation, how or f"died (process {pid} has ended)")

    def _on_ping(self, message: Ping, sender: int, _: list[bytes]) -> None:
        """Answer a ping with a short text that says what runs here."""
        with contextlib.suppress(NbdistError):
            self.links.post(
                sender, Pong(message.number, self.executor.doing(), message.is_large), is_large=message.is_large
            )

    def _on_stop(self, message: Stop, sender: int, frames: list[bytes]) -> None:
        """Stop a call whose caller has given up on it.

        If this agent had refused the call because it lacked a definition, its caller will not repeat it. Then the value
        that the call should have made fails for everyone who waits for it.
        """
        self.references.abandon(sender, message.id)
        self.stopping.on_stop(message, sender, frames)

    def _on_undelivered(self, call: Call) -> None:
        """Fail a call that the callee has not acknowledged after all tries.

        A thread of the pool fails it, because `Links` may call this method under its lock.
        """
        self.submit(partial(self.outcomes.undelivered, call.id))

    def _on_goodbye(self, message: Goodbye, sender: int, _: list[bytes]) -> None:
        """Lose a member that leaves, with the reason that it gives."""
        if message.orderly:
            self.ending.on_orderly_goodbye()
        self.lose(sender, message.reason)

    def lose(self, incarnation: int, why: str) -> None:
        """Remove a member that is gone, and fail everything that waits for it. ``why`` completes "worker1 ...".

        Any thread may call this. It waits until the message that is being handled is finished: otherwise a message of
        the lost member could register a call or a fork after the member's calls and forks have been dropped. A second
        call does nothing.
        """
        with self._turn:
            self._lose(incarnation, why)

    def _lose(self, incarnation: int, why: str) -> None:
        """Do the work of `lose`. The caller holds `_turn`.

        A thread of the pool fails the calls that wait for the member, without that lock.
        """
        connection = self.links.lose(incarnation)
        if connection is None:
            return
        record = connection.record
        self.membership.remove(incarnation, why)
        connection.close()
        trace.emit("peer.lost", name=record.name, why=why)
        self.references.on_lost(incarnation)
        calls = self.pending.to(incarnation)

        def tell() -> None:
            """Fail the calls to the lost member."""
            for call in calls:
                self.outcomes.lost(call, why, others=len(calls) - 1)

        if calls:
            self.submit(tell)
        for listener in list(self._on_lost):
            try:
                listener(record, why)
            except Exception:  # call the other listeners nevertheless
                _log.exception("a listener to the loss of %s failed", record.name)
        # In a large world, a neighbour may have missed the member's goodbye and not watch the member. Make it ask.
        self._tell_of_silence(Silence(incarnation, 0.0, self.me.incarnation), self.links.neighbours())

    # -- for the layers above -----------------------------------------------------------------

    def call(self, to: To, function: Any, *args: Any, timeout: float = -1.0) -> Future[Any]:
        """Call a function in another agent's process; return a Future of its result.

        Args:
            to: The other agent's name, id or `WorkerInfo`.
            function: The function. It travels by name if the other agent can find it by its name, else by value.
            args: Its arguments.
            timeout: Seconds until the future fails with `RpcTimeout`; 0 for no limit, negative for the agent's default.

        Returns:
            A future. If the other agent is gone, the future has failed with `WorkerLost`.

        Raises:
            UnknownWorker: The world never had an agent of that name or id.
            EncodeError: An argument cannot be sent.
        """
        return self.caller.asynchronous(to, function, args, None, timeout)

    def begin(self, to: To, function: Any, *args: Any, timeout: float = -1.0) -> Latch:
        """Call a function in another agent's process; return a latch on which one thread waits for the result.

        A latch costs less than the Future of `call`, on which any thread may wait. ``timeout`` is as in `call`. Raises
        the errors of `call`, and WorkerLost if the other agent is gone: then the function does not run there.
        """
        return self.caller.begin(to, function, args, timeout)

    def ask(self, to: To, function: Any, *args: Any, timeout: float = -1.0) -> Any:
        """Call a function in another agent's process, as `call` does; wait for its result and return it.

        Raises the function's error, and the errors of `call` and of its future.
        """
        return self.caller.sync(to, function, args, None, timeout)

    def at(self, to: str, name: str) -> NamedObject:
        """Return the object that the agent called ``to`` has published as ``name``, for calls of its methods."""
        return NamedObject(self.caller, to, name)

    def members(self) -> list[Record]:
        """Return the records of the living members of the world, in the order of their ids."""
        return self.membership.members()

    def member(self, incarnation: int) -> Record | None:
        """Return the record of the agent of that incarnation; None if it is no member (any more)."""
        return self.membership.get(incarnation)

    def name_of(self, incarnation: int) -> str:
        """Return the name to show for an agent, dead or alive; for an unknown incarnation, a text that says so."""
        return self.membership.name_of(incarnation)

    def fate(self, incarnation: int) -> str | None:
        """Return a text that completes "worker1 ..." with what happened to a former member.

        None if the member lives, or the incarnation was never a member.
        """
        return self.membership.fate(incarnation)

    def freeze(self, who: int) -> None:
        """Stop the time limits of all calls that this agent awaits, because the agent ``who`` paused a backward pass.

        ``who`` is the incarnation of that agent. No call times out until `thaw`.
        """
        self.pending.freeze(who, time.monotonic())

    def thaw(self, who: int) -> None:
        """Restart the time limits that `freeze` has stopped, unless another agent still wants them stopped.

        Does nothing if they were not stopped for ``who``.
        """
        self.pending.thaw(who, time.monotonic())
        self.links.hurry(self.pending.next_due())

    def reap(self) -> None:
        """Tell the owners now which references were released here; without this call they learn it within 0.25 s.

        Waits until the message that is being handled is finished.
        """
        with self._turn:  # a reader may have taken the released references, and not sent them yet
            self.references.reap()
            self.links.post_waiting()

    # -- inspecting ---------------------------------------------------------------------------

    def awaited(self) -> list[Pending]:
        """List the calls that this agent has made and that have no answer yet."""
        return self.pending.all()

    def owned(self) -> list[tuple[GlobalId, Promise[Any], set[int]]]:
        """List the values that this agent owns or will own: id, promise, and the other agents with references to it.

        The agents are given by their incarnations.
        """
        return self.references.owned()

    def sent(self) -> dict[str, int]:
        """Return how many bytes were sent to each connected agent, by its name, tensors in shared memory included.

        Lost agents are left out.
        """
        return self.links.sent()

    def statistics(self) -> dict[str, int]:
        """Return counters by name: of members, calls, threads, references, messages and shared memory.

        For displays and tests. Some of the names are ``pending_calls``, ``threads`` and ``owned_values``.
        """
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
            "used_references": len(forks.users),
            "pending_references": forks.pending,
            "unacknowledged": sum(peer.outstanding for peer in peers),
            "duplicates_dropped": sum(peer.duplicates for peer in peers),
            "messages_resent": sum(peer.resent for peer in peers),
            "messages_refused": self.refused,
            **self.sharing.statistics(),
        }
