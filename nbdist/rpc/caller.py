"""Makes calls: the caller's side. `nbdist.rpc.sender` sends them; how they end is told in `nbdist.rpc.outcomes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from nbdist.channel.contract import ChannelError
from nbdist.errors import NbdistError, UnknownWorker, UsageError, WorkerLost
from nbdist.ids import IdSource
from nbdist.rpc.futures import Future, Latch, Promise
from nbdist.rpc.membership import Membership, WorkerInfo
from nbdist.rpc.outcomes import Outcomes
from nbdist.rpc.references import References
from nbdist.rpc.rref import RRef, local_type
from nbdist.rpc.sender import Sender
from nbdist.wire import names
from nbdist.wire.messages import Fork, Mode, Record

__all__ = ["Caller"]

To = str | int | WorkerInfo

_ARGS, _KWARGS = (tuple, list, type(None)), (dict, type(None))
"""The usual types of a call's arguments, which need no closer look."""


class Caller:
    """The caller's side of calls."""

    def __init__(
        self, membership: Membership, ids: IdSource, references: References, outcomes: Outcomes, sender: Sender
    ) -> None:
        self.read_as_guest: Callable[[Latch], None] | None = None
        """Reads messages in a thread that waits for an answer; None if the channel has no place for such a reader."""
        self.expect: Callable[[], None] | None = None
        """Called right before a call goes out whose answer the thread reads itself; `Sender.expect_no_more` ends it."""
        self._membership = membership
        self._me = membership.me.incarnation
        self._ids = ids
        self._references = references
        self._outcomes = outcomes
        self._sender = sender
        self._send = sender.send

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
        future: Future[Any] = Future()
        try:
            self._call(to, function, args, kwargs, timeout, future)
        except WorkerLost as error:
            return _failed(error.with_traceback(None))  # whose frames have the arguments, and the other future
        return future

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
            return self._references.local_value(rref._id, self._sender.timeout_of(timeout))
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
        future: Future[Any] = Future()
        self._method(rref, name, timeout, args, kwargs, future)
        return future

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

    # -- whom ---------------------------------------------------------------------------------

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

    # -- making a call ------------------------------------------------------------------------

    def _call(
        self,
        to: To,
        function: Any,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
        outcome: Promise[Any] | Latch,
    ) -> None:
        if not callable(function) or type(args) not in _ARGS or type(kwargs) not in _KWARGS:
            _check(function, args, kwargs)
        callee = (self._membership.names.get(to) if type(to) is str else None) or self.find(to)
        named = names.describe(function)
        body = (named.name or function, tuple(args or ()), dict(kwargs or {}))
        self._send(callee, Mode.CALL, named.label, body, timeout, outcome, builtin=named.builtin)

    def _method(
        self, rref: RRef[Any], name: str, timeout: float, args: Any, kwargs: Any, outcome: Promise[Any] | Latch
    ) -> None:
        rref.check_alive()
        state = rref.state
        label = f"{state.qualname}.{name}" if state is not None else name
        body = (name, args, kwargs)
        self._send(self._owner(rref), Mode.METHOD, label, body, timeout, outcome, target=rref)

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
