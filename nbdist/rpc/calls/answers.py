"""Answers calls: encodes what the function returned or raised, and releases what the call held."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from nbdist import trace
from nbdist.channel.shared_memory.arena import ArenaSpace
from nbdist.errors import EncodeError, MissingDefinition, NbdistError, UsageError
from nbdist.rpc.core.arrivals import Arrival
from nbdist.rpc.core.exchange import Exchange
from nbdist.rpc.failures import describe
from nbdist.rpc.futures import outcome_of
from nbdist.rpc.links import Links
from nbdist.rpc.promise import Promise
from nbdist.rpc.recording import Served
from nbdist.rpc.references.forker import MessageForker
from nbdist.rpc.references.reference_table import References
from nbdist.torch_private import is_torch_future
from nbdist.wire import codec
from nbdist.wire.devices import CPU_ONLY
from nbdist.wire.messages import Payload, Reply
from nbdist.wire.pickling import names
from nbdist.wire.tensors import Slot


class Asked(Arrival):
    """The part of a call that is needed to answer it."""

    context: Any = None
    """The autograd context in which the call was made; None for a call that is not recorded."""
    value: Promise[Any] | None = None
    """The value that the call works on, while it runs; None for a call that works on none."""


@dataclass(eq=False, repr=False)
class Answers:
    """Sends one agent's answers: exactly one for each call.

    A *definition* is a function or class of the caller's ``__main__``, which the caller can send along by value.
    """

    _name: str  # the agent's
    _exchange: Exchange
    _links: Links
    _references: References
    _spaces: dict[int, ArenaSpace]  # `Sharing.spaces`
    _recorder: Served
    # Returns a context manager, which a thread that is not of the agent's pool enters to answer.
    _activate: Callable[[], AbstractContextManager[Any]]

    def give(self, asked: Asked, result: Any) -> None:
        """Answer with the function's return value, or keep the value here if the caller asked for a reference."""
        call = asked.call
        if call.result is not None:
            # First reply, then publish the value: a call that gets the value then finds the reference confirmed.
            state = self._references.announce(call.result.rref, result, None)
            self._reply(asked.sender, Reply(call.id, True, Payload(), state))
            self._references.fulfil(call.result.rref, result, None)
            self._finish(asked)
            return
        # Almost all results are None, a number, a text, or one small tensor, and take a short way. A device map may
        # send even such a tensor to another device, so it rules the short way out.
        connection = self._links.connections.get(asked.sender)
        mapped = connection is not None and self._name in connection.record.device_maps
        usual = None if mapped else codec.encode_usual_result(result, self._spaces.get(asked.sender))
        if usual is not None:
            payload, frames = usual
            self._reply(asked.sender, Reply(call.id, True, payload), frames)
            self._finish(asked)
            return
        forker = MessageForker(self._references, asked.sender)
        try:
            encoded = self._encode(asked, result, forker)
        except BaseException as error:  # a user's class, while it is pickled: its error is the answer
            forker.take_back()
            if isinstance(error, EncodeError):
                what = names.display_name(type(result))
                unmapped = error.unmapped
                error = EncodeError(f"the result of {call.function} (a {what}) {error}")
                error.unmapped = unmapped
            self.fail(asked, error)
            return
        # Recorded tensors have an edge in the autograd graph, which the reply must name.
        recording = None
        if encoded.recorded:
            recording = self._recorder.outgoing(asked.context, asked.sender, encoded.recorded, call.function)
        reply = Reply(call.id, True, encoded.payload, recording=recording)
        self._reply(asked.sender, reply, encoded.frames, forker, encoded.slots)
        self._finish(asked)

    def give_later(self, asked: Asked, future: Any) -> None:
        """Answer once ``future`` is done, which a function marked with `async_execution` has returned."""
        if not is_torch_future(future):
            error = UsageError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                f"but got {type(future).__name__}"
            )
            self.fail(asked, error)
            return

        def finish(done: Any) -> None:
            with self._activate():  # whichever thread completes the future comes here
                result, failed = outcome_of(done)
                if failed is None:
                    self.give(asked, result)
                else:
                    self.fail(asked, failed)

        future.add_done_callback(finish)

    def fail(self, asked: Asked, error: BaseException) -> None:
        """Answer with an error. If the caller asked for a reference, the error takes the place of the value."""
        call, failure, value = asked.call, None, asked.value
        if call.target is not None and value is not None and value.done() and value.exception() is error:
            # An earlier call failed to make the value. The error was described then, and is passed on unchanged.
            failure = self._references.failure(call.target)
        failure = failure or describe(error, self._name, call.function)
        state = None
        if call.result is not None:
            _drop_frames(error)  # they would keep the arguments as long as the reference lives
            state = self._references.announce(call.result.rref, None, error, failure)
        trace.emit("call.failed", agent=self._name, function=call.function, error=error, note=failure[2])
        encoded = codec.encode(failure, by_value=True)
        self._reply(asked.sender, Reply(call.id, False, encoded.payload, state), encoded.frames)
        if call.result is not None:
            # After the reply, as in `give`.
            self._references.fulfil(call.result.rref, None, error)
        self._finish(asked)

    def refuse(self, asked: Asked, error: MissingDefinition) -> None:
        """Tell the caller that a definition is missing here; the reply lists all definitions that the call names."""
        missing = asked.call.payload.definitions
        if not missing:
            self.fail(asked, error)  # a repeat would not help
            return
        asked.value = None
        self._references.refuse(asked)
        self._reply(asked.sender, Reply(asked.call.id, False, Payload(), missing=missing))

    def _encode(self, asked: Asked, result: Any, forker: MessageForker) -> codec.Encoded:
        """Encode a result for the caller, with definitions by value; by name if a definition cannot travel by value."""
        connection, recording = self._links.connections.get(asked.sender), asked.call.recording
        # The caller has these definitions, since it has named them. In a notebook, which may replace a definition at
        # any time, only those count that it has named in this call.
        named = asked.call.payload.definitions
        known: Collection[str] = {digest for _, digest in named} if named else ()
        if connection is not None and connection.record.world_size is not None:
            known = connection.peer.definitions
        encode = partial(
            codec.encode,
            forker=forker,
            devices=connection.results if connection is not None else CPU_ONLY,
            record=asked.context is not None and recording is not None and recording.grad,
            space=self._spaces.get(asked.sender),
        )
        try:
            return encode(result, by_value=True, known=known)
        except EncodeError:
            # The caller may know the definition in `__main__` by its name, even if it cannot travel by value.
            forker.take_back()
            return encode(result)

    def _reply(
        self, to: int, reply: Reply, frames: Any = (), holds: MessageForker | None = None, slots: Sequence[Slot] = ()
    ) -> None:
        """Post the reply to a caller, if it is still there; ``holds`` is kept until the reply has arrived."""
        try:
            self._links.post(to, reply, frames, holds, slots)
        except NbdistError:  # the caller is gone
            return

    def _finish(self, asked: Asked) -> None:
        """Forget a call that is answered, and release the values that it held. A second time raises KeyError."""
        asked.value = None
        with self._exchange.lock:
            instructions = self._exchange.answered(asked)
        if instructions:
            self._references.perform(instructions)


def _drop_frames(error: BaseException) -> None:
    """Take the tracebacks off an error, off the errors that led to it, and off those in an ExceptionGroup."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            left += [each.__cause__, each.__context__]
            if isinstance(each, BaseExceptionGroup):
                left += each.exceptions
