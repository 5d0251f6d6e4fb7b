"""The agent: the RPC endpoint of one worker, which makes the other parts and joins them.

All messages arrive here. They leave by `Links.post`, which numbers a message, keeps a copy and sends it, on the
caller's thread. One or two threads of the pool run `Agent.read`, which receives messages. Then, one thread at a time,
the reader asks the `Peer` whether the message is new, and calls the handler for the message's type. A handler is quick
and runs no user code. If user code must run, the handler returns a job, and the thread that has read the message runs
it. Another thread reads the next message meanwhile, unless the job is short (`nbdist.rpc.pool`).

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
from collections.abc import Callable, Iterable, Sequence
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
from nbdist.ids import IdSource
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
from nbdist.rpc.futures import Future
from nbdist.rpc.here import Active, here
from nbdist.rpc.latch import Latch
from nbdist.rpc.links import Links, try_post
from nbdist.rpc.named import NamedObject, NamedObjects
from nbdist.rpc.options import RpcBackendOptions, time_limit
from nbdist.rpc.pool import Job, Pool
from nbdist.rpc.recording import CallRecorder
from nbdist.rpc.references.reference_table import References
from nbdist.rpc.references.rref import Home, refer
from nbdist.rpc.shared_tensors import Sharing
from nbdist.rpc.thread_switching import switching
from nbdist.rpc.world.handshake import Handshake
from nbdist.rpc.world.shutdown import Shutdown
from nbdist.wire import messages
from nbdist.wire.messages import Call, Cast, Envelope, Goodbye, Hello, Ping, Pong, Record, Refused, Silence, Stop
from nbdist.wire.peer import PeerLimits, Standing

Handler = Callable[[Any, int, list[bytes]], Job | None]
"""Handles a message: ``handler(message, sender's incarnation, frames after the envelope)``. It may return a job."""

_log = logging.getLogger("nbdist.rpc")


def _drop(listeners: list[Any], listener: Any) -> None:
    with contextlib.suppress(ValueError):  # removed before
        listeners.remove(listener)


def _tell(listeners: Sequence[Callable[..., object]], event: str, record: Record, *details: str) -> None:
    for listener in list(listeners):
        try:
            listener(record, *details)
        except Exception:  # a listener of a layer above, whatever it raises: the others are still called
            _log.exception("a listener to the %s of %s failed", event, record.name)


def active_agent() -> Agent | None:
    """Return the agent for which the calling thread runs; None in a thread that belongs to no agent."""
    agent: Agent | None = here.agent
    return agent


# All agents of this process, so that a forked child can mark its parent's.
_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


def _after_fork() -> None:
    """Mark the parent's agents as `forked` in a forked child, and free each `Exchange.lock`."""
    switching.relax()  # nobody reads in the child, so nobody would do it later
    for agent in list(_agents):
        agent.forked = True
        # A thread of the parent may hold the lock. The child does not have that thread.
        agent.exchange.lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_after_fork)


