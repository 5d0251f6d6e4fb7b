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

It makes the parts of autograd on this worker: `Contexts`, `Passes`, the `Transport` of these, and `Freezing`. It says
who of them gets which message that arrives, and ends what a lost worker has begun.
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
from nbdist.autograd.graph.transport import Transport
from nbdist.autograd.passes.context import Context, Run
from nbdist.autograd.passes.contexts import Contexts
from nbdist.autograd.passes.engine import edge_of
from nbdist.autograd.passes.pass_driver import Passes
from nbdist.autograd.passes.worker_part import Entry
from nbdist.autograd.watching.freezing import Freezing
from nbdist.code_places import NBDIST
from nbdist.errors import NbdistError, NotInitialized, UsageError
from nbdist.rpc.agent import Agent
from nbdist.rpc.api import current_agent
from nbdist.rpc.failures import describe
from nbdist.rpc.futures import Future, Surroundings, set_carrier
from nbdist.rpc.recording import Attach
from nbdist.torch_private import set_grad_enabled
from nbdist.wire import codec
from nbdist.wire.messages import Payload, Record, Recording

# Set by `nbdist.compat`: called with the error of a pass and the id of its root, returns the error to raise.
failure_words: Callable[[Exception, int], Exception] | None = None

_NO_EDGE = -1  # the number of the edge of a message without tensors


def _carry() -> Surroundings | None:
    """Return what makes the block in which a future's callback runs; None outside of any context."""
    try:
        recorder = current_agent().recorder
    except NotInitialized:
        return None
    context = recorder.current()
    if context is None:
        return None
    # The callback's thread gets the context and the gradient mode of the thread that registers it.
    recording = Recording(context.id, context.maker, _NO_EDGE, torch.is_grad_enabled())
    return partial(recorder.running, context, recording)


set_carrier(_carry)


