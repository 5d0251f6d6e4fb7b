"""Connects autograd with an agent: every agent has one `Recorder`.

========================== ===========================================================================
the agent calls            when
========================== ===========================================================================
`Recorder.current`         a call is about to be sent: is its thread in a context?
`Recorder.outgoing`        a call or answer is sent in a context: makes gates for its tensors
`Recorder.withdraw`        that message could not be sent
`Recorder.enter`           a call or answer of a context arrives: makes the context here if it is new
`Recorder.incoming`        that message's tensors are decoded: makes their receive nodes
`Recorder.running`         that call's function runs: in the context, and in the caller's gradient mode
`Recorder.warn`            tensors that require grad are sent outside of any context
========================== ===========================================================================

The recorder also sends the messages of `nbdist.autograd.graph.messages`, and hands arriving ones to `Passes`,
`Observing` and `TurnTaking`. It is the ``transport`` of these three.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from nbdist.autograd.graph import edges, messages
from nbdist.autograd.graph.edges import Received
from nbdist.autograd.graph.forward_nans import NanCheck
from nbdist.autograd.graph.noting import noted
from nbdist.autograd.passes.context import Context, Run
from nbdist.autograd.passes.contexts import Contexts
from nbdist.autograd.passes.engine import edge_of
from nbdist.autograd.passes.pass_driver import Passes
from nbdist.autograd.passes.worker_part import Entry
from nbdist.code_places import NBDIST
from nbdist.errors import EncodeError, NbdistError, NotInitialized, UsageError
from nbdist.gpus import side_streams
from nbdist.gpus.spans import CUDA_IS_BUILT
from nbdist.rpc import devices
from nbdist.rpc.agent import Agent
from nbdist.rpc.api import current_agent
from nbdist.rpc.failures import describe
from nbdist.rpc.futures import Future, Surroundings, set_carrier
from nbdist.rpc.pool import Job
from nbdist.rpc.recording import Attach
from nbdist.torch_private import set_grad_enabled
from nbdist.wire import codec
from nbdist.wire.messages import Cast, Payload, Record, Recording

# Set by `nbdist.compat`: called with the error of a pass and the id of its root, returns the error to raise.
failure_words: Callable[[Exception, int], Exception] | None = None

_NO_EDGE = -1  # the number of the edge of a message without tensors


def _carry() -> Surroundings | None:
    """Return what makes the block in which a future's callback runs; None if it is registered outside of any context.

    The block puts the thread that runs the callback into the context, and the gradient mode, of the one that registers.
    """
    try:
        recorder = current_agent().recorder
    except NotInitialized:
        return None
    context = recorder.current()
    if context is None:
        return None
    recording = Recording(context.id, context.maker, _NO_EDGE, torch.is_grad_enabled())
    return partial(recorder.running, context, recording)


set_carrier(_carry)


class Recorder:
    """Records the messages of one agent, and runs its parts of backward passes. Workers are named by incarnations."""

    def __init__(self, agent: Agent) -> None:
        self.me = agent.me.incarnation
        self.name = agent.me.name
        self.name_of, self.submit = agent.name_of, agent.submit  # see `Transport`
        self.membership = agent.membership
        self.contexts = Contexts(agent.me.id, self.me)
        self.contexts.is_gone = agent.membership.is_gone
        self.contexts.on_displaced = lambda context: self.submit(partial(self._end, context))
        self.passes = Passes(self, self.contexts)
        self._agent = agent
        self._warned: set[tuple[str, int]] = set()  # places in the user's code, as (file, line)
        self._watchers: list[tuple[Callable[[Context], None], Callable[[], bool]]] = []  # given to `when_opened`
        self._paused: set[int] = set()  # the contexts with a pass that is paused from here
        self._freezes = 0  # Freeze messages sent
        self._freezing = threading.Lock()
        self._frozen: dict[int, int] = {}  # the number of the newest Freeze message of each other agent, by incarnation
        agent.on_lost(self._on_lost)
        agent.on_joined(self._on_joined)
        agent.at_close(self._close)
        passes, observing = self.passes, self.passes.observing
        self._handle(messages.Mark, lambda message, sender: partial(passes.on_mark, message))
        self._handle_with_value(messages.Gradients, self._on_gradients)
        self._handle(messages.Marked, lambda message, sender: partial(passes.on_marked, message))
        self._handle(messages.Turn, lambda message, sender: passes.turns.on_turn(message))
        self._handle(messages.Granted, lambda message, sender: partial(passes.on_granted, message, sender))
        self._handle(messages.Report, passes.on_report)
        self._handle_with_value(messages.Failed, self._on_failed)
        self._handle(messages.Cancel, lambda message, sender: partial(passes.on_cancel, message))
        self._handle(messages.Entered, self._on_entered)
        self._handle(messages.Release, lambda message, sender: partial(self._release, message.context, message.maker))
        self._handle(messages.WatchChanged, lambda message, sender: observing.on_watch(message))
        self._handle(messages.Observed, observing.on_observed)
        self._handle(messages.Over, lambda message, sender: observing.on_over(message))
        self._handle(messages.Steer, observing.on_steer)
        self._handle(messages.Go, lambda message, sender: observing.on_go(message))
        self._handle(messages.Freeze, self._on_freeze)

    # -- contexts -----------------------------------------------------------------------------

    def open(self, *, lines: bool = False, check: bool = False) -> Context:
        """Make a context and have the calling thread enter it; raises UsageError if the thread is in one already.

        The views that watch new contexts are told before this returns; an error of theirs ends the context.
        """
        if self.contexts.current is not None:  # torch's own tests match the beginning of this message
            raise UsageError(
                f"Already have an autograd context id for this thread: {self.contexts.current.id}; contexts do not "
                "nest. End that one first: leave its `with` block, or close() it"
            )
        watchers = list(self._watchers)
        lines = any([lines, *[wants_lines() for _, wants_lines in watchers]])  # each must be asked: no generator
        context = self.contexts.new(lines=lines, check=check)
        self.contexts.here.context = context
        if lines or check:
            context.noting = self.noting(context)
            context.noting.__enter__()
        try:
            for then, _ in watchers:
                then(context)
        except BaseException:  # a view's, or Ctrl-C: the `with` block does not begin, so nobody else ends the context
            self.close(context)
            raise
        return context

    def noting(self, context: Context) -> AbstractContextManager[None]:
        """Return the block in which a thread notes lines of code, or looks for NaN, as the context asks.

        The block raises ForwardNaN for a NaN.
        """
        return noted(lines=context.lines, check=NanCheck(self.name, self.name_of) if context.check else None)

    def when_opened(self, then: Callable[[Context], None], wants_lines: Callable[[], bool]) -> Callable[[], None]:
        """Call ``then`` with each context that is opened here from now on; return a function that ends that.

        The thread that opens the context first calls ``wants_lines()``, which returns True to have lines noted in the
        context, and then ``then``. An error of ``then`` closes the context and is raised by `open`.
        """
        watcher = (then, wants_lines)
        self._watchers.append(watcher)

        def forget() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

        return forget

    def close(self, context: Context) -> None:
        """End a context on all workers; call it on the maker, which alone knows all of them. Passes that run fail."""
        if self.contexts.current is context:
            self.contexts.here.context = None
        for worker in context.workers - {self.me}:
            self.tell(worker, messages.Release(context.id, context.maker))
        self._release(context.id, context.maker)

    def _release(self, id: int, maker: int) -> None:
        # The maker, too: the contexts of a restarted worker may have the ids of the dead one's.
        context = self.contexts.release(id, maker)
        if context is not None:
            self._end(context)

    def _end(self, context: Context) -> None:
        """End the passes, the `noting` block and the watch of an ended context, and the halts of its pipeline steps."""
        self.passes.release(context)
        for observer in list(context.step_observers.values()):
            observer.stop()
        if context.noting is not None:
            context.noting.__exit__(None, None, None)
        if context.watch is not None:
            context.watch.close()

    def _on_entered(self, message: messages.Entered, sender: int) -> None:
        """Note that a context of this maker has reached a worker; tell that worker if the context has ended."""
        context = self.contexts.find(message.context)
        if context is not None:
            self._join(context, sender)
        if context is None or self.contexts.find(message.context) is None:  # it may have ended just now
            self.tell(sender, messages.Release(message.context, self.me))

    # -- called by the agent ------------------------------------------------------------------

    def current(self) -> Context | None:
        """Return the context in which the calling thread is; None if in none."""
        # Every call asks: outside of any context, one look answers.
        return self.contexts.current if self.contexts.here.context is not None else None

    def _join(self, context: Context, worker: int) -> None:
        """Note that a worker has a context; on the maker, tell a new worker of the context's watch."""
        if worker not in context.workers:
            context.workers.add(worker)  # first: a watch that begins now tells all workers that are in the set
            self.passes.observing.on_join(context, worker)

    def outgoing(self, context: Context, to: int, tensors: Sequence[torch.Tensor], function: str) -> Recording:
        """Make a gate for each of the tensors, which a message carries; return the recording that travels with it."""
        if to not in context.workers:
            self._join(context, to)
        message = _NO_EDGE
        if tensors:
            message = self.contexts.next_message()
            context.sends[message] = edges.Sent(message, to, tensors, function)
        # Without tensors too: the receiver must enter the context, for the calls that it makes in its turn.
        return Recording(context.id, context.maker, message, torch.is_grad_enabled(), context.lines, context.check)

    def withdraw(self, recording: Recording) -> None:
        """Forget the gates of a message that could not be sent. Harmless if the context has ended."""
        context = self.contexts.find(recording.context)
        if context is not None:
            context.sends.pop(recording.message, None)

    def enter(self, recording: Recording, sender: int) -> Context | None:
        """Return the context of a message that has arrived, made now if it is new; None if the context has ended."""
        maker = recording.maker
        context = self.contexts.enter(recording.context, maker, lines=recording.lines, check=recording.check)
        if context is not None and not context.is_entered:
            context.is_entered = True
            if maker not in (sender, self.me):  # the maker ends the context on all workers, so it has to know them all
                self.tell(maker, messages.Entered(recording.context))
        return context

    def incoming(self, context: Context, recording: Recording, sender: int, function: str) -> Attach:
        """Return the function that gives the tensors of a message their receive nodes, when they have been decoded."""

        def attach(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            end = Received(recording.message, sender, function)
            made = edges.receive(end, tensors)
            # The condition of `looks`, written out: this runs for each message, and a call costs time.
            if context.lines or context.watching is not None or context.watch is not None:
                end.look(made)
            context.receives[recording.message] = end
            return made

        return attach

    def looks(self, context_id: int) -> bool:
        """Return whether tensors that arrive in a context are searched for NaN and Inf, because somebody watches it.

        The search reads all of a tensor, and waits for the GPU of a tensor on one. So the thread that reads messages
        must not attach tensors in shared memory, which may be large and may be on a GPU.
        """
        context = self.contexts.find(context_id)
        # A live view switches `lines` on, which the call itself says; the message about its watch may come later.
        return context is not None and (context.lines or context.watching is not None or context.watch is not None)

    def running(self, context: Context, recording: Recording) -> AbstractContextManager[None]:
        """Return the block in which the agent runs a call: in its context, and in the caller's gradient mode."""
        return _Running(self, context, recording.grad)

    def backward(self, context_id: int, root: torch.Tensor, retain_graph: bool) -> None:
        """Run a backward pass from one tensor and wait for its end: on the owner of the tensor, for ``RRef.backward``.

        Raises UsageError if the context is unknown or has ended, and otherwise the error of the pass.
        """
        run = self.begin(self.contexts.get(context_id), [root], [torch.ones_like(root)], retain_graph=retain_graph)
        self.finish(run)

    def warn(self, function: str, worker: str) -> None:
        """Warn of tensors that are sent to a function on another worker outside of any context, once for each place.

        A place is a line of the code that calls nbdist.
        """
        # Every call with such tensors comes here, also from a place that was warned of: this must be fast.
        frame = sys._getframe(1)
        level = 2
        while frame.f_back is not None and frame.f_code.co_filename.startswith(NBDIST):
            frame, level = frame.f_back, level + 1
        place = frame.f_code.co_filename, frame.f_lineno
        if place in self._warned:
            return
        self._warned.add(place)
        warnings.warn(
            f"{function} on {worker} is given a tensor that requires grad, outside of a distributed autograd context: "
            f"no gradient will come back. Call it inside of `with dist_autograd.context():`, or send tensor.detach()",
            stacklevel=level,
        )

    # -- passes -------------------------------------------------------------------------------

    def begin(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        outcome: Future[None] | None = None,
        /,
        **options: bool,
    ) -> Run:
        """Begin a pass from these roots, with a gradient for each; the rest is as for `Passes.begin`."""
        return self.passes.begin(context, Entry(list(map(edge_of, roots)), list(gradients)), outcome, **options)

    def finish(self, run: Run) -> None:
        """Run a pass that began here, and wait for its end; raises its error, or what `failure_words` returns for it.

        If Ctrl-C ends the wait, the pass is given up.
        """
        self.passes.go(run)
        try:
            self.passes.wait(run, self._agent.read_as_guest)  # the thread may read messages meanwhile
        except Exception as error:  # of any class: a user's node or hook has raised it. Ctrl-C stays what it is
            said = error if failure_words is None else failure_words(error, self._agent.me.id)
            if said is error:
                raise
            try:
                raise said from error
            finally:
                del said  # or the error would refer to itself, by its traceback and this frame

    # -- called by passes ---------------------------------------------------------------------

    def is_there(self, worker: int) -> bool:
        """Return whether this agent is still connected to a worker, given by its incarnation."""
        return self._agent.links.connected(worker) is not None

    def post(self, to: int, message: messages.PassMessage, body: Any = None) -> None:
        """Send a message to a worker, this one included; ``body`` travels as its payload.

        Raises WorkerLost if the worker is gone, EncodeError if the body cannot be sent.
        """
        topic, data, agent = _TOPICS[type(message)], messages.encode(message), self._agent
        if body is None:
            agent.post(to, Cast(topic, data, _NO_PAYLOAD))
            return
        if CUDA_IS_BUILT and type(message) is messages.Gradients:  # computed on streams of other threads, perhaps
            side_streams.catch_up(body)
        space = agent.sharing.spaces.get(to)
        connection = agent.links.connections.get(to)
        record = connection.record if connection is not None else None
        mapped = agent.me.device_maps or (record is not None and record.device_maps)
        is_usual = type(message) is messages.Gradients and not mapped
        usual = messages.encode_usual_gradients(body, space) if is_usual else None
        if usual is not None:
            agent.post(to, Cast(topic, data, usual[0]), usual[1])
            return
        where = devices.for_gradients(agent.me, record)
        try:
            encoded = codec.encode(body, by_value=True, devices=where, space=space)
        except EncodeError as error:
            what = "a gradient" if type(message) is messages.Gradients else "the error of a backward pass"
            raise EncodeError(f"{what} {error}") from error.__cause__
        agent.post(to, Cast(topic, data, encoded.payload), encoded.frames, slots=encoded.slots)

    def tell(self, to: int, message: messages.PassMessage, body: Any = None) -> None:
        """Send a message, and do nothing if the worker is gone: `post` raises then."""
        try:
            self.post(to, message, body)
        except NbdistError:
            return  # the worker is gone, and with it all that the message is about

    # -- called by watches --------------------------------------------------------------------

    def freeze(self, context_id: int, frozen: bool) -> None:
        """Tell all members that a pass of a context is paused from here, or that none is paused any more.

        While any is paused, the members stop the clocks of their calls, so that none times out.
        """
        with self._freezing:
            before = bool(self._paused)
            (self._paused.add if frozen else self._paused.discard)(context_id)
            if bool(self._paused) == before:
                return
            self._freezes += 1
            message = messages.Freeze(self._freezes, bool(self._paused))
            for record in self.membership.members():
                self.tell(record.incarnation, message)

    def _on_joined(self, record: Record) -> None:
        """Tell a new member that a pass is paused from here, if one is: its calls must not time out either."""
        with self._freezing:
            message = messages.Freeze(self._freezes, True) if self._paused else None
        if message is not None:  # sent without the lock; if a newer message overtakes it, its number says so
            self.tell(record.incarnation, message)

    def _on_freeze(self, message: messages.Freeze, sender: int) -> None:
        """Stop the clocks of all calls of this agent, because the sender has paused a pass, or let them run again."""
        if message.number < self._frozen.get(sender, 0):
            return  # a newer message has overtaken it
        self._frozen[sender] = message.number
        if message.frozen:
            self._agent.freeze(sender)
        if not message.frozen or self.membership.is_gone(sender):  # a sender that has just joined may not be known yet
            self._agent.thaw(sender)

    # -- messages that arrive -----------------------------------------------------------------

    def _handle(self, kind: type, act: Callable[[Any, int], Job | None]) -> None:
        """Register ``act(message, sender)`` for a kind of message; the reading thread calls it, a pool runs the job."""

        def on_cast(cast: Cast, sender: int, frames: list[bytes]) -> Job | None:
            return act(messages.decode(cast.data), sender)

        self._agent.handle_cast(_TOPICS[kind], on_cast)

    def _handle_with_value(self, kind: type, act: Callable[[Any, Any, Payload, list[bytes]], None]) -> None:
        """Register ``act(message, value, payload, frames)`` for a kind of message, in a thread of the pool.

        For a large value, ``act`` gets `codec.NOT_DECODED`, and decodes ``frames`` by their ``payload`` itself.
        """

        def on_cast(cast: Cast, sender: int, frames: list[bytes]) -> Job:
            # Small values are decoded before another thread is woken to read: making tensors releases the GIL, which
            # that thread would take.
            value = codec.decode_early(cast.payload, frames)
            return partial(act, messages.decode(cast.data), value, cast.payload, frames)

        self._agent.handle_cast(_TOPICS[kind], on_cast)

    def _on_gradients(self, message: messages.Gradients, value: Any, payload: Payload, frames: list[bytes]) -> None:
        try:
            gradients = codec.decode(payload, frames) if value is codec.NOT_DECODED else value
        except NbdistError as error:  # the root would wait for ever for the report on this message
            doing = f"the backward pass of context {message.head.context}"
            self.tell(message.head.id.root, messages.Failed(message.head.id), describe(error, self.name, doing))
        else:
            self.passes.on_gradients(message, gradients)

    def _on_failed(self, message: messages.Failed, value: Any, payload: Payload, frames: list[bytes]) -> None:
        try:
            failure = codec.decode(payload, frames) if value is codec.NOT_DECODED else value
        except NbdistError as error:
            failure = describe(error, self.name, "the backward pass")
        self.passes.on_failed(message, failure)

    def _on_lost(self, record: Record, why: str) -> None:
        """End the contexts that a lost worker made, and fail the passes that need it; ``why`` is for the errors."""
        for context in self.contexts.all():
            context.workers.discard(record.incarnation)
        self._frozen.pop(record.incarnation, None)
        self._agent.thaw(record.incarnation)
        self.passes.observing.on_lost(record.incarnation)
        self.passes.on_lost(record.incarnation, record.name, why)
        # In another thread: this one has noticed the loss, and may be the one that reads messages.
        for context in self.contexts.all():
            if context.maker == record.incarnation:
                self.submit(partial(self._release, context.id, context.maker))

    def _close(self) -> None:
        for context in self.contexts.all():
            self._release(context.id, context.maker)


class _Running:
    """The block in which a function runs in a context, and in the gradient mode of its caller."""

    # A class and no generator: it is entered for every call in a context.

    __slots__ = ("_before", "_context", "_grad", "_grad_before", "_noting", "_recorder")

    def __init__(self, recorder: Recorder, context: Context, grad: bool) -> None:
        self._recorder = recorder
        self._context = context
        self._grad = grad

    def __enter__(self) -> None:
        here = self._recorder.contexts.here
        self._before, here.context = here.context, self._context
        self._grad_before = torch.is_grad_enabled()
        if self._grad_before is not self._grad:
            set_grad_enabled(self._grad)
        context = self._context
        self._noting = self._recorder.noting(context) if context.lines or context.check else None
        if self._noting is not None:
            self._noting.__enter__()

    def __exit__(self, *exception: Any) -> None:
        try:
            if self._noting is not None:
                self._noting.__exit__(*exception)
        finally:
            set_grad_enabled(self._grad_before)
            self._recorder.contexts.here.context = self._before


_TOPICS: dict[type, str] = {kind: f"autograd.{kind.__name__.lower()}" for kind in messages.PassMessage.__subclasses__()}
_NO_PAYLOAD = Payload()
