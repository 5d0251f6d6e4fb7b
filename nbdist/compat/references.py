"""Adds to nbdist's RRef the private methods of torch's that programs and torch's own modules use.

`extend` changes nbdist's own class instead of deriving a new one, because RRefs are made in many places of nbdist.
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
from nbdist.rpc.references.rref import Proxy, RRef
from nbdist.wire.messages import ChildAccept, Fork
from nbdist.wire.pickling.registered import register_reducer

if TYPE_CHECKING:
    from nbdist.rpc.agent import Agent

_UNKNOWN_RECEIVER = 0
"""Stands for the unknown receiver of a reference that was serialized by ``pickle``. No agent has this incarnation."""

_POLL = 0.005
"""Seconds between two checks whether references have been released."""
_lock = threading.Lock()
"""Guards the attribute ``_compat_type`` of all references."""


def extend() -> None:
    """Add torch's private methods to the class RRef, and make its public methods raise torch's errors.

    `nbdist.compat.install` calls this once.
    """
    methods: dict[str, Any] = {
        "_get_type": _get_type,
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
    """Return a replacement for ``method``, one of ``RRef.rpc_sync`` and its like, that raises torch's errors.

    Like ``method``, it returns a proxy of the value. The method ``way`` of the agent's
    `nbdist.rpc.calls.caller.Caller` makes the calls of the proxy's methods.
    """

    @functools.wraps(method)
    def stand_in(self: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT) -> Proxy:
        return Proxy(self, functools.partial(_call, getattr(self._home.calls, way)), timeout)

    return stand_in


def _call(call: Method, rref: RRef[Any], name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
    """Return ``call(rref, name, timeout, ...)``, which calls the method ``name`` of a reference's value.

    If nbdist refuses the call, torch's error is raised. ``timeout`` is in seconds.
    """
    try:
        return call(rref, name, timeout, *args, **kwargs)
    except (UsageError, RRefError) as error:
        words.refuse_rref(error, "", rref)


def _in_torchs_words(method: Method, name: str) -> Method:
    """Return a function that does the same as ``method``, the method ``name`` of RRef, but raises torch's errors."""

    @functools.wraps(method)
    def use(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (UsageError, RRefError) as error:
            words.refuse_rref(error, f"{name}()", self)

    return use


def _type_of(rref: RRef[Any]) -> type:
    """Return the type of a reference's value. Runs on the owner."""
    return type(rref.local_value())


def _get_type(self: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """Return the type of the value; without ``blocking``, a Future of the type. The owner is asked only once.

    If the request failed, the next call repeats it.
    """
    with _lock:
        future: Future[type] | None = getattr(self, "_compat_type", None)
        if future is None or (future.done() and future.exception() is not None):
            future = api.current_agent().call(self.owner(), _type_of, self, timeout=timeout)
            self._compat_type = future  # type: ignore[attr-defined]
    return future.wait() if blocking else future


class Serialized:
    """A serialized reference whose receiver is not known yet.

    A call, a reply and a plain pickle each carry a reference in another way. torch's reducers run before it is known
    which of these carries it, perhaps several times for one message. So `RRef._serialize` makes no fork yet:

    =======================  ====================================================================================
    the reference goes into  its fork
    =======================  ====================================================================================
    a message                the codec makes it for the receiver, and undoes it if the message is not sent
    a plain pickle           ``__reduce__`` makes it for an unknown receiver; the value lives until it is rebuilt
    =======================  ====================================================================================
    """

    def __init__(self, rref: RRef[Any] | None, fork: bytes = b"") -> None:
        self._rref = rref
        self._fork = fork

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how pickle rebuilds a copy, with a new fork for an unknown receiver.

        The value lives until the copy's `accept`, or for ever if the bytes are never read. If a copy is pickled again,
        it passes its fork on.
        """
        return Serialized, (None, self._fork if self._rref is None else _fork_for_anybody(self._rref))

    def accept(self) -> RRef[Any]:
        """Return the reference, for the current agent. A second call raises RRefError.

        The caller, who may be on another worker, is then a user of the value.
        """
        rref, self._rref = self._rref, None
        fork, self._fork = self._fork, b""
        if rref is not None:
            fork = _fork_for_anybody(rref)
        if not fork:
            raise RRefError("this serialized reference was rebuilt before; serialize the RRef again for each use")
        return _accept_fork(fork)


def in_a_message(serialized: Serialized) -> Any:
    """Return how pickle rebuilds a copy of ``serialized`` in a message, in the form that ``__reduce__`` has.

    The RRef itself goes into the message, and the codec makes the fork for the receiver.
    """
    if serialized._rref is None:
        return serialized.__reduce__()
    return _unchanged, (serialized._rref,)


def _unchanged(rref: RRef[Any]) -> RRef[Any]:
    """Return the reference that the codec has rebuilt. Runs on the receiver."""
    return rref


def _serialize(self: RRef[Any]) -> tuple[Serialized]:
    """Return the argument for `_deserialize`, which a pickler or a call can carry.

    Raises torch's error if the reference cannot be used any more.
    """
    try:
        self.check_alive()
    except RRefError as error:
        words.refuse_rref(error, "fork", self)
    return (Serialized(self),)


def _deserialize(data: tuple[Serialized | RRef[Any]]) -> RRef[Any]:
    """Return a reference, for the current agent, to the value of the reference on which `_serialize` was called.

    Raises RRefError if ``data`` was used before.
    """
    (serialized,) = data
    return serialized.accept() if isinstance(serialized, Serialized) else serialized


def _fork_for_anybody(rref: RRef[Any]) -> bytes:
    """Make a fork of a reference for an unknown receiver, and return it as bytes for `_accept_fork`.

    The agent that accepts it becomes a user. If no agent does, the value is kept.
    """
    return msgspec.msgpack.encode(rref.hand_over(_UNKNOWN_RECEIVER))


def _accept_fork(data: bytes) -> RRef[Any]:
    """Make the current agent a user of the value of a fork that `_fork_for_anybody` made; return the reference.

    Accept each fork only once: a second time is not noticed.
    """
    agent = api.current_agent()
    fork = msgspec.msgpack.decode(data, type=Fork)
    rref: RRef[Any]
    (rref,) = agent.references.accept([fork])
    if fork.owner == agent.me.incarnation:  # the owner needs no fork of its own value: end the fork
        if fork.parent == fork.owner:
            agent.references.take_back([fork], _UNKNOWN_RECEIVER)
        else:
            agent.post(fork.parent, ChildAccept(fork.fork))
    return rref


def release_users(agent: Agent, timeout: float) -> None:
    """Release all references to values of other workers; wait up to ``timeout`` seconds until the owners know it.

    References that the program still has cannot be used afterwards. Returns even if owners do not answer in time.
    """
    deadline = time.monotonic() + durations.positive(timeout)
    agent.references.release_all()
    while agent.references.forks.users and time.monotonic() < deadline:
        time.sleep(_POLL)
    while agent.links.outstanding() and time.monotonic() < deadline:
        time.sleep(_POLL)