class Recorder:
    """Records the messages of one agent, and runs its parts of backward passes. Workers are named by incarnations."""

    def __init__(self, agent: Agent) -> None:
        self.me = agent.me.incarnation
        self.membership = agent.membership
        self.transport = transport = Transport(agent)
        self.contexts = Contexts(agent.me.id, self.me)
        self.contexts.is_gone = agent.membership.is_gone
        self.contexts.on_displaced = lambda context: transport.submit(partial(self._end, context))
        self._freezing = Freezing(agent, transport)
        self.freeze = self._freezing.freeze
        """Stops the clocks of all members while somebody looks, or lets them run again: see `Freezing`."""
        self.passes = Passes(transport, self.contexts, self.freeze)
        self._agent = agent
        self._warned: set[tuple[str, int]] = set()  # places in the user's code, as (file, line)
        self._watchers: dict[tuple[Callable[[Context], None], Callable[[], bool]], None] = {}  # of `when_opened`
        agent.on_lost(self._on_lost)
        agent.at_close(self._close)
        passes, observing = self.passes, self.passes.observing
        transport.handle(messages.Mark, lambda message, sender: partial(passes.on_mark, message))
        transport.handle_with_value(messages.Gradients, self._on_gradients)
        transport.handle(messages.Marked, lambda message, sender: partial(passes.on_marked, message))
        transport.handle(messages.Turn, lambda message, sender: passes.turns.on_turn(message))
        transport.handle(messages.Granted, lambda message, sender: partial(passes.on_granted, message, sender))
        transport.handle(messages.Report, passes.on_report)
        transport.handle_with_value(messages.Failed, self._on_failed)
        transport.handle(messages.Cancel, lambda message, sender: partial(passes.on_cancel, message))
        transport.handle(messages.Entered, self._on_entered)
        transport.handle(
            messages.Release, lambda message, sender: partial(self._release, message.context, message.maker)
        )
        transport.handle(messages.WatchChanged, lambda message, sender: observing.on_watch(message))
        transport.handle(messages.Observed, observing.on_observed)
        transport.handle(messages.Over, lambda message, sender: observing.on_over(message))
        transport.handle(messages.Steer, observing.on_steer)
        transport.handle(messages.Go, lambda message, sender: observing.on_go(message))

    # -- contexts -----------------------------------------------------------------------------

    def open(self, *, lines: bool = False, check: bool = False) -> Context:
        """Make a context and have the calling thread enter it; raises UsageError if the thread is in one already."""
        if self.contexts.current is not None:  # torch's own tests match the beginning of this message
            raise UsageError(
                f"Already have an autograd context id for this thread: {self.contexts.current.id}; contexts do not "
                "nest. End that one first: leave its `with` block, or close() it"
            )
        watchers = [then for then, wants in list(self._watchers) if wants()]
        lines = lines or bool(watchers)
        context = self.contexts.new(lines=lines, check=check)
        self.contexts.here.context = context
        context.thread = threading.get_ident()
        if lines or check:
            context.noting = self.transport.noting(context)
            context.noting.__enter__()
        try:
            for then in watchers:
                then(context)
        except BaseException:  # a view's, or Ctrl-C: the `with` block does not begin, so nobody else ends the context
            self.close(context)
            raise
        return context

    def when_opened(self, then: Callable[[Context], None], wants: Callable[[], bool]) -> Callable[[], object]:
        """Call ``then`` with the contexts that are opened here from now on; return a function that ends that.

        The thread that opens a context first calls ``wants()``. If that returns True, lines are noted in the context,
        and the thread calls ``then``. An error of ``then`` closes the context and is raised by `open`.
        """
        self._watchers[then, wants] = None
        return partial(self._watchers.pop, (then, wants), None)

    def close(self, context: Context) -> None:
        """End a context on all workers; call it on the maker, which alone knows all of them. Passes that run fail."""
        if self.contexts.current is context:
            self.contexts.here.context = None
        for worker in context.workers - {self.me}:
            self.transport.tell(worker, messages.Release(context.id, context.maker))
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
            self.transport.tell(sender, messages.Release(message.context, self.me))

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
                self.transport.tell(maker, messages.Entered(recording.context))
        return context

    def incoming(self, context: Context, recording: Recording, sender: int, function: str) -> Attach:
        """Return the function that gives the tensors of a message their receive nodes, when they have been decoded."""

        def attach(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            end = Received(recording.message, sender, function, context.id, context.thread)
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
            f"no gradient will come back. Call it inside of `with dist_autograd.context():`, or send "
            f"tensor.detach(){self.contexts.of_others}",
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
        """Run a pass that began here, and wait for its end; raises its error, or that of `failure_words`."""
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

    # -- messages that arrive -----------------------------------------------------------------

    def _on_gradients(self, message: messages.Gradients, value: Any, payload: Payload, frames: list[bytes]) -> None:
        try:
            gradients = codec.decode(payload, frames) if value is codec.NOT_DECODED else value
        except NbdistError as error:  # the root would wait for ever for the report on this message
            doing = f"the backward pass of context {message.head.context}"
            self.transport.tell(
                message.head.id.root, messages.Failed(message.head.id), describe(error, self.transport.name, doing)
            )
        else:
            self.passes.on_gradients(message, gradients)

    def _on_failed(self, message: messages.Failed, value: Any, payload: Payload, frames: list[bytes]) -> None:
        try:
            failure = codec.decode(payload, frames) if value is codec.NOT_DECODED else value
        except NbdistError as error:
            failure = describe(error, self.transport.name, "the backward pass")
        self.passes.on_failed(message, failure)

    def _on_lost(self, record: Record, why: str) -> None:
        """End the contexts that a lost worker made, and fail the passes that need it; ``why`` is for the errors."""
        for context in self.contexts.all():
            context.workers.discard(record.incarnation)
        self._freezing.on_lost(record.incarnation)
        self.passes.observing.on_lost(record.incarnation)
        self.passes.on_lost(record.incarnation, record.name, why)
        # In another thread: this one has noticed the loss, and may be the one that reads messages.
        for context in self.contexts.all():
            if context.maker == record.incarnation:
                self.transport.submit(partial(self._release, context.id, context.maker))

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
        self._noting = self._recorder.transport.noting(context) if context.lines or context.check else None
        if self._noting is not None:
            self._noting.__enter__()

    def __exit__(self, *exception: Any) -> None:
        try:
            if self._noting is not None:
                self._noting.__exit__(*exception)
        finally:
            set_grad_enabled(self._grad_before)
            self._recorder.contexts.here.context = self._before
