"""Runs what others ask for, and answers.

`nbdist.rpc.exchange.Exchange` first takes hold of what a call refers to (in the reading thread, so that no later
message can overtake it). The call waits without a thread for references that are not confirmed and for a value that
is not there, and only then becomes a job.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from nbdist import trace
from nbdist.errors import EncodeError, MissingDefinition, NbdistError, UsageError, WorkerLost
from nbdist.rpc.arrivals import Arrival
from nbdist.rpc.dispatch import Job
from nbdist.rpc.exchange import Exchange
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
from nbdist.wire.messages import Call, Mode, Payload, Recording, Reply, State
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
        exchange: Exchange,
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
        self.around: Callable[[str], AbstractContextManager[None]] | None = None
        """What to enter around a function that runs for a call from a cell; takes the call's origin."""
        self.stopping: Stoppable
        """Who can stop what runs here."""
        self.name = membership.me.name
        self.pid = membership.me.pid
        self.exchange = exchange
        self.membership = membership
        self.links = links
        self.references = references
        self.spaces = sharing.spaces
        self.recorder = recorder
        self.submit = submit
        self.activate = activate

    def doing(self) -> str:
        """Say what runs here, the longest first, in a few words."""
        running = self.exchange.doing()
        if not running:
            return ""
        first = running[0]
        more = f" and {len(running) - 1} more" if len(running) > 1 else ""
        name = self.membership.name_of(first.sender)
        return f"{first.call.function} for {name} since {time.monotonic() - first.since:.1f} s{more}"

    def on_call(self, call: Call, sender: int, frames: list[bytes]) -> Job | None:
        """Take a call in: return the job that runs it, or None while it waits for a reference or a value."""
        request, exchange = Request(self, call, sender, frames), self.exchange
        payload = call.payload
        if call.target is None and call.result is None and not payload.forks:
            exchange.came_alone(request)
            if call.recording is None:
                request.decoded = codec.decode_early(payload, frames)
            else:
                request.decode_early()
            return request.run
        if call.result is not None:
            self.references.expect(call.result.rref)
        with exchange.lock:
            going_on = exchange.came(request, [fork.fork for fork in payload.forks])
        is_ready = request in going_on
        if going_on != [request]:
            self.references.resume([other for other in going_on if other is not request])
        if is_ready and call.target is None:
            request.decode_early()
        return request.run if is_ready else None


class Request(Arrival):
    """One call on its way through this worker."""

    def __init__(self, executor: Executor, call: Call, sender: int, frames: list[bytes]) -> None:
        super().__init__(call, sender)
        self._executor = executor
        self._frames = frames
        self._references: list[RRef[Any]] = executor.references.accept(call.payload.forks) if call.payload.forks else []
        self._target: Promise[Any] | None = None
        """The value that it works on, once it runs."""
        self.decoded: Any = codec.NOT_DECODED
        """The function and its arguments, where they could be decoded early."""
        self._began = False
        """Whether the function has been called, which is done once (G2)."""
        self._context: Any = None
        if call.recording is not None:
            self._context = executor.recorder.enter(call.recording, sender)

    # -- in the reading thread ----------------------------------------------------------------

    def decode_early(self) -> None:
        """Decode what is small and runs nobody's code before another thread is woken to read.

        Making tensors lets go of the GIL, which the woken thread would take: a hand-over in the midst of a call.
        """
        if self._context is None:
            self.decoded = codec.decode_early(self.call.payload, self._frames, self._references)
        elif codec.decodes_quickly(self.call.payload, self._frames):
            with contextlib.suppress(NbdistError):  # `run` meets the error again, and answers with it
                self.decoded = codec.decode(self.call.payload, self._frames, self._references, self._attach())

    def _attach(self) -> Attach | None:
        recording = self.call.recording
        if self._context is None or recording is None:
            return None
        return self._executor.recorder.incoming(self._context, recording, self.sender, self.call.function)

    # -- in a thread of the pool --------------------------------------------------------------

    def end_unheard(self) -> None:
        """Fail a call that has not begun, because its caller is lost.

        If the call was to make a value to which others refer, they get the error.
        """
        caller = self._executor.membership.name_of(self.sender)
        self._fail(WorkerLost(f"{caller} was lost before {self.call.function}, which it called here, could begin"))

    def run(self) -> None:
        """Run the function and answer; in a thread for which the agent is the active one."""
        around = self._executor.around
        try:
            if around is None:
                result, is_async = self.invoke()
            else:
                with around(self.call.origin):
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
        call = self.call
        if call.target is not None:
            self._target = self._executor.references.target(call.target)
            if call.mode == Mode.FETCH:
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
        if self.call.result is not None:
            # The reply goes first: who then asks for the value finds the reference confirmed.
            state = self._executor.references.announce(self.call.result.rref, result, None)
            self._reply(True, Payload(), [], state)
            self._executor.references.fulfil(self.call.result.rref, result, None)
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
            self._fail(EncodeError(f"the result of {self.call.function} (a {what}) {error}") if _ours(error) else error)
            return
        recording = self._record(encoded) if encoded.recorded else None
        self._reply(True, encoded.payload, encoded.frames, holds=forker, recording=recording, slots=encoded.slots)
        self._finish()

    def _record(self, encoded: codec.Encoded) -> Recording:
        return self._executor.recorder.outgoing(self._context, self.sender, encoded.recorded, self.call.function)

    def _encode(self, result: Any, forker: MessageForker) -> codec.Encoded:
        executor, recording = self._executor, self.call.recording
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
        executor, call = self._executor, self.call
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
        missing = self.call.payload.definitions
        if not missing:
            self._fail(error)
            return
        self._target = None
        self._executor.references.refuse(self)
        self._reply(False, Payload(), [], missing=missing)

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
        call = self.call
        reply = Reply(call.id, ok, payload, state, missing or [], recording)
        try:
            self._executor.links.post(self.sender, reply, frames, holds, slots)
        except NbdistError:  # the caller is gone
            return

    def _finish(self) -> None:
        """Let go of what was held for the call."""
        self._target = None
        executor = self._executor
        with executor.exchange.lock:
            instructions = executor.exchange.answered(self)
        if instructions:
            executor.references.perform(instructions)


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
