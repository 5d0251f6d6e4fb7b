"""Runs the calls that other agents make here; `nbdist.rpc.calls.answers` answers them.

First the reading thread tells `nbdist.rpc.core.exchange.Exchange` what the call refers to, before any later message is
handled. The call waits, without a thread, until its references are confirmed and the value that it works on exists.
Only then does it become a job for the pool.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from nbdist import trace
from nbdist.amounts import duration
from nbdist.errors import MissingDefinition, NbdistError, UsageError, WorkerLost
from nbdist.rpc.calls.answers import Answers, Asked
from nbdist.rpc.core.exchange import Exchange
from nbdist.rpc.core.members import Membership
from nbdist.rpc.futures import ASYNC_MARK
from nbdist.rpc.links import Links
from nbdist.rpc.pool import Job
from nbdist.rpc.recording import Attach, Served
from nbdist.rpc.references.reference_table import References
from nbdist.rpc.references.rref import RRef
from nbdist.wire import codec
from nbdist.wire.messages import Call, Mode
from nbdist.wire.pickling import definitions, names


class Stopper(Protocol):
    """Stops calls while they run; `nbdist.rpc.calls.stopping.Stopping` is one.

    A ``key`` is the caller's incarnation, and the caller's number for the call.
    """

    def begin(self, key: tuple[int, int]) -> None:
        """Let a call be stopped in this thread, until `end`. Raises KeyboardInterrupt if it was stopped already."""

    def end(self, key: tuple[int, int]) -> None:
        """No longer let a call be stopped; withdraw a KeyboardInterrupt that has not been raised yet."""


@dataclass(eq=False, repr=False)
class Executor:
    """The callee's side of one agent's calls: runs the functions that other agents call here."""

    exchange: Exchange
    membership: Membership
    links: Links
    references: References
    recorder: Served
    answers: Answers
    around: Callable[[str], AbstractContextManager[None]] | None = None
    """Returns a context manager to enter around each call that runs here; takes `Call.origin`. None for none."""
    on_error: Callable[[BaseException], None] | None = None
    """Called with each error of a function that has run here."""
    stopping: Stopper = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.membership.me.name
        self.pid = self.membership.me.pid  # a function that returns in another process has forked

    def doing(self, but: int = 0) -> str:
        """Describe the oldest call that is not answered here, count all but the newest ``but``; "" if there is none."""
        running = self.exchange.doing()
        del running[len(running) - but :]
        if not running:
            return ""
        first = running[0]
        more = f" and {len(running) - 1} more" if len(running) > 1 else ""
        name = self.membership.name_of(first.sender)
        return f"{first.call.function} for {name} since {duration(time.monotonic() - first.since)}{more}"

    def on_call(self, call: Call, sender: int, frames: list[bytes]) -> Job | None:
        """Register a call that has arrived; return the job that runs it, or None if the call has to wait."""
        # The reading thread comes here, under `Agent._turn`, so that later messages find the call registered.
        request, exchange = Request(self, call, sender, frames), self.exchange
        payload = call.payload
        # Almost all calls refer to no values: they wait for nothing, and need no lock.
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
        # Other threads run the calls that waited for the value which this call makes.
        if going_on != [request]:
            self.references.resume([other for other in going_on if other is not request])
        if is_ready and call.target is None:
            request.decode_early()
        return request.run if is_ready else None


class Request(Asked):
    """A call on its way through this worker: it is decoded, run and answered."""

    def __init__(self, executor: Executor, call: Call, sender: int, frames: list[bytes]) -> None:
        super().__init__(call, sender)
        self._executor = executor
        self._frames = frames  # after the envelope; empty once the call is decoded
        # The references that the call brought, as objects of this worker.
        self._references: list[RRef[Any]] = executor.references.accept(call.payload.forks) if call.payload.forks else []
        self.decoded: Any = codec.NOT_DECODED
        """The function and its arguments if they were decoded early."""
        self._began = False  # True once the function has been called, which happens at most once
        if call.recording is not None:
            self.context = executor.recorder.enter(call.recording, sender)

    # -- in the reading thread ----------------------------------------------------------------

    def decode_early(self) -> None:
        """Decode the call in the reading thread if that is quick and runs no user code; otherwise `run` decodes it."""
        # Before another thread is woken to read: making tensors releases the GIL, and the woken thread would take it.
        if self.context is None:
            self.decoded = codec.decode_early(self.call.payload, self._frames, self._references)
        elif codec.decodes_quickly(self.call.payload, self._frames) and not (
            self.call.payload.places and self._executor.recorder.looks(self.context.id)
        ):
            with contextlib.suppress(NbdistError):  # `run` gets the same error again, and answers with it
                self.decoded = codec.decode(self.call.payload, self._frames, self._references, self._attach())

    def _attach(self) -> Attach | None:
        """Return the function that joins the tensors of a recorded call to the graph; None for other calls."""
        recording = self.call.recording
        if self.context is None or recording is None:
            return None
        return self._executor.recorder.incoming(self.context, recording, self.sender, self.call.function)

    # -- in a thread of the pool --------------------------------------------------------------

    def end_unheard(self) -> None:
        """Fail a call that has not begun, because its caller is lost: others may refer to the value it was to make."""
        caller = self._executor.membership.name_of(self.sender)
        error = WorkerLost(
            f"{caller} was lost before its call of {self.call.function} could begin here, so the function has not run: "
            "create the value again"
        )
        self._executor.answers.fail(self, error)

    def run(self) -> None:
        """Run the function and answer, or refuse the call if a definition is missing."""
        around, answers = self._executor.around, self._executor.answers
        try:
            if around is None:
                result, is_async = self.invoke()
            else:
                with around(self.call.origin):
                    result, is_async = self.invoke()
        except BaseException as error:  # the user's function: whatever it raises, SystemExit too, is its answer
            # Refuse only if the function has not begun: else the error comes from a call that the function made.
            if isinstance(error, MissingDefinition) and not self._began:
                answers.refuse(self, error)
                return
            if os.getpid() != self._executor.pid:
                _leave_fork(error)
            if self._executor.on_error is not None:
                self._executor.on_error(error)
            answers.fail(self, error)
        else:
            if os.getpid() != self._executor.pid:
                _leave_fork(None)
            if is_async:
                answers.give_later(self, result)
            else:
                answers.give(self, result)
            del result  # if it holds an error, the error's frames may include this one, which would keep it alive

    def invoke(self) -> tuple[Any, bool]:
        """Run the function; return its result, and whether it is marked to return a future of its answer."""
        # `Stopping` looks for the frame of this method: the frames inside of it are the user's.
        call = self.call
        if call.target is not None:
            self.value = self._executor.references.target(call.target)
            if call.mode == Mode.FETCH:  # a fetch runs no function
                return self.value.value(), False
        # The body is decoded here if it is large, or if decoding it runs user code.
        if self.decoded is codec.NOT_DECODED:
            self.decoded = codec.decode(call.payload, self._frames, self._references, self._attach())
        function, args, kwargs = self.decoded
        if function is None:
            function = definitions.get_own(*call.payload.definitions[0])
        # Drop our references to the arguments: they live until the function returns, not until the answer is sent.
        self.decoded, self._frames, self._references = None, [], []
        # The caller has these definitions. If this process has equal ones, calls to it may refer to them by name.
        if call.payload.definitions:
            peer = self._executor.links.peer(self.sender)
            if peer is not None:
                for _, digest in call.payload.definitions:
                    peer.definitions.add(digest)
        # A method is looked up on the value.
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
            about = {"function": call.function, "id": call.id, "caller": self.sender, "callee": function, "args": args}
            trace.emit("call.run", agent=executor.name, **about)
        self._began = True  # from here on, a MissingDefinition is the function's own, and no reason to refuse
        try:
            executor.stopping.begin(key)  # in the `try`: `end` must follow even if this raises
            if self.context is None or call.recording is None:
                return function(*args, **kwargs), is_async
            with executor.recorder.running(self.context, call.recording):
                return function(*args, **kwargs), is_async
        except BdbQuit as quit:  # it would end the caller's cell without a word
            raise UsageError(
                f"pdb has ended {call.function} on {executor.name}: a `Pdb` of your own cannot ask in a function that "
                "runs for a call. Write breakpoint() in its place"
            ) from quit
        finally:
            executor.stopping.end(key)
            if trace.listeners:
                trace.emit("call.ran", agent=executor.name, function=call.function, id=call.id)


def _leave_fork(error: BaseException | None) -> None:
    """End a forked child in which the function has returned or raised: the parent answers the call."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the user's function may have replaced the stream by anything
            stream.flush()
    # Not by an error: the pool would log it, and this thread, the only one in the child, would wait for the parent's
    # messages.
    os._exit(code)
