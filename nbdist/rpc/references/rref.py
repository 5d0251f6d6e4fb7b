"""Remote references: the objects with which a user refers to values on other workers.

An `RRef` refers to a value that its owner keeps. The object itself learns only from messages that are sent for other
reasons: who the owner is, whether the owner has confirmed the reference, and then the value's type and shape. Anything
more costs a message, and the user asks for it with a method: `RRef.to_here`, `RRef.rpc_sync`, `RRef.peek`.

The states of a reference, as its repr shows them (`RRef.standing`; `ForkStanding` in `nbdist.rpc.core.forks`)::

    pending ──▶ confirmed ──▶ released      by release(), also before the confirmation
       │            │
       │            ├──▶ failed             the function raised an error, which to_here() raises
       │            └──▶ dead               the owner is gone
       ├──▶ dead                            the owner is gone, or no longer has the value
       └──▶ failed                          the call that makes the value got no answer; a late answer is dropped

    on the owner: "owned here"; after the end of RPC: "ended"
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch

from nbdist.errors import RRefError, UsageError, WorkerLost
from nbdist.holds import Hold
from nbdist.ids import GlobalId
from nbdist.rpc.core.forks import ForkStanding
from nbdist.rpc.core.members import WorkerInfo
from nbdist.rpc.promise import Promise
from nbdist.rpc.references.describing import error_line
from nbdist.rpc.references.peeking import Peek, look
from nbdist.rpc.references.reference_table import References, creation_error
from nbdist.thread_frames import calling_line
from nbdist.wire.messages import Fork, State
from nbdist.wire.pickling.names import walk
from nbdist.wire.pickling.registered import register_reference

T = TypeVar("T")


class Calls(Protocol):
    """The methods of the agent's `nbdist.rpc.calls.caller.Caller` that references use; `Caller` describes them."""

    def sync(self, to: WorkerInfo, function: Any, args: tuple[Any, ...], kwargs: None, timeout: float) -> Any:
        """Call a function and wait for its result."""

    def fetch(self, rref: RRef[Any], timeout: float) -> Any:
        """Return a copy of a value; on its owner, return the value itself."""

    def method_sync(self, rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a value and wait for its result."""

    def method_async(self, rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a value, and return a Future of its result."""

    def method_remote(self, rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a value, and return an RRef to its result."""


class Home(NamedTuple):
    """The parts of an agent that its references use."""

    references: References
    calls: Calls
    run_pass: Callable[[int, torch.Tensor, bool], None]
    """Runs a backward pass. Takes a context's id, a tensor of this worker, and whether to retain the graph."""


_find_home: Callable[[], Home]


def set_home_finder(finder: Callable[[], Home]) -> None:
    """Set the function that returns the `Home` of the current agent, or raises an error, for a new ``RRef(value)``."""
    global _find_home
    _find_home = finder


class RRef(Generic[T]):
    """A reference that keeps a value alive on its owner. To use a value that is gone raises RRefError or WorkerLost.

    `nbdist.rpc.remote` makes a reference to the result of a call. ``RRef(value)`` makes one to a value of this worker,
    to send to other workers. A reference travels in the arguments and results of calls; ``pickle`` refuses it. The
    owner drops the value when no worker has a reference to it any more.

    Methods that need the value raise WorkerLost if the owner is gone. They raise RRefError if this reference was
    released, if RPC has ended, or if the call that should have made the value got no answer; and the function's own
    error if it failed. Methods and properties that describe the reference work at any time and send no message.
    ``RRef(value)`` raises NotInitialized if RPC does not run here.

    Args:
        value: the value to refer to.
        type_hint: ignored; accepted because torch's programs pass it.

    Example:
        >>> rref = rpc.remote("worker1", torch.ones, args=(2,))
        >>> rref.to_here()
        tensor([1., 1.])
        >>> rpc.RRef([1, 2])
        <RRef to list owned here>
    """

    # Plain attributes, because each call reads them; only this class sets them.
    id: GlobalId
    """The id of the value. All references to the value have this id, on every worker."""
    fork_id: GlobalId | None
    """The id of the fork that this worker holds; None on the owner, which needs no fork."""
    owner_incarnation: int
    """The incarnation of the agent that owns the value. `owner_name` is the name to show."""
    hold: Hold | None
    """The object that keeps the value alive; None after `release`. `keep` raises an error instead."""
    made_at: tuple[str, int] | None = None
    """The file and line that called `nbdist.rpc.remote` here; None if the reference was made in another way."""
    _known: State | None = None  # it stays after `release`, when the agent forgets its copy

    def __init__(self, value: T, type_hint: Any = None) -> None:
        home = _find_home()
        references = home.references
        self._home = home
        self.id = references.new_id()
        self.fork_id = None
        self.owner_incarnation = references.me
        self._creation: Promise[Any] | None = None
        self.hold = references.hold(self.id, None)
        references.own(self.id).made_at = calling_line()
        references.settle(self.id, value, None)

    # -- sending and watching -----------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise the error that is known about this reference, if there is one: RRefError or WorkerLost.

        RRefError: the reference was released, RPC has ended here, or the `remote` call got no answer. WorkerLost: the
        owner is gone, or no longer has the value. An error that the function raised does not count. Sends no message.
        On the owner, this raises only after `release`.
        """
        if self.hold is None:
            raise RRefError(f"{self!r} cannot be used: release() was called on it. Create the value again")
        if self.fork_id is None:
            return
        references = self._home.references
        if references.closed:
            raise RRefError(
                f"{self!r} cannot be used: RPC has been shut down on this worker. Start it again, and create the value "
                "again"
            )
        standing = references.forks.standing(self.fork_id)
        if standing is None:
            raise RRefError(
                f"{self!r} cannot be used: shutdown() has released all references of this worker. Create the value "
                "again"
            )
        if standing is ForkStanding.FAILED:
            why = self.creation_failure()
            raise creation_error("timed out" if why is None else why)
        if standing is ForkStanding.DEAD:
            raise self.lost()

    def lost(self) -> WorkerLost:
        """Return the WorkerLost to raise: the value is lost, because of what happened to its owner.

        Does not check that: if the owner lives, the text says that it no longer has the value.
        """
        why = self._home.references.membership.fate(self.owner_incarnation) or "no longer has the value"
        return WorkerLost(
            f"the value of this RRef is lost: its owner {self.owner_name()} {why}. Create the value again"
        )

    def keep(self) -> object:
        """Return an object that keeps the value alive for as long as the caller keeps the object, after `release`, too.

        Raises the errors of `check_alive`: RRefError or WorkerLost.
        """
        hold = self.hold  # first, because another thread may release this reference
        self.check_alive()
        return hold

    def is_held_for(self, references: References) -> bool:
        """Return whether this reference belongs to the agent with ``references`` and has not been released.

        True after the end of RPC, too. False for a reference that another thread is still making.
        """
        home, hold = getattr(self, "_home", None), getattr(self, "hold", None)
        return home is not None and hold is not None and home.references is references

    def hand_over(self, to: int, references: References | None = None, child: GlobalId | None = None) -> Fork:
        """Make a fork of this reference for a message that the agent with ``references`` sends to agent ``to``.

        ``references`` is None if the reference's own agent sends the message. ``child`` is the fork's id; None for a
        new one. Each call makes another fork. Send it, or give it to `References.take_back` if the message cannot be
        sent: until then the fork keeps the value. ``to`` is not checked.

        Raises:
            RRefError: the reference belongs to another agent or was released, RPC has ended here, or the `remote` call
                got no answer. On the owner, only the first two.
            WorkerLost: the owner of the value is gone.
        """
        own = self._home.references
        if references is not None and own is not references:
            raise RRefError(
                f"{self!r} cannot be sent: it belongs to another agent, or to an RPC world that has ended. Create the "
                "value again in this world"
            )
        self.check_alive()
        return own.hand_over(self.id, self.fork_id, to, child)

    def when_changed(self, then: Callable[[], None]) -> Callable[[], None]:
        """Call ``then`` each time the state of this reference or its value changes, at its end, too.

        Returns a function that removes the listener; a second call does nothing. ``then`` runs in the thread that
        handles the change, and must not block; its errors are logged.
        """
        ids = [self.id] if self.fork_id is None else [self.id, self.fork_id]
        return self._home.references.when_changed(ids, then)

    def forks_out(self) -> int | None:
        """Return how many forks of the value other workers hold; None if another worker owns the value.

        For displays; sends no message. 0 after the end of RPC.
        """
        return self._home.references.forks.forks_of(self.id) if self.fork_id is None else None

    # -- known without a message --------------------------------------------------------------

    @property
    def holder(self) -> int:
        """The incarnation of the agent to which this reference belongs, even if that agent has ended."""
        return self._home.references.me

    def is_owner(self) -> bool:
        """Return whether this worker owns the value.

        Sends no message, and works after `release`, too.
        """
        return self.fork_id is None

    def owner(self) -> WorkerInfo:
        """Return the `WorkerInfo` of the worker that owns the value, even if that worker is gone or RPC has ended.

        Raises UnknownWorker if this worker has never met the owner; `owner_name` does not.
        """
        return self._home.references.membership.info_of(self.owner_incarnation)

    def owner_name(self) -> str:
        """Return the name of the owner, even if it is gone or RPC has ended; a text for a worker never met here."""
        return self._home.references.membership.name_of(self.owner_incarnation)

    def is_forgotten(self) -> bool:
        """Return whether this worker no longer has its fork, after `release` or a graceful `nbdist.rpc.shutdown`.

        After `release` this takes a moment, and longer if the reference was passed on. False on the owner, which has no
        fork.
        """
        return self.fork_id is not None and self._home.references.forks.standing(self.fork_id) is None

    def has_ended(self) -> bool:
        """Return whether RPC has ended on this worker: this reference cannot be used, even if RPC runs again."""
        return self._home.references.closed

    def creation_failure(self) -> BaseException | None:
        """Return the error of the `nbdist.rpc.remote` call that should have made the value.

        This may be the function's own error. None if the call has not failed (yet), or if this reference did not come
        from such a call.
        """
        creation = self._creation
        return creation.exception() if creation is not None and creation.done() else None

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner has confirmed that it counts this reference; True on the owner. Sends no message.

        False before, if the `remote` call got no answer, or if the owner is gone; True if the function raised an error.
        False again once `is_forgotten` is True, a moment after `release`, and by a graceful shutdown. After any other
        end of RPC, the last answer stays.
        """
        return self.fork_id is None or self._home.references.forks.standing(self.fork_id) is ForkStanding.CONFIRMED

    @property
    def state(self) -> State | None:
        """The known description of the value: its type, and a tensor's shape, dtype and device. None until it is known.

        If the function that should have made the value raised an error, this describes the error. After `release`, this
        is the last known description. After the end of RPC it may be None, unless it was read before.
        """
        found = self._home.references.forks.state(self.id, self.fork_id)
        if found is not None:
            self._known = found
        return self._known

    def __str__(self) -> str:
        if self.fork_id is None:
            return f"OwnerRRef({self.id})"
        return f"UserRRef(RRefId = {self.id}, ForkId = {self.fork_id})"

    def __repr__(self) -> str:
        standing = self.standing
        told = "owned here" if standing == "here" else f"on {self.owner_name()}, {standing}"
        return f"<RRef {_summary(self.state)} {told}>"

    @property
    def standing(self) -> str:
        """The standing of this reference: "pending", "confirmed", "failed", "dead", "released", "ended" or "here".

        "pending": the owner has not confirmed it. "failed": its call failed, or the function that should have made the
        value raised an error. "dead": the owner is gone, or no longer has the value, or `nbdist.rpc.shutdown` has
        released this reference. "released": `release` was called. "ended": RPC has ended here. "here": this worker owns
        the value. Reading this sends no message.
        """
        if self.hold is None:
            return "released"
        if self._home.references.closed:
            return "ended"
        if self.fork_id is not None:
            standing = self._home.references.forks.standing(self.fork_id)
            if standing is not ForkStanding.CONFIRMED:
                return standing.value if standing is not None else "dead"
        state = self.state
        if state is not None and state.error is not None:
            return "failed"
        return "here" if self.fork_id is None else "confirmed"

    # -- using the value ----------------------------------------------------------------------

    def to_here(self, timeout: float = -1.0) -> T:
        """Fetch a copy of the value from its owner; on the owner, return the value itself.

        If the value does not exist yet, this waits until it does.

        Args:
            timeout: the time limit in seconds; negative for the ``rpc_timeout`` of `RpcBackendOptions`, 0 for none.

        Raises:
            RpcTimeout: the value did not come in time; the reference stays usable.
            WorkerLost: the owner is gone, and the value with it; or RPC ends here during the wait.
            RRefError: this reference was released, RPC has ended here, or the value was never made.
            TypeError: ``timeout`` is no number; UsageError if it is NaN, or in a finaliser (see `nbdist.rpc.rpc_sync`).
            Exception: the function that should have made the value raised this error.
            KeyboardInterrupt: Ctrl-C ended the wait. In a cluster, the function that makes the value stops, too.

        Example:
            >>> rref = rpc.remote("worker1", torch.arange, args=(3,))
            >>> rref.to_here()
            tensor([0, 1, 2])
        """
        self.check_alive()
        return cast(T, self._home.calls.fetch(self, timeout))

    def local_value(self) -> T:
        """Return the value itself, without a copy. Waits, without a limit, until the value exists.

        Raises:
            RRefError: this worker is not the owner (call `to_here`), this reference was released, RPC has ended here,
                or it ends during the wait.
            Exception: the function that should have made the value raised this error.

        Example:
            >>> rref = rpc.RRef([1, 2])
            >>> rref.local_value().append(3)
            >>> rref.local_value()
            [1, 2, 3]
        """
        if self.fork_id is not None:
            here = self._home.references.membership.info_of(self._home.references.me)
            raise RRefError(
                f"For UserRRef(rref_id={self.id}, fork_id={self.fork_id}), can't call localValue() on user "
                f"{here}. Call it on owner {self.owner()}"
            )
        self.check_alive()
        return cast(T, self._home.references.local_value(self.id, None))

    def rpc_sync(self, timeout: float = -1.0) -> Proxy:
        """Return a proxy whose methods run on the owner and return their results: ``rref.rpc_sync().method(x)``.

        Only the arguments and the result travel; the value stays on its owner. ``rref.rpc_sync()(x)`` calls the value
        itself.

        Args:
            timeout: the time limit of each call, in seconds; negative for the default, 0 for none.

        This function raises nothing. A method of the proxy does, when it is called:

        Raises:
            WorkerLost: the owner is gone, or dies before it answers; or, on the owner, RPC has ended.
            RRefError: the reference was released, RPC has ended, or the value was never made.
            RpcTimeout: the answer did not come in time; the method may still run.
            EncodeError: an argument cannot be sent.
            TypeError: ``timeout`` is no number; UsageError if it is NaN.
            Exception: any error of the method, or of the function that should have made the value; AttributeError if
                the value has no such method.
            KeyboardInterrupt: Ctrl-C ended the wait. In a cluster, the method stops, too.

        Example:
            >>> rref = rpc.remote("worker1", torch.ones, args=(2, 2))
            >>> rref.rpc_sync().sum(dim=0)
            tensor([2., 2.])
        """
        return Proxy(self, self._home.calls.method_sync, timeout)

    def rpc_async(self, timeout: float = -1.0) -> Proxy:
        """Return a proxy like that of `rpc_sync` whose methods return a `Future` of their results.

        ``timeout`` is as for `rpc_sync`. What is wrong when a method is called raises there: the reference was
        released, its owner is gone, an argument or the timeout is bad. The future's ``wait()`` raises what comes later:
        the error of the method (AttributeError if there is none), RpcTimeout, WorkerLost.

        Example:
            >>> rref = rpc.remote("worker1", torch.ones, args=(2, 2))
            >>> rref.rpc_async().sum().wait()
            tensor(4.)
        """
        return Proxy(self, self._home.calls.method_async, timeout)

    def remote(self, timeout: float = -1.0) -> Proxy:
        """Return a proxy like that of `rpc_sync` whose methods return an `RRef`; their results stay on the owner.

        ``timeout`` is as for `rpc_sync`. What is wrong when a method is called raises there, as in `rpc_async`; so does
        AttributeError, if the value's class is known here and has no such method. The new reference's `to_here` raises
        the error of the method, or RRefError if the call got no answer.

        Example:
            >>> rref = rpc.remote("worker1", torch.ones, args=(2, 2))
            >>> rref.remote().sum().to_here()
            tensor(4.)
        """
        return Proxy(self, self._home.calls.method_remote, timeout)

    def peek(self, timeout: float = -1.0) -> Peek:
        """Return a short description of the value, which its owner computes. The value itself does not travel.

        For a tensor: range, mean, norm, a histogram and the counts of NaN and infinity. For a module: its parameters.
        For anything else: its shortened repr. Waits until the value exists; errors and ``timeout`` are those of
        `to_here`: RRefError after `release`, WorkerLost, RpcTimeout, the function's error. Each call asks anew.

        Example:
            >>> rref = rpc.remote("worker1", torch.ones, args=(2, 2))
            >>> rref.peek()
            Tensor on worker1
              float32(2, 2) on cpu
              min 1, max 1, mean 1, norm 2
              1 █ 1
              first 1, 1, 1, 1
        """
        self.check_alive()
        if self.fork_id is None:
            return _look(self, timeout)
        return cast(Peek, self._home.calls.sync(self.owner(), _look, (self, timeout), None, timeout))

    def release(self) -> None:
        """Give up this reference now, as if Python had collected it. A second call does nothing.

        Calls that are running still complete. Afterwards, this object cannot be sent or copied, and methods that need
        the value raise RRefError; its owner, its `state` and its repr remain. The owner drops the value once no other
        reference to it exists.
        """
        self._known = self.state
        self.hold = None  # running calls, and messages that have not arrived, keep the hold as well

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, a tensor of one element, on its owner, and wait for its end.

        The wait has no time limit.

        Args:
            dist_autograd_ctx_id: the id of an autograd context. The pass then crosses workers, as
                `nbdist.autograd.backward` does, and the gradients stay in the context. -1 runs a local pass, which is
                possible only on the owner and adds to the ``grad`` of its leaves.
            retain_graph: whether the graph stays usable for another pass.

        Raises:
            UsageError: the value is no tensor of one element, another worker owns it and the id is -1, or the context
                is over or unknown.
            RuntimeError: the tensor requires no grad, it has several elements in a local pass, or an earlier pass has
                freed the graph.
            RRefError: this reference was released, RPC has ended, or the value was never made.
            WorkerLost: the owner or another worker of the pass is gone.
            Exception: any other error of the pass, or of the function that should have made the value.

        Example:
            >>> with dist_autograd.context() as context_id:
            ...     weights = torch.ones(2, requires_grad=True)
            ...     loss = rpc.remote("worker1", torch.sum, args=(weights,))
            ...     loss.backward(context_id)
            ...     dist_autograd.get_gradients(context_id)[weights]
            tensor([1., 1.])
        """
        if self.fork_id is None:
            _backward(self, int(dist_autograd_ctx_id), retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise UsageError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        self._home.calls.sync(self.owner(), _backward, (self, int(dist_autograd_ctx_id), retain_graph), None, 0)

    # -- pickling and copying -----------------------------------------------------------------

    def __reduce__(self) -> Any:
        raise RuntimeError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def __copy__(self) -> RRef[T]:
        """Return a second reference to the same value, without a message. The value lives until both have ended.

        Raises RRefError if this reference was released.
        """
        if self.hold is None:
            raise RRefError(f"{self!r} cannot be copied: release() was called on it, so there is nothing to copy")
        copied: RRef[T] = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> RRef[T]:
        """Return a second reference to the same value, like `copy.copy`: the value itself is not copied."""
        return self.__copy__()


register_reference(RRef)


def refer(home: Home, id: GlobalId, fork: GlobalId | None, owner: int, creation: Promise[Any] | None) -> RRef[Any]:
    """Make a reference to an existing or future value, which belongs to the agent ``home``."""
    # ``creation`` is the outcome of the ``remote()`` call that makes the value; None for one that a message brought.
    made: RRef[Any] = RRef.__new__(RRef)
    made._home, made.id, made.fork_id, made.owner_incarnation, made._creation = home, id, fork, owner, creation
    made.hold = home.references.hold(id, fork)  # last: `is_held_for` is False while a reference is being made
    return made


def _look(rref: RRef[Any], timeout: float) -> Peek:
    return look(rref.to_here(timeout), rref.owner_name())


def _backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise UsageError("RRef should contain a tensor for .backward()")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
        return
    if value.numel() != 1:
        raise UsageError(
            f"the value of this RRef has {value.numel()} elements, and a pass begins with one: use an RRef of its sum()"
        )
    rref._home.run_pass(context_id, value, retain_graph)


class Proxy:
    """A proxy for the value of a reference: each method called on it runs on the owner, in one round trip.

    `RRef.rpc_sync`, `RRef.rpc_async` and `RRef.remote` return one. Of the special methods, ``__call__``,
    ``__getitem__`` and ``__len__`` can be called, by these names. ``dir()`` lists the names of the value's class, if
    the class is known.
    """

    def __init__(self, rref: RRef[Any], call: Callable[..., Any], timeout: float) -> None:
        self._rref = rref
        self._call = call
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") and name.endswith("__") and name not in ("__call__", "__getitem__", "__len__"):
            raise AttributeError(name)
        return partial(self._call, self._rref, name, self._timeout)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value itself, such as a module: ``rref.rpc_sync()(x)``.

        Returns what the methods of this proxy return: the result, a `Future` or an `RRef`.
        """
        return self._call(self._rref, "__call__", self._timeout, *args, **kwargs)

    def __dir__(self) -> list[str]:
        state = self._rref.state
        return [] if state is None else state.names or dir(local_type(state) or object)


def local_type(state: State) -> type | None:
    """Return the class of the value that ``state`` describes; None for an error, or if the class is not loaded here."""
    if state.error is not None:
        return None
    found = walk(sys.modules.get(state.module), state.qualname)
    return found if isinstance(found, type) else None


def _summary(state: State | None) -> str:
    """Return the words about a value that a reference's repr shows, such as "to Tensor float32(2, 2)"."""
    if state is None:
        return "to a value not known yet"
    if state.error is not None:
        return f"to an error ({error_line(state.qualname, state.error)})"
    parts = [state.qualname]
    if state.shape is not None:
        parts.append(f"{state.dtype}{tuple(state.shape)}")
    if state.device not in (None, "cpu"):
        parts.append(str(state.device))
    return "to " + " ".join(parts)
