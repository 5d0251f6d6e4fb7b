"""Makes calls: finds the callee, checks the arguments, names the function, and hands the call to a `Sender`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from nbdist.channel.contract import ChannelError
from nbdist.errors import NbdistError, UsageError, WorkerLost
from nbdist.ids import IdSource
from nbdist.rpc.calls.outcomes import Outcomes
from nbdist.rpc.calls.sender import Sender
from nbdist.rpc.core.members import Membership, WorkerInfo
from nbdist.rpc.futures import Future
from nbdist.rpc.latch import Latch
from nbdist.rpc.promise import Promise
from nbdist.rpc.references.reference_table import References
from nbdist.rpc.references.rref import RRef, local_type
from nbdist.thread_frames import calling_line
from nbdist.wire.messages import Fork, Mode, Record
from nbdist.wire.pickling import names

To = str | int | WorkerInfo
"""The destination of a call: a worker's name, its id or its `WorkerInfo`."""

# The usual types of the arguments of a call; only other types are checked more closely.
_ARGS, _KWARGS = (tuple, list, type(None)), (dict, type(None))


class Caller:
    """The caller's side of one agent's calls.

    A ``timeout`` is in seconds: negative for the agent's default, 0 for no limit. Methods that call raise WorkerLost if
    the worker is gone, UnknownWorker if the world never had it, EncodeError if an argument cannot be sent, and
    RRefError if a reference is known to be unusable. Methods that wait raise RpcTimeout and the function's error, too.
    """

    def __init__(
        self, membership: Membership, ids: IdSource, references: References, outcomes: Outcomes, sender: Sender
    ) -> None:
        self.read_as_guest: Callable[[Latch], None] | None = None
        """Reads the answer in the thread that waits for it; None if the channel lets only one thread read at a time."""
        self.expect: Callable[[], None] | None = None
        """Called right before a call whose answer the calling thread reads itself (`Channel.expect`)."""
        self.find = membership.find
        self._membership = membership
        self._me = membership.me.incarnation
        self._ids = ids
        self._references = references
        self._outcomes = outcomes
        self._sender = sender
        self._send = sender.send

    # -- the ways to call ---------------------------------------------------------------------

    def sync(
        self, to: To, function: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, timeout: float
    ) -> Any:
        """Call a function, wait for its result and return it. This thread may read messages meanwhile."""
        outcome = Latch(self.expect)
        self._call(to, function, args, kwargs, timeout, outcome)
        return outcome.wait(self.read_as_guest)

    def begin(self, to: To, function: Any, args: Sequence[Any], timeout: float = -1.0, label: str = "") -> Latch:
        """Call a function; return a latch for the result, on which only the calling thread may wait."""
        outcome = Latch()
        self._call(to, function, args, None, timeout, outcome, label)
        return outcome

    def asynchronous(
        self,
        to: To,
        function: Any,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
        label: str = "",
    ) -> Future[Any]:
        """Call a function; return a Future of its result. If the worker is gone, it has failed with WorkerLost."""
        future: Future[Any] = Future()
        try:
            self._call(to, function, args, kwargs, timeout, future, label)
        except WorkerLost as error:
            return _failed_future(error.with_traceback(None))  # its frames would keep the arguments and ``future``
        return future

    def remote(
        self, to: To, function: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, timeout: float
    ) -> RRef[Any]:
        """Call a function; return an RRef to its result, which stays with the worker that ran the function."""
        _check(function, args, kwargs)
        owner = self.find(to)
        named = names.describe(function)
        body = (named.name or function, tuple(args or ()), dict(kwargs or {}))
        return self._create(owner, Mode.REMOTE, named.label, body, timeout)

    def fetch(self, rref: RRef[Any], timeout: float) -> Any:
        """Return a copy of a referenced value from its owner, once it exists; on the owner, the value itself."""
        if rref.fork_id is None:
            return self._references.local_value(rref.id, self._sender.timeout_of(timeout))
        owner = self._owner(rref)
        outcome = Latch(self.expect)
        self._send(owner, Mode.FETCH, "to_here", None, timeout, outcome, target=rref)
        return outcome.wait(self.read_as_guest)

    def method_sync(self, rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a referenced value on its owner; wait for the result and return it."""
        outcome = Latch(self.expect)
        self._method(rref, name, timeout, args, kwargs, outcome)
        return outcome.wait(self.read_as_guest)

    def method_async(self, rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of a referenced value on its owner; return a Future of the result."""
        future: Future[Any] = Future()
        self._method(rref, name, timeout, args, kwargs, future)
        return future

    def method_remote(self, rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Call a method of a referenced value on its owner; return an RRef to the result."""
        rref.check_alive()
        state = rref.state
        cls = local_type(state) if state is not None else None
        if cls is not None and not hasattr(cls, name) and not hasattr(cls, "__getattr__"):
            # Without sending anything: the value's class is known here and lacks the method.
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        owner = self._owner(rref)
        label = f"{cls.__name__}.{name}" if cls is not None else name
        return self._create(owner, Mode.METHOD_REMOTE, label, (name, args, kwargs), timeout, target=rref)

    # -- sending ------------------------------------------------------------------------------

    def _call(
        self,
        to: To,
        function: Any,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
        outcome: Promise[Any] | Latch,
        label: str = "",
    ) -> None:
        """Send a call of a function; the end of the call settles ``outcome``."""
        # The usual call passes `_check` and `find` by: test_counts.py counts the Python functions of each call.
        if not callable(function) or type(args) not in _ARGS or type(kwargs) not in _KWARGS:
            _check(function, args, kwargs)
        callee = (self._membership.names.get(to) if type(to) is str else None) or self.find(to)
        named = names.describe(function)
        body = (named.name or function, tuple(args or ()), dict(kwargs or {}))
        self._send(callee, Mode.CALL, label or named.label, body, timeout, outcome)

    def _method(
        self, rref: RRef[Any], name: str, timeout: float, args: Any, kwargs: Any, outcome: Promise[Any] | Latch
    ) -> None:
        rref.check_alive()
        state = rref.state
        label = f"{state.qualname}.{name}" if state is not None else name
        body = (name, args, kwargs)
        self._send(self._owner(rref), Mode.METHOD, label, body, timeout, outcome, target=rref)

    def _owner(self, rref: RRef[Any]) -> Record:
        record = self._membership.get(rref.owner_incarnation)
        if record is None:
            raise rref.lost()
        return record

    def _create(
        self, owner: Record, mode: Mode, label: str, body: Any, timeout: float, target: RRef[Any] | None = None
    ) -> RRef[Any]:
        """Send a call, as `Sender.send` does, whose result stays with ``owner``; return the RRef to the result."""
        rref_id, fork_id, made_at = self._ids.next(), self._ids.next(), calling_line()
        mine = owner.incarnation == self._me
        creation: Promise[Any] = Promise()
        result = Fork(rref_id, fork_id, owner.incarnation, self._me)
        rref: RRef[Any] | None = None
        try:
            # Before the call goes out: the reply, which confirms the fork, may arrive at once.
            if mine:
                self._references.own(rref_id).made_at = made_at
            else:
                self._references.begin(rref_id, fork_id, owner.incarnation)
            rref = self._references.refer(rref_id, None if mine else fork_id, owner.incarnation, creation)
            rref.made_at = made_at
            try:
                self._send(owner, mode, label, body, timeout, creation, target=target, result=result)
            except ChannelError as error:  # raised later, where the reference is used
                # The frames refer to the reference.
                self._outcomes.unsent(result, creation, error.with_traceback(None))
            return rref
        except BaseException as error:  # also Ctrl-C, at any step: the new reference must end
            if rref is None:  # after Ctrl-C: make a hold, which ends at once, so that the value is released
                self._references.hold(rref_id, None if mine else fork_id)
            if not mine:  # after Ctrl-C the call may have gone out
                self._references.fail(fork_id, may_exist=not isinstance(error, NbdistError))
            raise


def _failed_future(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    # In a function of its own, so that no frame in the error's traceback refers to the future.
    future.set_exception(error)
    return future


def _check(function: Any, args: Any, kwargs: Any) -> None:
    if not callable(function):
        raise TypeError(f"function should be callable, not {type(function).__name__}")
    if args is not None and not isinstance(args, list | tuple):
        raise TypeError(f"args must be a tuple, not {type(args).__name__}: write args=({cast(Any, args)!r},)")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise UsageError(f"kwargs must be a dict, not {type(kwargs).__name__}")
