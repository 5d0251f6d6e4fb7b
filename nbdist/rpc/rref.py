"""Remote references: what a user holds.

An `RRef` is a handle on a value that lives with its owner. It knows only what came with messages that had
to be sent anyway (G7): who owns the value, how far the reference has come, and, once confirmed, what the
value is. Fetching and calling are asked for by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from nbdist.errors import RRefError, UsageError
from nbdist.ids import GlobalId
from nbdist.rpc import inert
from nbdist.rpc.forks import Standing
from nbdist.rpc.futures import Promise
from nbdist.rpc.membership import WorkerInfo
from nbdist.rpc.peeking import Peek, look
from nbdist.torch_private import no_torch_function
from nbdist.wire.codec import register_reference
from nbdist.wire.messages import State

if TYPE_CHECKING:
    from nbdist.rpc.agent import Agent

__all__ = ["Proxy", "RRef", "describe_error", "describe_value", "error_line"]

T = TypeVar("T")

_find_agent: Callable[[], Agent]


def set_agent_finder(finder: Callable[[], Agent]) -> None:
    """Tell how ``RRef(value)`` finds the agent it belongs to."""
    global _find_agent
    _find_agent = finder


class _Hold:
    """What keeps a value: its reference has it, and so has each message with which that is on its way."""

    __slots__ = ("_agent", "_fork", "_id")

    def __init__(self, agent: Agent, id: GlobalId, fork: GlobalId | None) -> None:
        self._agent, self._id, self._fork = agent, id, fork

    def __del__(self) -> None:
        self._agent.references.release_later(self._id, self._fork)


class RRef(Generic[T]):
    """A reference to a value on some worker; ``RRef(value)`` makes the calling worker its owner."""

    _known: State | None = None
    """What was known of the value at the last look: who counts references forgets one that is released."""

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = _find_agent()
        self._agent = agent
        self._id = agent.ids.next()
        self._fork: GlobalId | None = None
        self._owner = agent.me.incarnation
        self._creation: Promise[Any] | None = None
        self._hold: _Hold | None = _Hold(agent, self._id, None)
        agent.references.own(self._id)
        agent.references.settle(self._id, value, None)

    @classmethod
    def _refer(
        cls,
        agent: Agent,
        id: GlobalId,
        fork: GlobalId | None,
        owner: int,
        creation: Promise[Any] | None = None,
    ) -> RRef[T]:
        self = cls.__new__(cls)
        self._agent, self._id, self._fork, self._owner, self._creation = agent, id, fork, owner, creation
        self._hold = _Hold(agent, id, fork)
        return self

    def is_counted_by(self, references: object) -> bool:
        """Whether it belongs to the agent that has these `References`."""
        return self._agent.references is references

    # -- what is known without asking ---------------------------------------------------------

    def is_owner(self) -> bool:
        """Whether the value lives on this worker."""
        return self._fork is None

    def owner(self) -> WorkerInfo:
        """The worker on which the value lives."""
        return self._agent.membership.info_of(self._owner)

    def owner_name(self) -> str:
        """The name of the worker on which the value lives."""
        return self._agent.membership.name_of(self._owner)

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to know of this reference."""
        return self._fork is None or self._agent.references.forks.standing(self._fork) is Standing.CONFIRMED

    @property
    def state(self) -> State | None:
        """What is known of the value: its type, and a tensor's shape, dtype and device; None until it is known.

        Of a call that failed, it is the error's type and text. After `release` it is what was known then.
        """
        found = self._agent.references.forks.state(self._id, self._fork)
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
        if self._agent.closed:
            return "ended"
        if self._fork is not None:
            standing = self._agent.references.forks.standing(self._fork)
            if standing is not Standing.CONFIRMED:
                return standing.value if standing is not None else "dead"
        state = self.state
        if state is not None and state.error is not None:
            return "failed"
        return "here" if self._fork is None else "confirmed"

    # -- asking -------------------------------------------------------------------------------

    def to_here(self, timeout: float = -1.0) -> T:
        """A copy of the value, fetched from its owner; on the owner, the value itself."""
        self._agent.references.check_alive(self)
        if self._fork is None:
            seconds = self._agent.timeout_of(timeout)
            return cast(T, self._agent.references.local_value(self._id, seconds))
        return cast(T, self._agent.caller.fetch(self, timeout))

    def local_value(self) -> T:
        """The value itself; on its owner only."""
        if self._fork is not None:
            here = self._agent.membership.info_of(self._agent.me.incarnation)
            raise RRefError(
                f"For UserRRef(rref_id={self._id}, fork_id={self._fork}), can't call localValue() on user "
                f"{here}. Call it on owner {self.owner()}"
            )
        self._agent.references.check_alive(self)
        return cast(T, self._agent.references.local_value(self._id, None))

    def rpc_sync(self, timeout: float = -1.0) -> Proxy:
        """A stand-in for the value: ``rref.rpc_sync().method(...)`` runs it on the owner and returns the result."""
        return Proxy(self, self._agent.caller.method_sync, timeout)

    def rpc_async(self, timeout: float = -1.0) -> Proxy:
        """As `rpc_sync`, with a Future for the result."""
        return Proxy(self, self._agent.caller.method_async, timeout)

    def remote(self, timeout: float = -1.0) -> Proxy:
        """As `rpc_sync`, with an RRef to the result, which stays on the owner."""
        return Proxy(self, self._agent.caller.method_remote, timeout)

    def peek(self, timeout: float = -1.0) -> Peek:
        """What the value looks like: a tensor's range, norm and histogram, a module's parameters. It stays there."""
        self._agent.references.check_alive(self)
        seconds = self._agent.timeout_of(timeout)
        if self._fork is None:
            return _look(self, seconds)
        found: Peek = self._agent.caller.sync(self.owner(), _look, (self, seconds), None, timeout)
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
        self._agent.caller.sync(self.owner(), _backward, (self, int(dist_autograd_ctx_id), retain_graph), None, 0)

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
    recorder = rref._agent.recorder
    assert recorder is not None  # every agent has one, by nbdist.rpc.recording
    recorder.backward(context_id, value, retain_graph)


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


