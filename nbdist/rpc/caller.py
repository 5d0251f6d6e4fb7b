"""Makes calls: the caller's side. How they end is told in `rpc.outcomes`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from nbdist import durations, trace
from nbdist.channel.contract import Buffer, ChannelError
from nbdist.errors import EncodeError, NbdistError, UnknownWorker, UsageError, WorkerLost
from nbdist.ids import IdSource
from nbdist.rpc.calls import Pending, PendingCalls
from nbdist.rpc.forker import MessageForker
from nbdist.rpc.futures import Future, Latch, Promise
from nbdist.rpc.links import Links
from nbdist.rpc.membership import Membership, WorkerInfo
from nbdist.rpc.options import UNSET_RPC_TIMEOUT, RpcBackendOptions, time_limit
from nbdist.rpc.outcomes import Outcomes
from nbdist.rpc.recording import Calling
from nbdist.rpc.references import References
from nbdist.rpc.rref import RRef, local_type
from nbdist.rpc.sharing import Sharing
from nbdist.wire import codec, culprit, names
from nbdist.wire.messages import Call, Fork, Mode, Payload, Record
from nbdist.wire.tensors import Slot

__all__ = ["Caller"]

To = str | int | WorkerInfo

_ARGS, _KWARGS = (tuple, list, type(None)), (dict, type(None))
"""The usual types of a call's arguments, which need no closer look."""


class _Encoded(NamedTuple):
    """A call ready to be sent."""

    message: Call
    frames: list[Buffer]
    forker: MessageForker
    slots: Sequence[Slot] = ()


