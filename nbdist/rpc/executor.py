"""Runs what others ask for, and answers.

A request first takes hold of what it refers to (in the reading thread, so that no later message can
overtake it), waits without a thread for references that are not confirmed and values that are not there, and
only then becomes a job.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from nbdist import trace
from nbdist.errors import EncodeError, MissingDefinition, NbdistError, UsageError, WorkerLost
from nbdist.rpc.dispatch import Job
from nbdist.rpc.failures import describe
from nbdist.rpc.forker import MessageForker
from nbdist.rpc.futures import Promise, outcome_of
from nbdist.rpc.links import Links
from nbdist.rpc.membership import Membership
from nbdist.rpc.recording import Attach, Served
from nbdist.rpc.references import References
from nbdist.rpc.rref import RRef
from nbdist.rpc.sharing import Sharing
from nbdist.torch_private import is_torch_future
from nbdist.wire import codec, definitions, names
from nbdist.wire.messages import Call, Fork, Mode, Payload, Record, Recording, Reply, State
from nbdist.wire.tensors import Slot

__all__ = ["ASYNC_MARK", "Executor", "Request"]

ASYNC_MARK = "_wrapped_async_rpc_function"
"""The attribute by which torch, too, knows a function that returns a Future for its result."""


class Stoppable(Protocol):
    """Who can stop a call while it runs: `nbdist.rpc.stopping.Stopping`."""

    def begin(self, key: tuple[int, int]) -> None:
        """Let a call, by its caller and the caller's number, be stopped in this thread until `end`."""

    def end(self, key: tuple[int, int]) -> None:
        """Let a call no longer be stopped."""


