"""Remote references: what a user holds.

An `RRef` is a handle on a value that lives with its owner. It knows only what came with messages that had
to be sent anyway (G7): who owns the value, how far the reference has come, and, once confirmed, what the
value is. Fetching and calling are asked for by name.
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
from nbdist.rpc.describing import error_line
from nbdist.rpc.forks import Standing
from nbdist.rpc.futures import Promise
from nbdist.rpc.membership import WorkerInfo
from nbdist.rpc.peeking import Peek, look
from nbdist.rpc.references import References, creation_error
from nbdist.wire.messages import Fork, State
from nbdist.wire.registered import register_reference

__all__ = ["Calls", "Home", "Proxy", "RRef"]

T = TypeVar("T")


class Calls(Protocol):
    """What a reference asks of the caller's side of its agent, `nbdist.rpc.caller.Caller`."""

    def sync(self, to: WorkerInfo, function: Any, args: tuple[Any, ...], kwargs: None, timeout: float) -> Any:
        """Call and wait."""

    def fetch(self, rref: RRef[Any], timeout: float) -> Any:
        """Return a copy of a value; on its owner, the value itself."""

    def method_sync(self, rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a value and wait."""

    def method_async(self, rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a value, and have a Future."""

    def method_remote(self, rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a value, and have an RRef to the outcome."""


class Home(NamedTuple):
    """The agent to which a reference belongs, as far as the reference knows it."""

    references: References
    calls: Calls
    run_pass: Callable[[int, torch.Tensor, bool], None]
    """Runs a backward pass in a context, by its id, from a tensor here; the last argument is to keep the graph."""


_find_home: Callable[[], Home]


def set_home_finder(finder: Callable[[], Home]) -> None:
    """Tell how ``RRef(value)`` finds the agent to which it belongs."""
    global _find_home
    _find_home = finder


class RRef(Generic[T]):
    """A reference to a value on some worker; ``RRef(value)`` makes the calling worker its owner."""

    _known: State | None = None
    """What was known of the value at the last look: who counts references forgets one that is released."""

    def __init__(self, value: T, type_hint: Any = None) -> None:
        home = _find_home()
        references = home.references
        self._home = home
        self._id = references.new_id()
        self._fork: GlobalId | None = None
        self._owner = references.me
        self._creation: Promise[Any] | None = None
        self._hold: Hold | None = references.hold(self._id, None)
        references.own(self._id)
        references.settle(self._id, value, None)

    @classmethod
    def _refer(
        cls,
        home: Home,
        id: GlobalId,
        fork: GlobalId | None,
        owner: int,
        creation: Promise[Any] | None,
    ) -> RRef[T]:
        self = cls.__new__(cls)
        self._home, self._id, self._fork, self._owner, self._creation = home, id, fork, owner, creation
        self._hold = home.references.hold(id, fork)
        return self

    # -- sending and watching -----------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise what is known to be wrong with the reference."""
        if self._hold is None:
            raise RRefError(f"{self!r} was let go of by release()")
        if self._fork is None:
            return
        references = self._home.references
        if references.closed:
            raise RRefError(f"{self!r} cannot be used: RPC has been shut down on this worker")
        standing = references.forks.standing(self._fork)
        if standing is None:
            raise RRefError(f"{self!r} cannot be used: this worker has let go of all references, to end RPC")
        if standing is Standing.FAILED:
            why = self._creation.exception() if self._creation is not None and self._creation.done() else "timed out"
            raise creation_error(why)
        if standing is Standing.DEAD:
            lost = references.membership.why_gone(self.owner_name()) or "no longer has the value"
            raise WorkerLost(f"the value of this RRef is lost: its owner {self.owner_name()} {lost}")

    def keep(self) -> object:
        """Return what keeps the value for as long as it is kept itself; an error where something is wrong with it."""
        hold = self._hold
        if hold is None:
            raise RRefError(f"{self!r} was let go of by release()")
        self.check_alive()
        return hold

    def is_held_for(self, references: References) -> bool:
        """Return whether this reference belongs to the agent with ``references`` and has not been released.

        Returns False for a reference that another thread is still making.
        """
        home, hold = getattr(self, "_home", None), getattr(self, "_hold", None)
        return home is not None and hold is not None and home.references is references

    def hand_over(self, to: int, references: References, child: GlobalId | None = None) -> Fork:
        """Make a fork for a message that the agent with ``references`` sends to another one.

        ``child`` is the id that it gets; where it is None, a new one.
        """
        if self._home.references is not references:
            raise RRefError(f"{self!r} belongs to another agent, or to an RPC world that has ended")
        self.check_alive()
        return references.hand_over(self._id, self._fork, to, child)

    def when_changed(self, then: Callable[[], None]) -> Callable[[], None]:
        """Call ``then`` with each news of the reference, its end included; returns a function that ends that.

        It is called by whatever thread has the news, and must not block.
        """
        ids = [self._id] if self._fork is None else [self._id, self._fork]
        return self._home.references.when_changed(ids, then)

    def forks_out(self) -> int | None:
        """Return how many forks of the value other workers hold; None where it is not owned here."""
        return self._home.references.forks.forks_of(self._id) if self._fork is None else None

    # -- what is known without asking ---------------------------------------------------------

    def is_owner(self) -> bool:
        """Whether the value lives on this worker."""
        return self._fork is None

    def owner(self) -> WorkerInfo:
        """The worker on which the value lives."""
        return self._home.references.membership.info_of(self._owner)

    def owner_name(self) -> str:
        """The name of the worker on which the value lives."""
        return self._home.references.membership.name_of(self._owner)

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to know of this reference."""
        return self._fork is None or self._home.references.forks.standing(self._fork) is Standing.CONFIRMED

    @property
    def state(self) -> State | None:
        """What is known of the value: its type, and a tensor's shape, dtype and device; None until it is known.

        Of a call that failed, it is the error's type and text. After `release` it is what was known then.
        """
        found = self._home.references.forks.state(self._id, self._fork)
        if found is not None:
            self._known = found
        return self._known

    def __str__(self) -> str:
        if self._fork is None:
            return f"OwnerRRef({self._id})"
        return f"UserRRef(RRefId = {self._id}, ForkId = {self._fork})"

    def __repr__(self) -> str:
        standing = self._standing()
        told = "owned here" if standing == "here" else f"on {self.owner_name()}, {standing}"
        return f"<RRef {_summary(self.state)} {told}>"

    def _standing(self) -> str:
        """Return how far the reference has come, in one word; "failed" also if its call raised an error."""
        if self._hold is None:
            return "released"
        if self._home.references.closed:
            return "ended"
        if self._fork is not None:
            standing = self._home.references.forks.standing(self._fork)
            if standing is not Standing.CONFIRMED:
                return standing.value if standing is not None else "dead"
        state = self.state
        if state is not None and state.error is not None:
            return "failed"
        return "here" if self._fork is None else "confirmed"

    # -- asking -------------------------------------------------------------------------------

    def to_here(self, timeout: float = -1.0) -> T:
        """A copy of the value, fetched from its owner; on the owner, the value itself."""
        self.check_alive()
        return cast(T, self._home.calls.fetch(self, timeout))

    def local_value(self) -> T:
        """The value itself; on its owner only."""
        if self._fork is not None:
            here = self._home.references.membership.info_of(self._home.references.me)
            raise RRefError(
                f"For UserRRef(rref_id={self._id}, fork_id={self._fork}), can't call localValue() on user "
                f"{here}. Call it on owner {self.owner()}"
            )
        self.check_alive()
        return cast(T, self._home.references.local_value(self._id, None))

    def rpc_sync(self, timeout: float = -1.0) -> Proxy:
        """A stand-in for the value: ``rref.rpc_sync().method(...)`` runs it on the owner and returns the result."""
        return Proxy(self, self._home.calls.method_sync, timeout)

    def rpc_async(self, timeout: float = -1.0) -> Proxy:
        """As `rpc_sync`, with a Future for the result."""
        return Proxy(self, self._home.calls.method_async, timeout)

    def remote(self, timeout: float = -1.0) -> Proxy:
        """As `rpc_sync`, with an RRef to the result, which stays on the owner."""
        return Proxy(self, self._home.calls.method_remote, timeout)

    def peek(self, timeout: float = -1.0) -> Peek:
        """What the value looks like: a tensor's range, norm and histogram, a module's parameters. It stays there."""
        self.check_alive()
        if self._fork is None:
            return _look(self, timeout)
        found: Peek = self._home.calls.sync(self.owner(), _look, (self, timeout), None, timeout)
        return found

    def release(self) -> None:
        """Let go of the value, as if this object were collected; nothing can be asked of it afterwards."""
        self._known = self.state
        self._hold = None  # calls under way, and messages on their way, have it as well

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, which is a tensor of one element, on its owner.

        With the id of a context it crosses workers, as `nbdist.autograd.backward` does; without, it is a local
        one, for which the value has to be here.
        """
        if self._fork is None:
            _backward(self, int(dist_autograd_ctx_id), retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise UsageError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        self._home.calls.sync(self.owner(), _backward, (self, int(dist_autograd_ctx_id), retain_graph), None, 0)

    # -- not this way -------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        raise RuntimeError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def __copy__(self) -> RRef[T]:
        """Make a second handle on the same value; the value is kept until both are released or gone.

        Nothing is copied but the handle, and no message is sent: both share what keeps the value.
        """
        if self._hold is None:
            raise RRefError(f"{self!r} was let go of by release(): there is nothing to copy")
        copied: RRef[T] = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> RRef[T]:
        """As `copy.copy`: the value itself stays where it is, and one."""
        return self.__copy__()


register_reference(RRef)


def _look(rref: RRef[Any], timeout: float) -> Peek:
    return look(rref.to_here(timeout), rref.owner_name())


def _backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise UsageError("RRef should contain a tensor for .backward()")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
        return
    rref._home.run_pass(context_id, value, retain_graph)


class Proxy:
    """Calls methods of a referenced value, each in one round trip."""

    def __init__(self, rref: RRef[Any], call: Callable[..., Any], timeout: float) -> None:
        self._rref = rref
        self._call = call
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") and name.endswith("__") and name not in ("__call__", "__getitem__", "__len__"):
            raise AttributeError(name)
        return partial(self._call, self._rref, name, self._timeout)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value itself, as for a module: ``rref.rpc_sync()(x)``."""
        return self._call(self._rref, "__call__", self._timeout, *args, **kwargs)

    def __dir__(self) -> list[str]:
        state = self._rref.state
        return [] if state is None else state.names or dir(local_type(state) or object)


def local_type(state: State) -> type | None:
    """The class of the value that ``state`` describes, if there is one and this process has loaded its class."""
    if state.error is not None:
        return None
    found: Any = sys.modules.get(state.module)
    for part in state.qualname.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _summary(state: State | None) -> str:
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