class Caller:
    """The caller's side of calls."""

    def __init__(
        self,
        options: RpcBackendOptions,
        membership: Membership,
        ids: IdSource,
        pending: PendingCalls,
        links: Links,
        references: References,
        sharing: Sharing,
        recorder: Calling,
        outcomes: Outcomes,
    ) -> None:
        self.origin: Callable[[], str] | None = None
        """For whose cell the calling thread works; it travels with every call."""
        self.rpc_timeout = time_limit(options.rpc_timeout)
        """Seconds that a call has which names no limit; 0 for none."""
        self.read_as_guest: Callable[[Latch], None] | None = None
        """Reads messages in a thread that waits for an answer; None if the channel has no place for such a reader."""
        self.expect: Callable[[], None] | None = None
        """Called right before a call goes out whose answer the thread reads itself; `expect_no_more` ends it."""
        self.expect_no_more: Callable[[], None] = _nothing
        self._device_maps = options.device_maps
        self._membership = membership
        self._me = membership.me.incarnation
        self._name = membership.me.name
        self._ids = ids
        self._pending = pending
        self._links = links
        self._references = references
        self._spaces = sharing.spaces
        self._recorder = recorder
        self._outcomes = outcomes

    # -- the ways to call ---------------------------------------------------------------------

    def sync(
        self,
        to: To,
        function: Any,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
    ) -> Any:
        """Call and wait."""
        outcome = Latch(self.expect)
        self._call(to, function, args, kwargs, timeout, outcome)
        return outcome.wait(self.read_as_guest)

    def begin(self, to: To, function: Any, args: Sequence[Any], timeout: float = -1.0) -> Latch:
        """Call, and have what `sync` waits for."""
        outcome = Latch()
        try:
            self._call(to, function, args, None, timeout, outcome)
        except WorkerLost as error:
            outcome.try_settle(None, error.with_traceback(None))  # whose frames have the outcome
        return outcome

    def asynchronous(
        self,
        to: To,
        function: Any,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
    ) -> Future[Any]:
        """Call, and have a Future; it fails where the worker is gone."""
        try:
            return self._call(to, function, args, kwargs, timeout, Future()).future
        except WorkerLost as error:
            return _failed(error.with_traceback(None))  # whose frames have the arguments

    def remote(
        self,
        to: To,
        function: Any,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
    ) -> RRef[Any]:
        """Call, and have an RRef to the outcome, which stays there."""
        _check(function, args, kwargs)
        owner = self.find(to)
        named = names.describe(function)
        body = (named.name or function, tuple(args or ()), dict(kwargs or {}))
        return self._create(owner, Mode.REMOTE, named.label, body, timeout, builtin=named.builtin)

    def fetch(self, rref: RRef[Any], timeout: float) -> Any:
        """Return a copy of a referenced value; on its owner, the value itself."""
        if rref._fork is None:
            return self._references.local_value(rref._id, self.timeout_of(timeout))
        owner = self._owner(rref)
        outcome = Latch(self.expect)
        self._send(owner, Mode.FETCH, "to_here", None, timeout, outcome, target=rref)
        return outcome.wait(self.read_as_guest)

    def method_sync(self, rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a referenced value and wait."""
        outcome = Latch(self.expect)
        self._method(rref, name, timeout, args, kwargs, outcome)
        return outcome.wait(self.read_as_guest)

    def method_async(self, rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of a referenced value, and have a Future."""
        return self._method(rref, name, timeout, args, kwargs, Future()).future

    def method_remote(self, rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Call a method of a referenced value, and have an RRef to the outcome."""
        rref.check_alive()
        state = rref.state
        cls = local_type(state) if state is not None else None
        if cls is not None and not hasattr(cls, name) and not hasattr(cls, "__getattr__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        owner = self._owner(rref)
        label = f"{cls.__name__}.{name}" if cls is not None else name
        return self._create(owner, Mode.METHOD_REMOTE, label, (name, args, kwargs), timeout, target=rref)

    # -- whom, and for how long ---------------------------------------------------------------

    def find(self, to: To) -> Record:
        """Return the living member that ``to`` names.

        Raises:
            WorkerLost: the member has gone; the text says why.
            UnknownWorker: there has never been such a member.
        """
        try:
            return self._membership.find(to)
        except UnknownWorker:
            why = self._membership.why_gone(to)
            if why is None:
                raise
            name = to.name if isinstance(to, WorkerInfo) else to
            raise WorkerLost(f"{name if isinstance(name, str) else f'the worker with id {name}'} {why}") from None

    def timeout_of(self, timeout: float) -> float:
        """Return a call's time limit in seconds: the default where ``timeout`` is negative; 0 for none."""
        if timeout == UNSET_RPC_TIMEOUT:  # as in almost every call
            return self.rpc_timeout
        seconds = durations.limit(timeout)
        return self.rpc_timeout if seconds < 0 else seconds

    # -- making a call ------------------------------------------------------------------------

    def _call(
        self,
        to: To,
        function: Any,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
        outcome: Promise[Any] | Latch,
    ) -> Pending:
        if not callable(function) or type(args) not in _ARGS or type(kwargs) not in _KWARGS:
            _check(function, args, kwargs)
        callee = (self._membership.names.get(to) if type(to) is str else None) or self.find(to)
        named = names.describe(function)
        body = (named.name or function, tuple(args or ()), dict(kwargs or {}))
        return self._send(callee, Mode.CALL, named.label, body, timeout, outcome, builtin=named.builtin)

    def _method(
        self, rref: RRef[Any], name: str, timeout: float, args: Any, kwargs: Any, outcome: Promise[Any] | Latch
    ) -> Pending:
        rref.check_alive()
        state = rref.state
        label = f"{state.qualname}.{name}" if state is not None else name
        body = (name, args, kwargs)
        return self._send(self._owner(rref), Mode.METHOD, label, body, timeout, outcome, target=rref)

    def _owner(self, rref: RRef[Any]) -> Record:
        record = self._membership.get(rref._owner)
        if record is None:
            raise WorkerLost(f"the owner of this RRef, {rref.owner_name()}, is gone")
        return record

    def _create(
        self,
        owner: Record,
        mode: Mode,
        label: str,
        body: Any,
        timeout: float,
        *,
        builtin: bool = False,
        target: RRef[Any] | None = None,
    ) -> RRef[Any]:
        rref_id, fork_id = self._ids.next(), self._ids.next()
        mine = owner.incarnation == self._me
        creation: Promise[Any] = Promise()
        result = Fork(rref_id, fork_id, owner.incarnation, self._me)
        rref: RRef[Any] | None = None
        try:
            if mine:
                self._references.own(rref_id)
            else:
                self._references.begin(rref_id, fork_id, owner.incarnation)
            rref = self._references.refer(rref_id, None if mine else fork_id, owner.incarnation, creation)
            try:
                self._send(owner, mode, label, body, timeout, creation, builtin=builtin, target=target, result=result)
            except ChannelError as error:
                self._outcomes.creation_failed(result, error, may_exist=False)
                creation.try_settle(None, error.with_traceback(None))  # whose frames have the reference
            return rref
        except BaseException as error:
            if rref is None:  # Ctrl-C: there is no object whose end would let go of it
                self._references.hold(rref_id, None if mine else fork_id)
            if not mine:  # after Ctrl-C the call may be on its way
                self._references.fail(fork_id, may_exist=not isinstance(error, NbdistError))
            raise

    def _send(
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
    ) -> Pending:
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
                    call.again = partial(self._repeat, call, again)
                self._send_usual(call, mode, builtin, *usual)
                return call
        first: _Encoded | None = None
        try:
            first = self._encode(call, to, mode, builtin, body, target, context)
            if call.definitions:
                again = partial(self._encode, call, to, mode, builtin, body, target, context, by_value=True)
                self._prepare_repeat(call, to, again)
            self._pending.add(call)
            if type(outcome) is Latch and outcome.on_send is not None:
                outcome.on_send()
            self._post(call, first)
        except BaseException:
            self._pending.pop(call.id)
            self.expect_no_more()
            if first is not None:
                first.forker.take_back()
            call.drop_repeat()
            if call.recording is not None:
                self._recorder.withdraw(call.recording)
            raise
        self._on_sent(call)
        return call

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
        self._on_sent(call)

    def _on_sent(self, call: Pending) -> None:
        """Have the half time of a call noticed that has gone out."""
        if call.timeout > 0 and call.started + call.timeout * 0.5 < self._links.due:
            self._links.hurry(call.started + call.timeout * 0.5)
        if trace.listeners:
            trace.emit("call.sent", agent=self._name, to=call.worker, function=call.function, id=call.id)

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
    ) -> _Encoded:
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
            return _Encoded(message, encoded.frames, forker, encoded.slots)
        except BaseException as error:
            forker.take_back()
            if isinstance(error, EncodeError):
                found = culprit.of_call(body) if error.__cause__ is not None and isinstance(body, tuple) else ""
                which = f"{found}, which" if found else f"an argument of {call.function} (or the function)"
                raise EncodeError(f"{which} {error}") from (error.__cause__ or error)
            raise

    def _post(self, call: Pending, encoded: _Encoded) -> None:
        call.seq = self._links.post(call.to, encoded.message, encoded.frames, encoded.forker, encoded.slots)

    # -- once more, with definitions ----------------------------------------------------------

    def _prepare_repeat(self, call: Pending, to: Record, encode: Callable[[], _Encoded]) -> None:
        """Be ready for a callee that lacks definitions of our ``__main__``.

        What is sent is the value at the call. So where the callee is not known to have them, the call is
        encoded by value right away, before the caller can change an argument; it costs that once for each
        definition and callee.
        """
        peer = self._links.peer(to.incarnation)
        if peer is not None and all(digest in peer.definitions for _, digest in call.definitions):
            if call.is_waited_for:  # the caller cannot touch its arguments meanwhile
                call.again = lambda: self._repeat(call, encode)
            return
        names_only = call.definitions
        try:
            spare = encode()
        except NbdistError as error:
            failure = error  # of no matter unless it is needed

            def fail() -> _Encoded:
                raise failure

            call.again = lambda: self._repeat(call, fail)
        else:
            call.again = lambda: self._repeat(call, lambda: spare)
            call.unsent = spare.forker.take_back
        call.definitions = names_only

    def _repeat(self, call: Pending, encode: Callable[[], _Encoded]) -> None:
        call.again = call.unsent = None
        try:
            self._pending.add(call)
            self._post(call, encode())
        except BaseException as error:
            if self._pending.pop(call.id) is not None:
                self._outcomes.unrepeated(call, error)
            return
        self._on_sent(call)


_NO_PAYLOAD = Payload()


def _nothing() -> None:
    pass


def _failed(error: BaseException) -> Future[Any]:
    """Return a future that has failed; no frame that the error could hold has it."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _check(function: Any, args: Any, kwargs: Any) -> None:
    if not callable(function):
        raise TypeError(f"function should be callable, not {type(function).__name__}")
    if args is not None and not isinstance(args, list | tuple):
        raise TypeError(f"args must be a tuple, not {type(args).__name__}: write args=({cast(Any, args)!r},)")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise UsageError(f"kwargs must be a dict, not {type(kwargs).__name__}")
