"""Sends calls: encodes what is called and its arguments, has the answer awaited, and posts the message."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from nbdist import durations
from nbdist.channel.contract import Buffer
from nbdist.errors import EncodeError, UsageError
from nbdist.finalisers import hand_over, this_thread
from nbdist.rpc.calls import Pending, PendingCalls
from nbdist.rpc.forker import MessageForker
from nbdist.rpc.futures import Latch, Promise
from nbdist.rpc.links import Links
from nbdist.rpc.options import UNSET_RPC_TIMEOUT, RpcBackendOptions, time_limit
from nbdist.rpc.recording import Calling
from nbdist.rpc.references import References
from nbdist.rpc.repeats import Draft, Repeats
from nbdist.rpc.rref import RRef
from nbdist.rpc.sharing import Sharing
from nbdist.wire import codec, culprit
from nbdist.wire.messages import Call, Fork, Mode, Payload, Record

__all__ = ["Sender"]


class Sender:
    """Sends one agent's calls."""

    def __init__(
        self,
        options: RpcBackendOptions,
        pending: PendingCalls,
        links: Links,
        references: References,
        sharing: Sharing,
        recorder: Calling,
        repeats: Repeats,
        is_deciding: Callable[[], bool],
        on_unsent: Callable[[Fork | None, Promise[Any], BaseException], None],
    ) -> None:
        """Make the sender.

        ``is_deciding()`` returns whether the calling thread holds the lock without which nothing is answered.
        ``on_unsent`` is to end what a finaliser has called and what could not be sent.
        """
        self.origin: Callable[[], str] | None = None
        """For whose cell the calling thread works; it travels with every call."""
        self.rpc_timeout = time_limit(options.rpc_timeout)
        """Seconds that a call has which names no limit; 0 for none."""
        self.expect_no_more: Callable[[], None] = _nothing
        """Called where a call could not be sent, to undo what `Latch.on_send` did."""
        self._device_maps = options.device_maps
        self._pending = pending
        self._links = links
        self._references = references
        self._spaces = sharing.spaces
        self._recorder = recorder
        self._repeats = repeats
        self._is_deciding = is_deciding
        self._on_unsent = on_unsent

    def timeout_of(self, timeout: float) -> float:
        """Return a call's time limit in seconds: the default where ``timeout`` is negative; 0 for none."""
        if timeout == UNSET_RPC_TIMEOUT:  # as in almost every call
            return self.rpc_timeout
        seconds = durations.limit(timeout)
        return self.rpc_timeout if seconds < 0 else seconds

    def send(
        self,
        to: Record,
        mode: Mode,
        label: str,
        body: Any,
        timeout: float,
        outcome: Promise[Any] | Latch,
        *,
        builtin: bool = False,
        target: RRef[Any] | None = None,
        result: Fork | None = None,
    ) -> None:
        """Send a call of ``body``, and have its end settle ``outcome``.

        ``body`` is a function (or its name), a tuple and a dict; None for a fetch, which only has a ``target``, the
        reference whose value the call works on. ``result`` is the fork that the caller has of a value which the call
        makes. ``timeout`` is as in `timeout_of`. Raises what keeps the call from being sent. What is called in the
        midst of the package (`nbdist.finalisers`) is sent by another thread; where ``outcome`` is a Latch, for which
        somebody would wait, this raises UsageError then.
        """
        if this_thread.is_closed or (type(outcome) is Latch and self._is_deciding()):
            send = partial(self.send, to, mode, label, body, timeout, builtin=builtin, target=target, result=result)
            self._hand_over(send, outcome, result, label, to)
            return
        call = Pending(
            id=next(self._pending.numbers),
            to=to.incarnation,
            worker=to.name,
            function=label,
            outcome=outcome,
            started=time.monotonic(),
            timeout=self.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else self.timeout_of(timeout),
            thread=threading.get_ident(),
            result=result,
            target=target._id if target is not None else None,
        )
        if target is not None:
            # Until it is answered, though the reference be let go of: it may be repeated, or wait there for others.
            call.hold = target.keep()
        context = self._recorder.current()
        if context is None and target is None:
            function, args, kwargs = body
            peer = self._links.peer(to.incarnation) if type(function) is not str else None
            known, lacking = (peer.definitions, peer.lacking) if peer is not None else ((), ())
            space = self._spaces.get(to.incarnation)
            usual = codec.encode_usual_call(function, args, kwargs, space, known, lacking)
            if usual is not None:
                if usual[0].definitions and type(outcome) is Latch:  # the caller cannot touch its arguments meanwhile
                    again = partial(self._encode, call, to, mode, builtin, body, None, None, by_value=True)
                    call.again = partial(self._repeats.send, call, again)
                self._send_usual(call, mode, builtin, *usual)
                return
        first: Draft | None = None
        try:
            first = self._encode(call, to, mode, builtin, body, target, context)
            if call.definitions:
                again = partial(self._encode, call, to, mode, builtin, body, target, context, by_value=True)
                self._repeats.prepare(call, again)
            self._pending.add(call)
            if type(outcome) is Latch and outcome.on_send is not None:
                outcome.on_send()
            call.seq = self._links.post(call.to, first.message, first.frames, first.forker, first.slots)
        except BaseException:
            self._pending.pop(call.id)
            self.expect_no_more()
            if first is not None:
                first.forker.take_back()
            call.drop_repeat()
            if call.recording is not None:
                self._recorder.withdraw(call.recording)
            raise
        self._links.note_call(call)

    def _hand_over(
        self, send: Callable[..., None], outcome: Promise[Any] | Latch, result: Fork | None, label: str, to: Record
    ) -> None:
        """Have another thread do ``send(outcome=...)``; what keeps the call from being sent is its outcome.

        That thread encodes the arguments, a moment later, without the calling thread's gradient mode and context.
        """
        told = outcome if isinstance(outcome, Promise) else Promise[Any]()  # nobody will wait for a latch

        def try_to_send() -> None:
            try:
                send(outcome=told)
            except BaseException as error:
                self._on_unsent(result, told, error.with_traceback(None))

        hand_over(try_to_send)
        if told is not outcome:
            raise UsageError(_MIDST.format(label=label, to=to.name))

    def _send_usual(self, call: Pending, mode: Mode, builtin: bool, payload: Payload, frames: Sequence[Buffer]) -> None:
        """Send a call in which there is nothing that references, recordings or definitions must hear of."""
        origin = self.origin() if self.origin is not None else ""
        message = Call(call.id, mode, call.function, payload, builtin, call.result, None, origin)
        try:
            self._pending.add(call)
            outcome = call.outcome
            if type(outcome) is Latch and outcome.on_send is not None:
                outcome.on_send()
            call.seq = self._links.post(call.to, message, frames)
        except BaseException:
            self._pending.pop(call.id)
            self.expect_no_more()
            raise
        self._links.note_call(call)

    def _encode(
        self,
        call: Pending,
        to: Record,
        mode: Mode,
        builtin: bool,
        body: Any,
        target: RRef[Any] | None,
        context: Any,
        *,
        by_value: bool = False,
    ) -> Draft:
        forker = MessageForker(self._references, to.incarnation)
        peer = self._links.peer(to.incarnation)
        device_map = self._device_maps.get(to.name)
        # A call that is encoded once more is so by another thread.
        grad = call.recording.grad if call.recording is not None else torch.is_grad_enabled()
        try:
            if body is None:
                encoded = codec.Encoded(_NO_PAYLOAD, [])
            else:
                encoded = codec.encode(
                    body,
                    by_value=by_value,
                    lacking=peer.lacking if peer is not None else (),
                    known=peer.definitions if peer is not None and not by_value else (),
                    forker=forker,
                    devices={str(ours): str(theirs) for ours, theirs in device_map.items()} if device_map else None,
                    receiver=to.name,
                    record=context is not None and grad,
                    space=self._spaces.get(to.incarnation),
                )
            call.definitions = encoded.named
            if context is not None and call.recording is None:  # once, also for a call that is encoded twice
                call.recording = self._recorder.outgoing(context, to.incarnation, encoded.recorded, call.function)
            elif encoded.requires_grad and context is None and grad and not by_value:
                self._recorder.warn(call.function, to.name)
            message = Call(
                call.id,
                mode,
                call.function,
                encoded.payload,
                builtin,
                call.result,
                target._id if target is not None else None,
                self.origin() if self.origin is not None else "",
                call.recording,
            )
            forker.kept.append(call.hold)
            return Draft(message, encoded.frames, forker, encoded.slots)
        except BaseException as error:
            forker.take_back()
            if isinstance(error, EncodeError):
                found = culprit.of_call(body) if error.__cause__ is not None and isinstance(body, tuple) else ""
                which = f"{found}, which" if found else f"an argument of {call.function} (or the function)"
                raise EncodeError(f"{which} {error}") from (error.__cause__ or error)
            raise


_NO_PAYLOAD = Payload()

_MIDST = (
    "{label} was called on {to} by a finaliser (a __del__, or what a weak reference calls) or a signal's handler that "
    "Python ran while this thread was sending or reading messages, where it cannot wait for an answer. The call is "
    "made all the same, and its result dropped. Call with rpc_async there"
)


def _nothing() -> None:
    pass
