"""Ties the recording of calls, and the passes, to an agent: every agent has one recorder."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

import nbdist
from nbdist.autograd import edges, messages
from nbdist.autograd.contexts import Context, Contexts
from nbdist.autograd.edges import Received
from nbdist.autograd.nans import Check
from nbdist.autograd.origins import noted
from nbdist.autograd.part import Roots
from nbdist.autograd.passes import Passes
from nbdist.autograd.run import Run
from nbdist.errors import NbdistError, NotInitialized, UsageError
from nbdist.rpc.agent import Agent
from nbdist.rpc.api import current_agent
from nbdist.rpc.dispatch import Job
from nbdist.rpc.failures import describe
from nbdist.rpc.futures import Future, Surroundings, set_carrier
from nbdist.rpc.membership import Membership
from nbdist.rpc.recording import Attach
from nbdist.torch_private import set_grad_enabled
from nbdist.wire import codec
from nbdist.wire.messages import Cast, Payload, Record, Recording

__all__ = ["Recorder"]

_OURS = str(Path(nbdist.__file__).parent)

failure_words: Callable[[Exception, int], Exception] | None = None
"""Returns what is raised for the error of a pass that worker ``root`` began; compat puts torch's words here."""

_NO_EDGE = -1


def _carry() -> Surroundings | None:
    """A context goes along into what is done when a future is done."""
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
    """Records an agent's messages, and runs its share of the passes over them."""

    def __init__(self, agent: Agent) -> None:
        self.me = agent.me.incarnation
        """This agent's incarnation."""
        self.contexts = Contexts(agent.me.id, self.me)
        self.contexts.is_gone = agent.membership.is_gone
        self.contexts.on_displaced = lambda context: self.submit(partial(self._end, context))
        self.passes = Passes(self, self.contexts)
        self._agent = agent
        self._warned: set[tuple[str, int]] = set()
        self._watchers: list[tuple[Callable[[Context], None], Callable[[], bool]]] = []
        self._paused: set[int] = set()
        self._freezes = 0
        self._freezing = threading.Lock()
        self._frozen: dict[int, int] = {}
        agent.on_lost(self._on_lost)
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
        self._handle(messages.Watch, lambda message, sender: observing.on_watch(message))
        self._handle(messages.Observed, observing.on_observed)
        self._handle(messages.Over, lambda message, sender: observing.on_over(message))
        self._handle(messages.Steer, observing.on_steer)
        self._handle(messages.Go, lambda message, sender: observing.on_go(message))
        self._handle(messages.Freeze, self._on_freeze)

    @property
    def membership(self) -> Membership:
        """Who is in the world."""
        return self._agent.membership

    # -- contexts -----------------------------------------------------------------------------

    def open(self, *, lines: bool = False, check: bool = False) -> Context:
        """Make a context and have the calling thread enter it."""
        if self.contexts.current is not None:
            raise UsageError(
                f"Already have an autograd context id for this thread: {self.contexts.current.id}; contexts do not nest"
            )
        watchers = list(self._watchers)
        if watchers:
            wanted = [wants_lines() for _, wants_lines in watchers]  # each of them is asked
            lines = lines or any(wanted)
        context = self.contexts.new(lines=lines, check=check)
        self.contexts.set_current(context)
        if lines or check:
            context.noting = self.noting(context)
            context.noting.__enter__()
        try:
            for then, _ in watchers:
                then(context)
        except BaseException:
            self.close(context)
            raise
        return context

    def noting(self, context: Context) -> AbstractContextManager[None]:
        """Return what a thread enters that computes in a context whose lines are noted, or that is checked."""
        return noted(lines=context.lines, check=Check(self.name, self.name_of) if context.check else None)

    def when_opened(self, then: Callable[[Context], None], wants_lines: Callable[[], bool]) -> Callable[[], None]:
        """Call ``then`` with each context that is made here from now on; returns a function that ends that.

        Both are called by the thread that makes one; lines are noted in it if ``wants_lines()`` says so before.
        """
        watcher = (then, wants_lines)
        self._watchers.append(watcher)

        def forget() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

        return forget

    def close(self, context: Context) -> None:
        """End a context everywhere."""
        if self.contexts.current is context:
            self.contexts.set_current(None)
        for worker in context.workers - {self._agent.me.incarnation}:
            self.tell(worker, messages.Release(context.id, context.maker))
        self._release(context.id, context.maker)

    def _release(self, id: int, maker: int) -> None:
        context = self.contexts.release(id, maker)
        if context is not None:
            self._end(context)

    def _end(self, context: Context) -> None:
        """End what belongs to a context that is here no more: its passes, its watch."""
        self.passes.release(context)
        for observer in list(context.step_observers.values()):
            observer.stop()
        if context.noting is not None:
            context.noting.__exit__(None, None, None)
        if context.watch is not None:
            context.watch.close()

    def _on_entered(self, message: messages.Entered, sender: int) -> None:
        context = self.contexts.find(message.context)
        if context is not None:
            self._join(context, sender)
        if context is None or self.contexts.find(message.context) is None:  # it may have ended in between
            self.tell(sender, messages.Release(message.context, self.me))

    # -- what the agent asks ------------------------------------------------------------------

    def current(self) -> Context | None:
        """Return the context in which the calling thread is; None if in none, as with almost every call."""
        return self.contexts.current if self.contexts.here.context is not None else None

    def _join(self, context: Context, worker: int) -> None:
        """A worker comes to a context."""
        if worker not in context.workers:
            context.workers.add(worker)  # before: whoever begins to watch now tells all that are there
            self.passes.observing.on_join(context, worker)

    def outgoing(self, context: Context, to: int, tensors: Sequence[torch.Tensor], function: str) -> Recording:
        """Make gates for the tensors of a message."""
        if to not in context.workers:
            self._join(context, to)
        message = _NO_EDGE
        if tensors:
            message = self.contexts.next_message()
            context.sends[message] = edges.Sent(message, to, tensors, function)
        return Recording(context.id, context.maker, message, torch.is_grad_enabled(), context.lines, context.check)

    def withdraw(self, recording: Recording) -> None:
        """A message did not go out."""
        context = self.contexts.find(recording.context)
        if context is not None:
            context.sends.pop(recording.message, None)

    def enter(self, recording: Recording, sender: int) -> Context | None:
        """The context of a message that has come."""
        maker = recording.maker

        def entered() -> None:
            if maker not in (sender, self.me):
                self.tell(maker, messages.Entered(recording.context))

        return self.contexts.enter(recording.context, maker, entered, lines=recording.lines, check=recording.check)

    def incoming(self, context: Context, recording: Recording, sender: int, function: str) -> Attach:
        """How to make the tensors of a message that has come."""

        def attach(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            end = Received(recording.message, sender, function)
            made = edges.receive(end, tensors)
            if context.lines or context.watching is not None or context.watch is not None:
                end.look(made)  # by its lines, which come with the call, a watched context is known here in time
            context.receives[recording.message] = end
            return made

        return attach

    def running(self, context: Context, recording: Recording) -> AbstractContextManager[None]:
        """A function runs for a call that was made in a context: it is in it, and in the caller's grad mode."""
        return _Running(self, context, recording.grad)

    def backward(self, context_id: int, root: torch.Tensor, retain_graph: bool) -> None:
        """Run a pass from one tensor."""
        run = self.begin(self.contexts.get(context_id), [root], [torch.ones_like(root)], retain_graph=retain_graph)
        self.passes.go(run)
        self.wait(run)

    def warn(self, function: str, worker: str) -> None:
        """Tensors that require grad go out of reach: say so, once at each place in the user's code."""
        frame = sys._getframe(1)
        level = 2
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
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
        """Begin a pass from these roots; `Passes.go` runs it."""
        there = [torch.autograd.graph.get_gradient_edge(root) for root in roots]
        edges = [(edge.node, edge.output_nr) for edge in there]
        return self.passes.begin(context, Roots(edges, gradients), outcome, **options)

    def wait(self, run: Run) -> None:
        """Wait for the end of a pass; its error is raised, in the words of `failure_words`."""
        try:
            self.passes.wait(run, self._agent.read_as_guest)
        except Exception as error:
            said = error if failure_words is None else failure_words(error, self._agent.me.id)
            if said is error:
                raise
            try:
                raise said from error
            finally:
                del said  # or the error, by its traceback and this frame, would hold itself

    # -- what passes ask ----------------------------------------------------------------------

    @property
    def name(self) -> str:
        """This agent's name."""
        return self._agent.me.name

    def name_of(self, worker: int) -> str:
        """A worker's name."""
        return self._agent.name_of(worker)

    def is_there(self, worker: int) -> bool:
        """Whether it is still a member."""
        return self._agent.links.connected(worker) is not None

    def submit(self, job: Job) -> None:
        """Run a job on another thread."""
        self._agent.submit(job)

    def post(self, to: int, message: messages.Message, body: Any = None) -> None:
        """Send a message to another worker, or to this one."""
        topic, data, agent = _TOPICS[type(message)], messages.encode(message), self._agent
        if body is None:
            agent.post(to, Cast(topic, data, _NO_PAYLOAD))
            return
        space = agent.sharing.spaces.get(to)
        usual = messages.encode_usual_gradients(body, space) if type(message) is messages.Gradients else None
        if usual is not None:
            agent.post(to, Cast(topic, data, usual[0]), usual[1])
            return
        record = agent.links.connected(to)
        encoded = codec.encode(
            body,
            by_value=True,
            devices=self._devices(record),
            receiver=record.name if record else "",
            space=space,
        )
        agent.post(to, Cast(topic, data, encoded.payload), encoded.frames, slots=encoded.slots)

    def _devices(self, to: Record | None) -> dict[str, str]:
        """Gradients go the way back of what the forward pass sent, in either direction."""
        if to is None or not (to.device_maps or self._agent.options.device_maps):
            return {}
        back = {theirs: ours for ours, theirs in to.device_maps.get(self.name, {}).items()}
        there = {str(ours): str(theirs) for ours, theirs in self._agent.options.device_maps.get(to.name, {}).items()}
        return {**back, **there}

    def tell(self, to: int, message: messages.Message, body: Any = None) -> None:
        """Send a message to whoever is still there to take it."""
        try:
            self.post(to, message, body)
        except NbdistError:
            return  # it is gone, and with it what it had of the context

    # -- what watches ask ---------------------------------------------------------------------

    def freeze(self, context_id: int, frozen: bool) -> None:
        """Have nobody's time run as long as a pass of some context is paused from here."""
        with self._freezing:
            before = bool(self._paused)
            (self._paused.add if frozen else self._paused.discard)(context_id)
            if bool(self._paused) == before:
                return
            self._freezes += 1
            message = messages.Freeze(self._freezes, bool(self._paused))
            for record in self.membership.members():
                self.tell(record.incarnation, message)

    def _on_freeze(self, message: messages.Freeze, sender: int) -> None:
        if message.number < self._frozen.get(sender, 0):
            return  # it has been overtaken
        self._frozen[sender] = message.number
        if message.frozen:
            self._agent.freeze(sender)
        if not message.frozen or not self.is_there(sender):  # it may have been lost just now
            self._agent.thaw(sender)

    # -- what comes ---------------------------------------------------------------------------

    def _handle(self, kind: type, act: Callable[[Any, int], Job | None]) -> None:
        def on_cast(cast: Cast, sender: int, frames: list[bytes]) -> Job | None:
            return act(messages.decode(cast.data), sender)

        self._agent.handle_cast(_TOPICS[kind], on_cast)

    def _handle_with_value(self, kind: type, act: Callable[[Any, Any, Payload, list[bytes]], None]) -> None:
        """Have a job call ``act`` with a message and its value, which may be `codec.NOT_DECODED`."""

        def on_cast(cast: Cast, sender: int, frames: list[bytes]) -> Job:
            # What is small is decoded before another thread is woken to read: making tensors lets go of the GIL.
            value = codec.decode_early(cast.payload, frames)
            return partial(act, messages.decode(cast.data), value, cast.payload, frames)

        self._agent.handle_cast(_TOPICS[kind], on_cast)

    def _on_gradients(self, message: messages.Gradients, value: Any, payload: Payload, frames: list[bytes]) -> None:
        """Hand gradients to their pass; where they cannot be read here, fail the pass at its root, which waits."""
        try:
            gradients = codec.decode(payload, frames) if value is codec.NOT_DECODED else value
        except NbdistError as error:
            doing = f"the backward pass of context {message.head.context}"
            self.tell(message.head.id.root, messages.Failed(message.head.id), describe(error, self.name, doing))
        else:
            self.passes.on_gradients(message, gradients)

    def _on_failed(self, message: messages.Failed, value: Any, payload: Payload, frames: list[bytes]) -> None:
        """Fail a pass that began here; also where the error itself cannot be read here."""
        try:
            failure = codec.decode(payload, frames) if value is codec.NOT_DECODED else value
        except NbdistError as error:
            failure = describe(error, self.name, "the backward pass")
        self.passes.on_failed(message, failure)

    def _on_lost(self, record: Record, why: str) -> None:
        for context in self.contexts.all():
            context.workers.discard(record.incarnation)
        self._frozen.pop(record.incarnation, None)
        self._agent.thaw(record.incarnation)
        self.passes.observing.on_lost(record.incarnation)
        self.passes.on_lost(record.incarnation, record.name, why)
        for context in self.contexts.made_by(record.incarnation):
            self._agent.submit(partial(self._release, context.id, context.maker))

    def _close(self) -> None:
        for context in self.contexts.all():
            self._release(context.id, context.maker)


class _Running:
    """The time in which a function runs in a context."""

    __slots__ = ("_before", "_context", "_contexts", "_grad", "_grad_before", "_noting", "_recorder")

    def __init__(self, recorder: Recorder, context: Context, grad: bool) -> None:
        self._recorder = recorder
        self._contexts = recorder.contexts
        self._context = context
        self._grad = grad

    def __enter__(self) -> None:
        here = self._contexts.here
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
            self._contexts.here.context = self._before


_TOPICS: dict[type, str] = {kind: f"autograd.{kind.__name__.lower()}" for kind in get_args(messages.Message)}
_NO_PAYLOAD = Payload()
