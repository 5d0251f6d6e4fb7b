"""Adds to nbdist's RRef the private methods of torch's that programs and torch's own modules use.

`extend` changes nbdist's own class instead of deriving a new one, because RRefs are made in many places of nbdist.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from nbdist import durations
from nbdist.compat import words
from nbdist.errors import RRefError, UsageError
from nbdist.rpc import api
from nbdist.rpc.agent import Agent
from nbdist.rpc.futures import Future
from nbdist.rpc.options import UNSET_RPC_TIMEOUT
from nbdist.rpc.references.rref import Proxy, RRef
from nbdist.wire.messages import ChildAccept, Fork
from nbdist.wire.pickling.registered import register_reducer

_UNKNOWN_RECEIVER = 0  # who will read a plain pickle; no agent has this incarnation
_POLL = 0.005  # seconds
_lock = threading.Lock()  # guards the attribute ``_compat_type`` of all references


def extend() -> None:
    """Add torch's private methods to the class RRef, and make its public methods raise torch's errors. Once."""
    methods: tuple[Any, ...] = _get_type, _serialize, staticmethod(_deserialize)
    for method in methods:
        setattr(RRef, method.__name__, method)
    for name, way in {"rpc_sync": "method_sync", "rpc_async": "method_async", "remote": "method_remote"}.items():
        setattr(RRef, name, _stand_in(getattr(RRef, name), way))
    for name in ("to_here", "local_value", "backward"):
        setattr(RRef, name, _in_torchs_words(getattr(RRef, name), name))
    register_reducer(Serialized, in_a_message)


Method = Callable[..., Any]


def _stand_in(method: Method, way: str) -> Method:
    """Replace ``RRef.rpc_sync`` and the like, and raise torch's errors; ``way`` is a method of `Caller`."""

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
    @functools.wraps(method)
    def use(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (UsageError, RRefError) as error:
            words.refuse_rref(error, f"{name}()", self)

    return use


def _type_of(rref: RRef[Any]) -> type:
    return type(rref.local_value())  # runs on the owner


def _get_type(self: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """Return the type of the value; without ``blocking``, a Future of the type. The owner is asked only once."""
    with _lock:  # two threads that ask at once send one call
        future: Future[type] | None = getattr(self, "_compat_type", None)
        # If the request failed, it is repeated.
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
        """Return how pickle rebuilds a copy, with a new fork for an unknown receiver."""
        # The value lives until the copy's `accept`, or for ever if the bytes are never read.
        # A copy has one fork only, so pickling the copy again hands that fork on instead of making another one.
        return Serialized, (None, self._fork if self._rref is None else _fork_for_anybody(self._rref))

    def accept(self) -> RRef[Any]:
        """Make the current agent a user of the value; return the reference. A second call raises RRefError."""
        # Both are forgotten before the fork is accepted: accepting it twice would count one user where there are two.
        rref, self._rref = self._rref, None
        fork, self._fork = self._fork, b""
        if rref is not None:
            fork = _fork_for_anybody(rref)
        if not fork:
            raise RRefError("this serialized reference was rebuilt before; serialize the RRef again for each use")
        return _accept_fork(fork)


def in_a_message(serialized: Serialized) -> Any:
    """Return how pickle rebuilds ``serialized`` from a message: the RRef goes into it, and the codec makes the fork."""
    if serialized._rref is None:
        return serialized.__reduce__()
    return _unchanged, (serialized._rref,)


def _unchanged(rref: RRef[Any]) -> RRef[Any]:
    return rref  # on the receiver: the codec has rebuilt it


def _serialize(self: RRef[Any]) -> tuple[Serialized]:
    """Return the argument for `_deserialize`. Raises torch's error if the reference cannot be used any more."""
    try:
        self.check_alive()
    except RRefError as error:
        words.refuse_rref(error, "fork", self)
    return (Serialized(self),)


def _deserialize(data: tuple[Serialized | RRef[Any]]) -> RRef[Any]:
    """Return the reference on which `_serialize` was called, for the current agent. RRefError for a second use."""
    (serialized,) = data
    return serialized.accept() if isinstance(serialized, Serialized) else serialized


def _fork_for_anybody(rref: RRef[Any]) -> bytes:
    """Make a fork for an unknown receiver, as bytes for `_accept_fork`. The value lives until an agent accepts it."""
    return msgspec.msgpack.encode(rref.hand_over(_UNKNOWN_RECEIVER))


def _accept_fork(data: bytes) -> RRef[Any]:
    """Make the current agent a user of the fork's value. Accepting a fork a second time is not noticed."""
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
    """Release all references to values of other workers; wait up to ``timeout`` seconds until the owners know it."""
    deadline = time.monotonic() + durations.positive(timeout)  # refuses a wrong timeout before anything is released
    agent.references.release_all()
    while (agent.references.forks.users or agent.links.outstanding()) and time.monotonic() < deadline:
        time.sleep(_POLL)