class Executor:
    """The callee's side of calls."""

    def __init__(
        self,
        membership: Membership,
        links: Links,
        references: References,
        sharing: Sharing,
        recorder: Served,
        *,
        submit: Callable[[Job], None],
        activate: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Run nothing yet; ``activate()`` is entered by a thread that answers for the agent and is none of its own."""
        self.finished: dict[int, int] = {}
        """The number of calls answered so far, by the caller's incarnation."""
        self.around: Callable[[str], AbstractContextManager[None]] | None = None
        """What to enter around a function that runs for a call from a cell; takes the call's origin."""
        self.stopping: Stoppable
        """Who can stop what runs here."""
        self.name = membership.me.name
        self.pid = membership.me.pid
        self.membership = membership
        self.links = links
        self.references = references
        self.spaces = sharing.spaces
        self.recorder = recorder
        self.submit = submit
        self.activate = activate
        self._refused: dict[tuple[int, int], Fork] = {}
        """The results of calls that were refused for lack of a definition, and that their callers may repeat."""
        self._waiting: dict[int, Request] = {}
        """The calls that wait for the value of their target, by their numbers here."""
        self._numbers = itertools.count()
        self._running: dict[int, tuple[str, float, int]] = {}
        self._counting = threading.Lock()

    @property
    def active(self) -> int:
        """How many calls have come and are not answered."""
        return len(self._running)

    def doing(self) -> str:
        """What runs here, the longest first, in a few words."""
        running = sorted(self._running.copy().values(), key=lambda entry: entry[1])
        if not running:
            return ""
        function, since, caller = running[0]
        more = f" and {len(running) - 1} more" if len(running) > 1 else ""
        name = self.membership.name_of(caller)
        return f"{function} for {name} since {time.monotonic() - since:.1f} s{more}"

    def on_call(self, call: Call, sender: int, frames: list[bytes]) -> Job | None:
        """Take a call in: return the job that runs it, or None while it waits for a reference or a value."""
        number = next(self._numbers)
        if self._refused:
            self._refused.pop((sender, call.id), None)
        self._running[number] = (call.function, time.monotonic(), sender)
        request = Request(self, number, call, sender, frames)
        if call.target is None and call.result is None and not call.payload.forks:  # nothing to take hold of
            if call.recording is None:
                request.decoded = codec.decode_early(call.payload, frames)
            else:
                request.decode_early()
            return request.run
        return request.admit()

    def refuse(self, sender: int, call: Call) -> None:
        """Forget a call that did not run for lack of a definition, until its caller repeats it or gives it up."""
        if call.result is not None:
            self.references.uncreate(call.result)
            self._refused[sender, call.id] = call.result
            if self.links.connected(sender) is None:  # `on_lost` may have looked before
                self.abandon(sender, call.id)

    def abandon(self, sender: int, id: int) -> None:
        """Fail what a refused call was to make: its caller has given the call up."""
        result = self._refused.pop((sender, id), None)
        if result is not None:
            self.references.abandon(result)

    def when_there(self, number: int, request: Request, target: Promise[Any]) -> None:
        """Run a call, ``number`` here, once the value of its target is there; end it if its caller is lost before."""
        self._waiting[number] = request
        target.add_done_callback(lambda _: self._go_on(number, request.run))
        if self.links.connected(request.sender) is None:  # `on_lost` may have looked before
            self._go_on(number, request.end_unheard)

    def _go_on(self, number: int, job: Job) -> None:
        """Submit a job for a call that waits, unless another job has been submitted for it.

        The value may come while its caller is lost, and each may be noticed in a thread of its own.
        """
        if self._waiting.pop(number, None) is not None:
            self.submit(job)

    def on_lost(self, record: Record, why: str) -> None:
        """Fail the calls of a lost caller that wait for a value, and the values of its calls that were refused."""
        for number, request in self._waiting.copy().items():
            if request.sender == record.incarnation:
                self._go_on(number, request.end_unheard)
        for sender, id in self._refused.copy():
            if sender == record.incarnation:
                self.abandon(sender, id)

    def end(self, number: int, sender: int) -> None:
        """Count a call as answered."""
        self._running.pop(number, None)
        with self._counting:
            self.finished[sender] = self.finished.get(sender, 0) + 1


class Request:
    """One call on its way through this worker."""

    def __init__(self, executor: Executor, number: int, call: Call, sender: int, frames: list[bytes]) -> None:
        self._number = number
        self._executor = executor
        self._call = call
        self.sender = sender
        """The caller's incarnation."""
        self._frames = frames
        self._references: list[RRef[Any]] = executor.references.accept(call.payload.forks) if call.payload.forks else []
        self._target: Promise[Any] | None = None
        self.decoded: Any = codec.NOT_DECODED
        """The function and its arguments, where they could be decoded early."""
        self._began = False
        """Whether the function has been called, which is done once (G2)."""
        self._context: Any = None
        if call.recording is not None:
            self._context = executor.recorder.enter(call.recording, sender)

    # -- in the reading thread ----------------------------------------------------------------

    def admit(self) -> Job | None:
        """Take hold of what the call refers to; a job once nothing is missing."""
        references, call = self._executor.references, self._call
        if call.result is not None:
            references.create(call.result, self.sender)
        pending = references.unconfirmed(call.payload.forks) if call.payload.forks else None
        if pending:
            references.when_confirmed(pending, self._later)
            return None
        return self._with_target()

    def _later(self) -> None:
        if self._executor.links.connected(self.sender) is None:
            self.end_unheard()
            return
        job = self._with_target()
        if job is not None:
            self._executor.submit(job)

    def end_unheard(self) -> None:
        """Fail a call that has not begun, because its caller is lost.

        If the call was to make a value to which others refer, they get the error.
        """
        caller = self._executor.membership.name_of(self.sender)
        self._fail(WorkerLost(f"{caller} was lost before {self._call.function}, which it called here, could begin"))

    def _with_target(self) -> Job | None:
        if self._call.target is None:
            self.decode_early()
            return self.run
        self._target = self._executor.references.retain(self._call.target, self.sender, self._later)
        if self._target is None:
            return None
        if self._target.done():
            return self.run
        self._executor.when_there(self._number, self, self._target)
        return None

    def decode_early(self) -> None:
        """Decode what is small and runs nobody's code before another thread is woken to read.

        Making tensors lets go of the GIL, which the woken thread would take: a hand-over in the midst of a call.
        """
        if self._context is None:
            self.decoded = codec.decode_early(self._call.payload, self._frames, self._references)
        elif codec.decodes_quickly(self._call.payload, self._frames):
            with contextlib.suppress(NbdistError):  # `run` meets the error again, and answers with it
                self.decoded = codec.decode(self._call.payload, self._frames, self._references, self._attach())

    def _attach(self) -> Attach | None:
        recording = self._call.recording
        if self._context is None or recording is None:
            return None
        return self._executor.recorder.incoming(self._context, recording, self.sender, self._call.function)

    # -- in a thread of the pool --------------------------------------------------------------

    def run(self) -> None:
        """Run the function and answer; in a thread for which the agent is the active one."""
        around = self._executor.around
        try:
            if around is None:
                result, is_async = self.invoke()
            else:
                with around(self._call.origin):
                    result, is_async = self.invoke()
        except BaseException as error:
            if isinstance(error, MissingDefinition) and not self._began:
                self._answer_missing(error)
                return
            if os.getpid() != self._executor.pid:
                _leave_fork(error)
            self._fail(error)
        else:
            if os.getpid() != self._executor.pid:
                _leave_fork(None)
            if is_async:
                self._answer_later(result)
            else:
                self._answer(result)
            del result  # the frames of an error in it may have this one

    def invoke(self) -> tuple[Any, bool]:
        """Run it; what it returned, and whether that is a future for the result."""
        call = self._call
        if call.mode == Mode.FETCH:
            assert self._target is not None  # `run` is only made a job when it is there
            return self._target.value(), False
        if self.decoded is codec.NOT_DECODED:
            self.decoded = codec.decode(call.payload, self._frames, self._references, self._attach())
        function, args, kwargs = self.decoded
        if function is None:
            function = definitions.get_own(*call.payload.definitions[0])
        self.decoded, self._frames, self._references = None, [], []
        if call.payload.definitions:
            peer = self._executor.links.peer(self.sender)
            if peer is not None:
                for _, digest in call.payload.definitions:
                    peer.definitions.add(digest)
        if self._target is not None:
            value = self._target.value()
            is_async = hasattr(getattr(type(value), function, None), ASYNC_MARK)
            function = getattr(value, function)
        else:
            if isinstance(function, str):
                function = names.resolve(function)
            is_async = hasattr(function, ASYNC_MARK)
        executor, key = self._executor, (self.sender, call.id)
        if trace.listeners:
            what = {"callee": function, "args": args}
            trace.emit("call.run", agent=executor.name, function=call.function, id=call.id, **what)
        self._began = True
        try:
            executor.stopping.begin(key)
            if self._context is None or call.recording is None:
                return function(*args, **kwargs), is_async
            with executor.recorder.running(self._context, call.recording):
                return function(*args, **kwargs), is_async
        finally:
            executor.stopping.end(key)
            if trace.listeners:
                trace.emit("call.ran", agent=executor.name, function=call.function, id=call.id)

    def _answer_later(self, future: Any) -> None:
        if not is_torch_future(future):
            self._fail(
                UsageError(
                    "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                    f"but got {type(future).__name__}"
                )
            )
            return

        def finish(done: Any) -> None:
            with self._executor.activate():
                result, failed = outcome_of(done)
                if failed is None:
                    self._answer(result)
                else:
                    self._fail(failed)

        future.add_done_callback(finish)

    def _answer(self, result: Any) -> None:
        if self._call.result is not None:
            # The reply goes first: who then asks for the value finds the reference confirmed.
            state = self._executor.references.announce(self._call.result.rref, result, None)
            self._reply(True, Payload(), [], state)
            self._executor.references.fulfil(self._call.result.rref, result, None)
            self._finish()
            return
        usual = codec.encode_usual_result(result, self._executor.spaces.get(self.sender))
        if usual is not None:
            self._reply(True, *usual)
            self._finish()
            return
        forker = MessageForker(self._executor.references, self.sender)
        try:
            encoded = self._encode(result, forker)
        except BaseException as error:
            forker.take_back()
            what = names.display_name(type(result))
            self._fail(
                EncodeError(f"the result of {self._call.function} (a {what}) {error}") if _ours(error) else error
            )
            return
        recording = self._record(encoded) if encoded.recorded else None
        self._reply(True, encoded.payload, encoded.frames, holds=forker, recording=recording, slots=encoded.slots)
        self._finish()

    def _record(self, encoded: codec.Encoded) -> Recording:
        return self._executor.recorder.outgoing(self._context, self.sender, encoded.recorded, self._call.function)

    def _encode(self, result: Any, forker: MessageForker) -> codec.Encoded:
        executor, recording = self._executor, self._call.recording
        connection = executor.links.connections.get(self.sender)
        if connection is None:  # the caller is gone
            name, device_map, known = "", None, set[str]()
        else:
            name, known = connection.record.name, connection.peer.definitions
            device_map = connection.record.device_maps.get(executor.name)
        encode = partial(
            codec.encode,
            forker=forker,
            devices={theirs: ours for ours, theirs in device_map.items()} if device_map else None,
            receiver=name,
            record=self._context is not None and recording is not None and recording.grad,
            space=executor.spaces.get(self.sender),
        )
        try:
            return encode(result, by_value=True, known=known)
        except EncodeError:
            # A definition of `__main__` that cannot travel by value may still be known by name.
            forker.take_back()
            return encode(result)

    def _fail(self, error: BaseException) -> None:
        executor, call = self._executor, self._call
        failure, target = None, self._target
        if call.target is not None and target is not None and target.done() and target.exception() is error:
            # The error arose earlier, where the value should have been made, and was described there.
            failure = executor.references.failure(call.target)
        failure = failure or describe(error, executor.name, call.function)
        state = None
        if call.result is not None:
            error.__traceback__ = None  # its frames would keep the arguments, for as long as the reference lives
            state = executor.references.announce(call.result.rref, None, error, failure)
        trace.emit("call.failed", agent=executor.name, function=call.function, error=error, note=failure[2])
        encoded = codec.encode(failure, by_value=True)
        self._reply(False, encoded.payload, encoded.frames, state)
        if call.result is not None:
            executor.references.fulfil(call.result.rref, None, error)
        self._finish()

    def _answer_missing(self, error: MissingDefinition) -> None:
        """The caller may repeat the call with the definitions in it; nothing has run."""
        missing = self._call.payload.definitions
        if not missing:
            self._fail(error)
            return
        self._executor.refuse(self.sender, self._call)
        self._reply(False, Payload(), [], missing=missing)
        self._finish(created=False)

    def _reply(
        self,
        ok: bool,
        payload: Payload,
        frames: Any,
        state: State | None = None,
        holds: Any = None,
        missing: list[tuple[str, str]] | None = None,
        recording: Recording | None = None,
        slots: Sequence[Slot] = (),
    ) -> None:
        call = self._call
        try:
            reply = Reply(call.id, ok, payload, state, missing or [], recording)
            self._executor.links.post(self.sender, reply, frames, holds, slots)
        except NbdistError:
            if isinstance(holds, MessageForker):
                holds.take_back()  # the caller is gone

    def _finish(self, *, created: bool = True) -> None:
        """Let go of what was held for the call."""
        references, call = self._executor.references, self._call
        if call.result is not None and created:
            references.release(call.result.rref)
        if call.target is not None and self._target is not None:
            self._target = None
            references.release(call.target)
        self._executor.end(self._number, self.sender)


def _leave_fork(error: BaseException | None) -> None:
    """End a process that the function forked, where the function is over: the call is answered in the parent.

    This thread is the only one of the process, and would wait for messages of the parent's.
    """
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _ours(error: BaseException) -> bool:
    return isinstance(error, EncodeError)