class Agent:
    """A member of an RPC world: one worker's endpoint, made of the parts in this package.

    Any thread may call its methods, except `read`. A ``timeout`` is in seconds: negative for the agent's default, 0 for
    no limit. An agent given as an int is its incarnation. A ``why`` completes a text such as "worker1 ...". A
    *listener* runs in whichever thread notices the event, while other messages wait, so it must be quick; its errors
    are logged. The function that registers a listener returns one that removes it.
    """

    def __init__(
        self,
        me: Record,
        channel: Channel,
        options: RpcBackendOptions,
        arena: Arena | None = None,
        gpus: Gpus | None = None,
    ) -> None:
        """Make the agent and its parts; it neither reads nor sends before `start`.

        The agent owns ``channel``, ``arena`` and ``gpus`` from now on, and closes them. ``arena`` is shared memory for
        large tensors on the CPU, ``gpus`` for tensors on GPUs; None if tensors of that kind are not shared.
        """
        self.me = me
        self.options = options
        self.channel = channel
        self.pid = os.getpid()  # in a forked child, `os.getpid` differs from it
        self.forked = False
        """True in a forked child of the agent's process: the threads and sockets of the agent are the parent's."""
        self.refused = 0
        """The number of dropped frames that are no message, plus the number of refused messages (`Agent._refuse`)."""
        self.hosted = False
        """True if a cluster owns this agent: then the user's `shutdown` does not end it."""
        self.explain_end: Callable[[Record], str] | None = None
        """Returns how a member's process ended, as a ``why``; "" if that is not known. A cluster sets it. May block."""
        self.directory: Path | None = None
        """The directory for files that must be deleted when this process ends; None for the temporary directory."""
        self._cast_handlers: dict[str, Handler] = {}  # by topic
        self._at_close: list[Callable[[], None]] = []
        # Held while a message is handled, a timer is run, or a member is lost. `Shutdown` also holds it while it counts
        # unfinished calls and messages, so that no message is half handled meanwhile.
        self._turn = threading.RLock()
        self.membership = membership = Membership(me)
        self.members = membership.members
        """Returns the records of the living members of the world, in the order of their ids."""
        self.member = membership.get
        """Returns the record of the agent of an incarnation; None if it is no member (any more)."""
        self.name_of = membership.name_of
        """Returns the name to show for an incarnation, dead or alive; for an unknown one, a text that says so."""
        self.fate = membership.fate
        """Returns a ``why``: what happened to a former member. None if the member lives, or was never a member."""
        self.named = NamedObjects()
        """The objects of this process whose methods other members may call: see `at`."""
        self.ids = ids = IdSource(me.id, me.incarnation)
        self.exchange = exchange = Exchange(me.incarnation, ids)  # has the lock around calls, references and values
        self.pending = pending = exchange.calls
        self.awaited = pending.all
        """Lists the calls that this agent has made and that have no answer yet."""
        self.processes = ProcessWatch(self._on_process_end)
        self.sharing = sharing = Sharing(me, arena, reads=options.arena_bytes != 0, gpus=gpus)
        limits = PeerLimits(options.suspect_after, options.lost_after, retries=options.retries)
        watch, on_undelivered = self.processes.watch, self._on_undelivered
        self.links = links = Links(channel, limits, membership, pending, sharing, watch, on_undelivered)
        self.post = links.post
        self.sent = links.sent
        """Returns how many bytes were sent to each connected agent, by name, tensors in shared memory included."""
        self.pool = Pool(
            options.num_worker_threads,
            self.read,
            channel.wake,
            f"nbdist-{me.name}",
            readers=channel.readers,
            has_more=channel.has_more,
            begin=self._adopt,
        )
        self.references = references = References(ids, exchange, membership, links, self.submit)
        self.owned = references.owned
        """Lists the values that this agent owns or will own: id, promise, and the other agents that refer to it."""
        self._on_lost: list[Callable[[Record, str], None]] = [sharing.on_lost]
        self._on_joined: list[Callable[[Record], object]] = []
        self.recorder: CallRecorder = registry.Recorder(self)
        recorder, spaces = self.recorder, sharing.spaces
        answers = Answers(me.name, exchange, links, references, spaces, recorder, self.activate)
        self.executor = Executor(exchange, membership, links, references, recorder, answers)
        self.outcomes = outcomes = Outcomes(me, pending, references, links, recorder, self.submit)
        repeats, is_deciding = Repeats(pending, links, outcomes), exchange.is_deciding
        timeout = time_limit(options.rpc_timeout)
        self.sender = Sender(
            me, timeout, pending, links, references, spaces, recorder, repeats, is_deciding, outcomes.unsent
        )
        self.caller = Caller(membership, ids, references, outcomes, self.sender)
        self.home = Home(references, self.caller, recorder.backward)
        """This agent as its `RRef` objects see it."""
        references.refer = partial(refer, self.home)  # set now, since `Home` needs the references
        self.find, self.timeout_of = self.caller.find, self.sender.timeout_of
        self.read_as_guest: Callable[[Latch], None] | None = None
        """Lets a thread that waits for an answer read messages itself; None if only the pool's threads may read."""
        self.dismiss_guest: Callable[[], None] = lambda: None
        """Makes the thread that reads as a guest sleep on its latch instead."""
        # A channel that lets only one thread read at a time has no place for a guest.
        if channel.readers > 1:
            guest = WaitingReader(channel, links, self._read_one_as_guest, self.submit)
            self.read_as_guest = self.caller.read_as_guest = guest.read
            self.dismiss_guest = guest.dismiss
            self.caller.expect, self.sender.expect_no_more = channel.expect, channel.expect_no_more
        self.stopping = self.executor.stopping = Stopping(
            me,
            exchange,
            links,
            call=self.caller.sync,
            give_up=outcomes.interrupt,
            submit=self.submit,
            is_blocked=self.pool.is_blocked,
        )
        self.handshake = Handshake(
            membership,
            links,
            sharing,
            lose=self.lose,
            ended=self._on_process_end,
            joined=partial(_tell, self._on_joined, "arrival"),
            lost_after=options.lost_after,
        )
        self.ending = Shutdown(membership, links, exchange, references, self._turn, self.executor.doing)
        self._on_lost += [self.handshake.on_lost, self.ending.on_lost]
        self._handlers: dict[type, Handler] = {
            messages.Nothing: lambda *_: None,  # an acknowledgement: the envelope has said it all
            messages.Hello: self.handshake.on_hello,
            messages.Welcome: self.handshake.on_welcome,
            messages.Ready: self.handshake.on_ready,
            messages.Goodbye: self._on_goodbye,
            messages.Ping: self._on_ping,
            messages.Pong: self.links.on_pong,
            messages.Call: self.executor.on_call,
            messages.Reply: self.outcomes.on_reply,
            messages.Stop: self._on_stop,
            messages.ForkRequest: self.references.on_fork_request,
            messages.ForkConfirm: self.references.on_fork_confirm,
            messages.ChildAccept: self.references.on_child_accept,
            messages.UserDelete: self.references.on_user_delete,
            messages.RRefState: self.references.on_state,
            messages.GiveBack: self.sharing.on_give_back,
            messages.Cast: self._on_cast,
            messages.AskShutdown: self.ending.on_ask,
            messages.ShutdownState: self.ending.on_state,
            messages.Silence: self._on_silence,
        }
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

    def know_cells(
        self,
        origin: Callable[[], str] | None,
        around: Callable[[str], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        """Attach to every call the cell for which it is made.

        ``origin()`` returns the id of the cell for which the calling thread works; None if calls name no cell.
        ``around(id)`` returns a context manager to enter around each call that runs here; ``id`` is empty if no cell
        made the call.
        """
        self.sender.origin = origin
        self.executor.around = around

    @property
    def closed(self) -> bool:
        """True once the agent has ended. Calls then fail with `WorkerLost`."""
        return self.links.closed

    def start(self) -> None:
        """Start the threads that read. `Agent.handshake` then joins the world."""
        self.links.connect(self.me)  # calls to itself take the same way as all others
        self.sharing.meet_self()
        self.pool.start()

    def handle_cast(self, topic: str, handler: Handler) -> None:
        """Call ``handler(message, sender, frames)`` for every one-way message of a topic; replaces an earlier handler.

        ``sender`` is the sender's incarnation, ``frames`` are those after the envelope. The handler runs in the reading
        thread, so it must be quick; it may return a job, which a thread of the pool runs.
        """
        self._cast_handlers[topic] = handler

    def _on_cast(self, message: Cast, sender: int, frames: list[bytes]) -> Job | None:
        handler = self._cast_handlers.get(message.topic)
        if handler is None:
            _log.warning("%s has no handler for %s", self.me.name, message.topic)
            return None
        return handler(message, sender, frames)

    def on_lost(self, listener: Callable[[Record, str], None]) -> Callable[[], None]:
        """Call ``listener(record, why)`` when a member is lost. The listener runs under `_turn`."""
        self._on_lost.append(listener)
        return partial(_drop, self._on_lost, listener)

    def on_joined(self, listener: Callable[[Record], object]) -> Callable[[], None]:
        """Call ``listener(record)`` once a new member, which may be a restarted worker, can be called."""
        self._on_joined.append(listener)
        return partial(_drop, self._on_joined, listener)

    def at_close(self, action: Callable[[], None]) -> Callable[[], None]:
        """Call ``action``, which must not raise, at the end of `close`; return a function that removes the action."""
        self._at_close.append(action)
        return partial(_drop, self._at_close, action)

    def activate(self) -> contextlib.AbstractContextManager[Agent]:
        """Return a context manager that makes this the agent of the calling thread."""
        return Active(self)

    def submit(self, job: Job) -> None:
        """Run a job on a thread of the pool; its errors are logged. After `close` the job may never run."""
        self.pool.submit(job)

    def close(self, why: str) -> None:
        """End at once: say goodbye to the other members, fail all pending calls with `WorkerLost`, stop the threads.

        A second call does nothing. Waits up to 2 s for threads that run user code. In a forked child, only fails the
        child's copies of the calls and references.
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
            action()  # must not raise: the actions after it would be skipped
        trace.emit("agent.closed", agent=self.me.name, why=why)

    # -- reading ------------------------------------------------------------------------------

    def _adopt(self) -> None:
        here.agent = self

    def read(self, timeout: float | None, soon: bool = False, guest: bool = False) -> Job | None:
        """Do the work that is due, then receive one message and handle it; return a job if user code has to run.

        Waits for a message ``timeout`` seconds at most, and never longer than 0.2 s (`Links.nap`); returns None if none
        has arrived. ``guest`` marks a thread that is not of the pool and reads beside the pool's threads; there may be
        one at a time. ``soon`` lets the channel poll for a moment before it sleeps (`Channel.receive`).
        """
        # Plain attributes say what is due, because this runs before every message (test_counts.py counts its
        # functions).
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

    def _read_one_as_guest(self, timeout: float | None) -> Job | None:
        before, here.agent = here.agent, self
        was_closed = this_thread.is_closed
        try:
            # A finaliser that Python runs in here must not wait for a call: only this thread might read the answer.
            this_thread.is_closed = True
            return self.read(timeout, guest=True)
        finally:
            this_thread.is_closed = was_closed
            here.agent = before

    def _give_back(self, now: float) -> None:
        """Return shared memory to its owners if no other message has taken it back in time; free unused memory."""
        due, later = self.sharing.tend(now)
        for to, message in due:
            try_post(self.links, to, message)  # an owner that is gone does not need them
        self.links.note(later)

    def _run_due(self, now: float) -> None:
        """Resend, ping, `lose` silent members, end calls that have timed out. The caller holds `_turn`."""
        lost, silent = self.links.tick(now, self.exchange.awaited)
        for incarnation, why in lost:
            self.lose(incarnation, why)
        for incarnation, seconds in silent:
            others = [record.incarnation for record in self.membership.others()]
            self._tell_of_silence(Silence(incarnation, seconds), others)
        self.outcomes.run_due(now)
        self.links.set_clock()

    def _tell_of_silence(self, message: Silence, others: Iterable[int]) -> None:
        for other in others:
            if other != message.of:
                try_post(self.links, other, message)

    def _on_silence(self, message: Silence, sender: int, _: list[bytes]) -> None:
        """Ask a member that the sender does not hear for a sign of life; or lose a member that has lost this agent."""
        if message.of == self.me.incarnation:
            if message.lost_by:
                me = self.me.name
                self.lose(message.lost_by, f"has lost the connection to {me}, and has given {me} up")
        # An agent A that has lost B sends B nothing more, so B would wait for A until it times out. This agent hears
        # both: it passes A's news on to B, which then loses A.
        elif self.links.doubt(message.of, message.silent) and message.lost_by == sender:
            try_post(self.links, message.of, message)

    def _take(self, frames: list[bytes]) -> Job | None:
        """Decode one message, call its handler, and return the handler's job. The caller holds `_turn`."""
        try:
            envelope = messages.decode_envelope(frames[0])
        except messages.NOT_A_MESSAGE as error:
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
        # Only after `accept`: a second copy of the message has the same blocks and deletes in its envelope.
        if envelope.back:
            self.sharing.on_back(envelope.sender, envelope.back)
        for delete in envelope.deletes:
            self.references.on_user_delete(delete, envelope.sender, [])
        handler = self._handlers.get(type(message))
        if handler is None:
            _log.warning("%s has no handler for %s", self.me.name, message.kind)
            return None
        # Map the tensors in shared memory. This counts as borrowing the memory even if the handler fails.
        if isinstance(message, messages.Carrier) and message.payload.places:
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
        """Answer a message from or to a past incarnation with `Refused`: its sender is out of date."""
        self.refused += 1
        if isinstance(envelope.message, Goodbye):
            return
        # An agent that was never connected here and never a member gets no answer: its address is not known.
        record = self.links.connected(envelope.sender) or self.membership.ever(envelope.sender)
        if record is not None:
            reason = f"{self.me.name} does not keep this connection (any more)"
            self.links.refuse(record, Refused(envelope.receiver, reason))

    # -- losing members -----------------------------------------------------------------------

    def _on_process_end(self, pid: int) -> None:
        """Lose the members on this host whose process ``pid`` has ended. The thread of `ProcessWatch` calls this."""
        for incarnation, connection in list(self.links.connections.items()):
            if connection.record.pid == pid and connection.record.host == self.me.host:
                how = self.explain_end(connection.record) if self.explain_end is not None else ""
                self.lose(incarnation, how or f"died (process {pid} has ended)")

    def _on_ping(self, message: Ping, sender: int, _: list[bytes]) -> None:
        pong = Pong(message.number, self.executor.doing(), message.is_large)
        with contextlib.suppress(NbdistError):
            self.links.post(sender, pong, is_large=message.is_large)

    def _on_stop(self, message: Stop, sender: int, frames: list[bytes]) -> None:
        # If this agent has refused the call for lack of a definition, its caller will not repeat it now: the value that
        # the call should have made fails for everyone who waits for it.
        self.references.abandon(sender, message.id)
        self.stopping.on_stop(message, sender, frames)

    def _on_undelivered(self, call: Call) -> None:
        self.submit(partial(self.outcomes.undelivered, call.id))  # `Links` may call this under its lock

    def _on_goodbye(self, message: Goodbye, sender: int, _: list[bytes]) -> None:
        if message.orderly:
            self.ending.on_orderly_goodbye()
        self.lose(sender, message.reason)

    def lose(self, incarnation: int, why: str) -> None:
        """Remove a member that is gone, and fail everything that waits for it. A second call does nothing."""
        # Else a message of the lost member could register a call or a fork after the member's calls and forks were
        # dropped (test_a_member_lost_while_its_message_is_handled_holds_nothing_after).
        with self._turn:
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
                for call in calls:
                    self.outcomes.lost(call, why, others=len(calls) - 1)

            if calls:
                self.submit(tell)  # callbacks of these calls may run any code, so not under `_turn`
            _tell(self._on_lost, "loss", record, why)
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

        A latch costs less than the Future of `call`, on which any thread may wait. Raises the errors of `call`, and
        WorkerLost if the other agent is gone: then the function does not run there.
        """
        return self.caller.begin(to, function, args, timeout)

    def ask(self, to: To, function: Any, *args: Any, timeout: float = -1.0) -> Any:
        """Call a function in another agent's process as `call` does; wait for its result and return it."""
        return self.caller.sync(to, function, args, None, timeout)

    def at(self, to: str, name: str) -> NamedObject:
        """Return the object that the agent called ``to`` has published as ``name``, for calls of its methods."""
        return NamedObject(self.caller, to, name)

    def freeze(self, who: int) -> None:
        """Stop the clocks of all calls that this agent awaits, until `thaw`: ``who`` has paused a backward pass."""
        self.pending.freeze(who, time.monotonic())

    def thaw(self, who: int) -> None:
        """Restart the clocks that `freeze` has stopped for ``who``, unless another agent wants them stopped."""
        self.pending.thaw(who, time.monotonic())
        self.links.hurry(self.pending.next_due())

    def reap(self) -> None:
        """Tell the owners now which references were released here; without this call they learn it within 0.25 s."""
        with self._turn:  # a reader may have taken the released references, and not sent them yet
            self.references.reap()
            self.links.post_waiting()

    # -- inspecting ---------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """Return counters by name, such as ``pending_calls`` and ``owned_values``, for displays and tests."""
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
