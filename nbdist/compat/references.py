"""What torch's RRef can do beyond nbdist's: its private methods, and what counts references for tests.

The methods are added to nbdist's class when compat is installed, because an RRef is made in many places and
all of them must have these.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist import durations
from nbdist.compat import words
from nbdist.errors import RRefError, UsageError
from nbdist.rpc import api
from nbdist.rpc.futures import Future
from nbdist.rpc.options import UNSET_RPC_TIMEOUT
from nbdist.rpc.rref import Proxy, RRef
from nbdist.wire.messages import ChildAccept, Fork
from nbdist.wire.registered import register_reducer

if TYPE_CHECKING:
    from nbdist.rpc.agent import Agent

__all__ = ["Serialized", "debug_info", "extend", "in_a_message", "release_users"]

_NOBODY = 0
"""No agent's incarnation: whoever will get a serialized reference is not known yet."""

_POLL = 0.005
_lock = threading.Lock()


def extend() -> None:
    """Give every RRef torch's private methods."""
    methods: dict[str, Any] = {
        "_get_type": _get_type,
        "_get_future": _get_future,
        "_get_profiling_future": _get_future,
        "_serialize": _serialize,
        "_deserialize": staticmethod(_deserialize),
    }
    for name, method in methods.items():
        if name not in vars(RRef):
            setattr(RRef, name, method)
    for name, way in {"rpc_sync": "method_sync", "rpc_async": "method_async", "remote": "method_remote"}.items():
        setattr(RRef, name, _stand_in(getattr(RRef, name), way))
    for name in ("to_here", "local_value", "backward"):
        setattr(RRef, name, _in_torchs_words(getattr(RRef, name), name))
    register_reducer(Serialized, in_a_message)


Method = Callable[..., Any]


def _stand_in(method: Method, way: str) -> Method:
    """Return ``RRef.rpc_sync`` or the like, whose calls, by the caller's method ``way``, err in torch's words."""

    @functools.wraps(method)
    def stand_in(self: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:
        return Proxy(self, functools.partial(_call, getattr(self._home.calls, way)), timeout)

    return stand_in


def _call(call: Method, rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(rref, name, timeout, *args, **kwargs)
    except (UsageError, RRefError) as error:
        words.refuse_rref(error, "", rref)


def _in_torchs_words(method: Method, name: str) -> Method:
    """Return ``RRef.to_here`` and the like, which err in torch's words."""

    @functools.wraps(method)
    def use(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (UsageError, RRefError) as error:
            words.refuse_rref(error, f"{name}()", self)

    return use


def _type_of(rref: RRef[Any]) -> type:
    return type(rref.local_value())


def _get_type(self: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """The type of the value, asked of its owner once; without ``blocking``, a Future for it."""
    with _lock:
        future: Future[type] | None = getattr(self, "_compat_type", None)
        if future is None or (future.done() and future.exception() is not None):
            future = api.current_agent().call(self.owner(), _type_of, self, timeout=timeout)
            self._compat_type = future  # type: ignore[attr-defined]
    return future.wait() if blocking else future


def _get_future(self: RRef[Any]) -> Future[Any]:
    """Done when the call that makes the value has been answered; at once if there was none."""
    made: Future[Any] = Future()
    if self._creation is not None:
        self._creation.add_done_callback(lambda created: made.try_settle(None, created.exception()))
    else:
        made.set_result(None)
    return made


class Serialized:
    """A reference under way, before anybody knows which way it goes.

    A call, a reply and a plain pickle each carry a reference differently, and torch's reducers run before one of
    them is chosen, perhaps several times for one message. So `RRef._serialize` makes no fork: the codec forks for the
    receiver of its message, and takes the fork back where the message is not sent; ``pickle`` makes a fork for a
    receiver that nobody knows, and the value is kept until that receiver rebuilds the reference.
    """

    def __init__(self, rref: RRef[Any] | None, fork: bytes = b"") -> None:
        self._rref = rref
        self._fork = fork

    def __reduce__(self) -> tuple[Any, ...]:
        return Serialized, (None, self._fork if self._rref is None else _fork_for_anybody(self._rref))

    def accept(self) -> RRef[Any]:
        """Return the reference as one of the current agent. The second call raises RRefError."""
        rref, self._rref = self._rref, None
        fork, self._fork = self._fork, b""
        if rref is not None:
            fork = _fork_for_anybody(rref)
        if not fork:
            raise RRefError("this serialized reference has been rebuilt before; serialize the RRef once more")
        return _accept_fork(fork)


def in_a_message(serialized: Serialized) -> Any:
    """Reduce for the codec: the reference itself goes into the message, for the codec to fork."""
    if serialized._rref is None:
        return serialized.__reduce__()
    return _unchanged, (serialized._rref,)


def _unchanged(rref: RRef[Any]) -> RRef[Any]:
    return rref


def _serialize(self: RRef[Any]) -> tuple[Serialized]:
    """Return what `_deserialize` makes a reference of, after a pickler or a call has carried it."""
    try:
        self.check_alive()
    except RRefError as error:
        words.refuse_rref(error, "fork", self)
    return (Serialized(self),)


def _deserialize(data: tuple[Serialized | RRef[Any]]) -> RRef[Any]:
    """Return the reference that was serialized, as one of the current agent."""
    (serialized,) = data
    return serialized.accept() if isinstance(serialized, Serialized) else serialized


def _fork_for_anybody(rref: RRef[Any]) -> bytes:
    return msgspec.msgpack.encode(rref.hand_over(_NOBODY, rref._home.references))


def _accept_fork(data: bytes) -> RRef[Any]:
    agent = api.current_agent()
    fork = msgspec.msgpack.decode(data, type=Fork)
    rref: RRef[Any]
    (rref,) = agent.references.accept([fork])
    if fork.owner == agent.me.incarnation:  # it has come home: a handle, where a fork was promised
        if fork.parent == fork.owner:
            agent.references.take_back([fork], _NOBODY)
        else:
            agent.post(fork.parent, ChildAccept(fork.fork))
    return rref


def release_users(agent: Agent, timeout: float) -> None:
    """Let go of every reference to another worker's values, and wait until their owners know."""
    deadline = time.monotonic() + durations.positive(timeout)
    agent.references.release_all()
    while agent.references.forks.users and time.monotonic() < deadline:
        time.sleep(_POLL)
    while agent.links.outstanding() and time.monotonic() < deadline:
        time.sleep(_POLL)


def debug_info(agent: Agent) -> dict[str, str]:
    """How many references there are, in torch's words."""
    forks = agent.references.forks
    creations = sum(1 for call in agent.awaited() if call.result is not None)
    return {
        "num_owner_rrefs": str(forks.owners),
        "num_pending_futures": str(creations),
        "num_pending_users": str(forks.pending),
        "num_forks": str(forks.forks),
    }
