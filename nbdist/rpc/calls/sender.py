"""Sends calls: encodes the function and its arguments, registers the call as pending, and posts the message."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nbdist import durations
from nbdist.channel.shared_memory.arena import ArenaSpace
from nbdist.errors import EncodeError, UsageError
from nbdist.finalisers import hand_over, this_thread
from nbdist.rpc.calls.repeats import Draft, Repeats
from nbdist.rpc.core.pending import Pending, PendingCalls
from nbdist.rpc.latch import Latch
from nbdist.rpc.links import Links
from nbdist.rpc.options import UNSET_RPC_TIMEOUT
from nbdist.rpc.promise import Promise
from nbdist.rpc.recording import Calling
from nbdist.rpc.references.forker import MessageForker
from nbdist.rpc.references.reference_table import References
from nbdist.rpc.references.rref import RRef
from nbdist.wire import codec
from nbdist.wire.devices import CPU_ONLY
from nbdist.wire.encoded import NO_TENSORS
from nbdist.wire.messages import Call, Fork, Mode, Record
from nbdist.wire.pickling import culprit
from nbdist.wire.tensors import Slot


@dataclass(eq=False, repr=False)
class Sender:
    """Sends the calls of one agent."""

    _me: Record
    rpc_timeout: float
    """The time limit in seconds of a call without its own; 0 for no limit."""
    _pending: PendingCalls
    _links: Links
    _references: References
    _spaces: dict[int, ArenaSpace]  # shared memory for large tensors, by receiver
    _recorder: Calling
    _repeats: Repeats
    _is_deciding: Callable[[], bool]  # True if this thread holds `Exchange.lock`: no answer can be handled
    # Ends a call that a finaliser made and that could not be sent.
    _on_unsent: Callable[[Fork | None, Promise[Any], BaseException], None]
    origin: Callable[[], str] | None = None
    """Returns the id of the cell for which the calling thread works; None without cells."""
    expect_no_more: Callable[[], None] = lambda: None
    """Called when a call could not be sent, to undo `Latch.on_send`, if the channel has something to undo."""

    def timeout_of(self, timeout: float) -> float:
        """Return a call's time limit in seconds: the default if ``timeout`` is negative; 0 for no limit."""
        if timeout == UNSET_RPC_TIMEOUT:  # almost every call
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
        target: RRef[Any] | None = None,
        result: Fork | None = None,
    ) -> None:
        """Send a call. When the call ends, in whatever way, ``outcome`` is settled.

        ``label`` is the function's name, for errors and displays. ``body`` is a tuple: the function or its name, the
        arguments, the keyword arguments; None for a fetch. ``builtin`` is True for an operator of torch. ``target`` is
        the reference whose value the call works on, ``result`` the caller's fork of the value that it makes.

        If the call cannot be sent, undoes everything that was done for it and raises the error. If ``outcome`` is a
        Latch and the calling thread must not wait, raises UsageError; another thread sends the call.
        """
        # A finaliser or signal handler runs in the middle of nbdist's code, or in an event of the exchange: this thread
        # may hold a lock that sending or an answer needs (`nbdist.finalisers`).
        if this_thread.is_closed or (type(outcome) is Latch and self._is_deciding()):
            send = partial(self.send, to, mode, label, body, timeout, target=target, result=result)
            self._hand_over(send, outcome, result, label, to)
            return
        # 1. Make the record of the call.
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
            target=target.id if target is not None else None,
        )
        if target is not None:
            # Kept until the answer, even if the reference is released: the call may be repeated, or wait at the callee.
            call.hold = target.keep()
        forker: MessageForker | None = None
        slots: Sequence[Slot] = ()
        try:
            # 2. Encode it. Almost all calls take the short way: they have no autograd context, no reference as the
            # target, and at most one small tensor.
            usual = None
            context = self._recorder.current()
            if context is None and target is None and to.name not in self._me.device_maps:
                function, args, kwargs = body
                peer = self._links.peer(to.incarnation) if type(function) is not str else None
                known, lacking = (peer.definitions, peer.lacking) if peer is not None else ((), ())
                space = self._spaces.get(to.incarnation)
                usual = codec.encode_usual_call(function, args, kwargs, space, known, lacking)
            if usual is not None:
                payload, frames = usual
                named: Sequence[tuple[str, str]] = payload.definitions
            else:
                encoded, forker = self._encode(call, to, body, context)
                payload, frames, slots, named = encoded.payload, encoded.frames, encoded.slots, encoded.named
            # 3. Make the message, and prepare a second one in case the callee lacks a definition that this one names.
            origin = self.origin() if self.origin is not None else ""
            message = Call(call.id, mode, label, payload, result, call.target, origin, call.recording)
            if named:
                again = partial(self._encode, call, to, body, context, by_value=True)
                if usual is None:
                    self._repeats.prepare(call, message, again)
                elif type(outcome) is Latch:  # the caller waits: its arguments cannot change
                    call.again = partial(self._repeats.send, call, message, again)
            # 4. Register the call as pending before it is sent: the answer may arrive at once.
            self._pending.add(call)
            if type(outcome) is Latch and outcome.on_send is not None:
                outcome.on_send()
            call.seq = self._links.post(call.to, message, frames, forker, slots)
        except BaseException:  # Ctrl-C, a user's pickler, a callee that is gone
            # Undo everything: nobody will answer this call.
            self._pending.pop(call.id)
            self.expect_no_more()
            if forker is not None:
                forker.take_back()
            call.drop_repeat()
            if call.recording is not None:
                self._recorder.withdraw(call.recording)
            raise
        self._links.note_call(call)

    def _hand_over(
        self, send: Callable[..., None], outcome: Promise[Any] | Latch, result: Fork | None, label: str, to: Record
    ) -> None:
        """Run ``send(outcome=...)`` in another thread; raise UsageError if ``outcome`` is a Latch."""
        told = outcome if isinstance(outcome, Promise) else Promise[Any]()  # nobody will wait for the latch

        def try_to_send() -> None:
            try:
                send(outcome=told)
            except BaseException as error:  # whatever keeps the call from being sent must end it
                self._on_unsent(result, told, error.with_traceback(None))

        # The arguments are encoded a moment later there, without this thread's gradient mode and autograd context.
        hand_over(try_to_send)
        if told is not outcome:
            raise UsageError(_CANNOT_WAIT_HERE.format(label=label, to=to.name))

    def _encode(self, call: Pending, to: Record, body: Any, context: Any, *, by_value: bool = False) -> Draft:
        """Encode a call's function and arguments into a message that is not sent yet; an error undoes its forks."""
        forker = MessageForker(self._references, to.incarnation)
        peer, connection = self._links.peer(to.incarnation), self._links.connections.get(to.incarnation)
        # Another thread encodes a repeated call; that thread's gradient mode does not count.
        grad = call.recording.grad if call.recording is not None else torch.is_grad_enabled()
        try:
            if body is None:
                encoded = codec.Encoded(NO_TENSORS, [])
            else:
                encoded = codec.encode(
                    body,
                    by_value=by_value,
                    lacking=peer.lacking if peer is not None else (),
                    known=peer.definitions if peer is not None and not by_value else (),
                    forker=forker,
                    devices=connection.calls if connection is not None else CPU_ONLY,
                    record=context is not None and grad,
                    space=self._spaces.get(to.incarnation),
                )
            call.definitions = encoded.named
            if context is not None and call.recording is None:  # record once, even if the call is encoded twice
                call.recording = self._recorder.outgoing(context, to.incarnation, encoded.recorded, call.function)
            elif encoded.requires_grad and context is None and grad and not by_value:
                self._recorder.warn(call.function, to.name)
            forker.kept.append(call.hold)
            return encoded, forker
        except BaseException as error:  # a user's pickler may raise anything, also Ctrl-C
            forker.take_back()
            if isinstance(error, EncodeError):
                # The codec's text begins with the verb: put the noun before it.
                found = culprit.of_call(body) if error.__cause__ is not None and isinstance(body, tuple) else ""
                which = f"{found}, which" if found else f"an argument of {call.function} (or the function)"
                failed = EncodeError(f"{which} {error}")
                failed.unmapped = error.unmapped
                raise failed from (error.__cause__ or error)
            raise


_CANNOT_WAIT_HERE = (
    "{label} was called on {to} by a finaliser (a __del__ or a callback of a weak reference) or a signal handler that "
    "Python ran while this thread was sending or reading messages. It cannot wait for an answer there. The call is "
    "made all the same, and its result is dropped. Use rpc_async in finalisers and signal handlers"
)