def describe_error(error: BaseException) -> State:
    """What goes to the users of a reference in whose place there is an error."""
    cls = type(error)
    try:
        return State(cls.__module__, cls.__qualname__, error=str(error))
    except Exception:
        return State(cls.__module__, cls.__qualname__, error="its text cannot be had")


def error_line(name: str, text: str) -> str:
    """Return an error in one line: its type and the first line of its text."""
    first = text.strip().partition("\n")[0]
    return f"{name}: {first}" if first else name


def describe_value(value: Any) -> State:
    """Return what the users of a reference can be shown of its value. No code of the value's class is called."""
    cls = type(value)
    if cls is torch.Tensor or cls is torch.nn.Parameter:
        return _describe_tensor(value, getattr)
    if issubclass(cls, torch.Tensor):
        with no_torch_function():
            return _describe_tensor(value, inert.tensor_fact)
    module, qualname = inert.module_of(cls), inert.qualname_of(cls)
    nbytes: int | None
    if issubclass(cls, torch.nn.Module):
        nbytes = sum(_nbytes_of(parameter) for parameter in inert.parameters_of(value))
    else:
        nbytes = inert.nbytes_of(value)
    return State(module, qualname, nbytes=nbytes, names=inert.public_names(cls) if module == "__main__" else None)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe_tensor(value: torch.Tensor, fact: Callable[[torch.Tensor, str], Any]) -> State:
    cls = type(value)
    module, qualname = inert.module_of(cls), inert.qualname_of(cls)
    if inert.user_dispatches(cls):
        return State(module, qualname)
    try:
        function = fact(value, "grad_fn")
        return State(
            module,
            qualname,
            shape=list(fact(value, "shape")),
            dtype=_dtype_name(fact(value, "dtype")),
            device="cpu" if fact(value, "is_cpu") else str(fact(value, "device")),
            requires_grad=fact(value, "requires_grad"),
            grad_fn=type(function).__name__ if function is not None else None,
            nbytes=fact(value, "nbytes") if fact(value, "layout") is torch.strided else None,
        )
    except RuntimeError:  # of a kind of tensor that has no shape, such as a nested one
        return State(module, qualname)


def _nbytes_of(tensor: torch.Tensor) -> int:
    with no_torch_function():
        nbytes: int = inert.tensor_fact(tensor, "nbytes")
        return nbytes


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
