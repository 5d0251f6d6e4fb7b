"""What torch's RRef can do beyond nbdist's: its private methods, and what counts references for tests.

The methods are added to nbdist's class when compat is installed, because an RRef is made in many places and
all of them must have these.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist.rpc import api
from nbdist.rpc.futures import Future
from nbdist.rpc.options import UNSET_RPC_TIMEOUT
from nbdist.rpc.rref import RRef
from nbdist.wire.messages import ChildAccept, Fork

if TYPE_CHECKING:
    from nbdist.rpc.agent import Agent

__all__ = ["debug_info", "extend", "release_users"]

_NOBODY = 0
"""No agent's incarnation: whoever will get a serialized reference is not known yet."""

_POLL = 0.005
_lock = threading.Lock()


def extend() -> None:
    """Give every RRef torch's private methods."""
    methods = {
        "_get_type": _get_type,
        "_get_future": _get_future,
        "_get_profiling_future": _get_future,
        "_serialize": _serialize,
        "_deserialize": staticmethod(_deserialize),
    }
    for name, method in methods.items():
        if name not in vars(RRef):
            setattr(RRef, name, method)


def _type_of(rref: RRef[Any]) -> type:
    return type(rref.local_value())


def _get_type(self: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """The type of the value, asked of its owner once; without ``blocking``, a Future for it."""
    with _lock:
        future: Future[type] | None = getattr(self, "_compat_type", None)
        if future is None or (future.done() and future.exception() is not None):
            future = self._agent.caller.asynchronous(self.owner(), _type_of, (self,), None, timeout)
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


def _serialize(self: RRef[Any]) -> tuple[bytes]:
    """A fork of this reference that can travel by other ways than a call.

    Until somebody has rebuilt it, the value is kept for it.
    """
    return (msgspec.msgpack.encode(self._agent.references.hand_over(self, _NOBODY)),)


def _deserialize(data: tuple[bytes]) -> RRef[Any]:
    """The reference that was serialized, here."""
    agent = api.current_agent()
    fork = msgspec.msgpack.decode(data[0], type=Fork)
    (rref,) = agent.references.accept([fork])
    if fork.owner == agent.me.incarnation:  # it has come home: a handle, where a fork was promised
        if fork.parent == fork.owner:
            agent.references.take_back([fork], _NOBODY)
        else:
            agent.post(fork.parent, ChildAccept(fork.fork))
    return rref


def release_users(agent: Agent, timeout: float) -> None:
    """Let go of every reference to another worker's values, and wait until their owners know."""
    deadline = time.monotonic() + timeout
    agent.references.release_all()
    while agent.references.forks.users and time.monotonic() < deadline:
        time.sleep(_POLL)
    while agent.links.outstanding() and time.monotonic() < deadline:
        time.sleep(_POLL)


def debug_info(agent: Agent) -> dict[str, str]:
    """How many references there are, in torch's words."""
    forks = agent.references.forks
    creations = sum(1 for call in agent.pending.all() if call.result is not None)
    return {
        "num_owner_rrefs": str(forks.owners),
        "num_pending_futures": str(creations),
        "num_pending_users": str(forks.pending),
        "num_forks": str(forks.forks),
    }
