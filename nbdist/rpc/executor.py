"""Runs what others ask for; `nbdist.rpc.answers` answers.

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
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from nbdist import trace
from nbdist.errors import MissingDefinition, NbdistError, WorkerLost
from nbdist.rpc.answers import Answers, Asked
from nbdist.rpc.dispatch import Job
from nbdist.rpc.exchange import Exchange
from nbdist.rpc.links import Links
from nbdist.rpc.membership import Membership
from nbdist.rpc.recording import Attach, Served
from nbdist.rpc.references import References
from nbdist.rpc.rref import RRef
from nbdist.wire import codec, definitions, names
from nbdist.wire.messages import Call, Mode

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
        recorder: Served,
        answers: Answers,
    ) -> None:
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
        self.recorder = recorder
        self.answers = answers

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


class Request(Asked):
    """One call on its way through this worker."""

    def __init__(self, executor: Executor, call: Call, sender: int, frames: list[bytes]) -> None:
        super().__init__(call, sender)
        self._executor = executor
        self._frames = frames
        self._references: list[RRef[Any]] = executor.references.accept(call.payload.forks) if call.payload.forks else []
        self.decoded: Any = codec.NOT_DECODED
        """The function and its arguments, where they could be decoded early."""
        self._began = False
        """Whether the function has been called, which is done once (G2)."""
        if call.recording is not None:
            self.context = executor.recorder.enter(call.recording, sender)

    # -- in the reading thread ----------------------------------------------------------------

    def decode_early(self) -> None:
        """Decode what is small and runs nobody's code before another thread is woken to read.

        Making tensors lets go of the GIL, which the woken thread would take: a hand-over in the midst of a call.
        """
        if self.context is None:
            self.decoded = codec.decode_early(self.call.payload, self._frames, self._references)
        elif codec.decodes_quickly(self.call.payload, self._frames):
            with contextlib.suppress(NbdistError):  # `run` meets the error again, and answers with it
                self.decoded = codec.decode(self.call.payload, self._frames, self._references, self._attach())

    def _attach(self) -> Attach | None:
        recording = self.call.recording
        if self.context is None or recording is None:
            return None
        return self._executor.recorder.incoming(self.context, recording, self.sender, self.call.function)

    # -- in a thread of the pool --------------------------------------------------------------

    def end_unheard(self) -> None:
        """Fail a call that has not begun, because its caller is lost.

        If the call was to make a value to which others refer, they get the error.
        """
        caller = self._executor.membership.name_of(self.sender)
        error = WorkerLost(f"{caller} was lost before {self.call.function}, which it called here, could begin")
        self._executor.answers.fail(self, error)

    def run(self) -> None:
        """Run the function and answer; in a thread for which the agent is the active one."""
        around, answers = self._executor.around, self._executor.answers
        try:
            if around is None:
                result, is_async = self.invoke()
            else:
                with around(self.call.origin):
                    result, is_async = self.invoke()
        except BaseException as error:
            if isinstance(error, MissingDefinition) and not self._began:
                answers.refuse(self, error)
                return
            if os.getpid() != self._executor.pid:
                _leave_fork(error)
            answers.fail(self, error)
        else:
            if os.getpid() != self._executor.pid:
                _leave_fork(None)
            if is_async:
                answers.give_later(self, result)
            else:
                answers.give(self, result)
            del result  # the frames of an error in it may have this one

    def invoke(self) -> tuple[Any, bool]:
        """Run it; what it returned, and whether that is a future for the result."""
        call = self.call
        if call.target is not None:
            self.value = self._executor.references.target(call.target)
            if call.mode == Mode.FETCH:
                return self.value.value(), False
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
        if self.value is not None:
            value = self.value.value()
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
            if self.context is None or call.recording is None:
                return function(*args, **kwargs), is_async
            with executor.recorder.running(self.context, call.recording):
                return function(*args, **kwargs), is_async
        finally:
            executor.stopping.end(key)
            if trace.listeners:
                trace.emit("call.ran", agent=executor.name, function=call.function, id=call.id)


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
