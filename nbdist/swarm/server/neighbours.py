"""Lets the servers of a swarm call each other, by an `Address`: the worker's name and the server's key.

They do not use remote references: if a server's worker is dead, a client could not even send a reference to the server.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, NamedTuple, Protocol

import torch

from nbdist.errors import NbdistError
from nbdist.rpc.api import rpc_async, rpc_sync
from nbdist.swarm.carriage import carriage

__all__ = ["Address", "NobodyThere", "call", "hand_on", "register"]

_PUSH_TIMEOUT = 60.0
"""Seconds after which a push of hidden states times out. The client pushes them itself long before."""


class Neighbour(Protocol):
    """The methods of a `nbdist.swarm.server.server.Server` that other servers call."""

    def push(self, id: str, begin: int, number: int, hidden: torch.Tensor) -> None:
        """Store the input of step ``number`` of session ``id``. Storing it twice is harmless.

        ``begin`` is the first block of the session's span on that server. Raises NoSession if the server does not have
        the session.
        """
        ...

    def export(self, id: str, begin: int, first: int, last: int, patience: float) -> tuple[Any, ...]:
        """Return what another server needs to continue a session on the blocks from ``first`` to before ``last``.

        See `nbdist.swarm.server.server.Server.export`.
        """
        ...


_servers: weakref.WeakValueDictionary[str, Neighbour] = weakref.WeakValueDictionary()
"""The servers of this process, by key."""


class NobodyThere(NbdistError):
    """A worker does not have the server of an address any more: its swarm was closed, or the worker restarted."""


class Address(NamedTuple):
    """The address of a server: the name of its worker, and the key under which it is registered there."""

    worker: str
    key: str


def register(key: str, server: Neighbour) -> None:
    """Let other servers find a server of this process by its key. The registry refers to it weakly.

    A second call with the same key replaces the server.
    """
    _servers[key] = server


def call(to: Address, timeout: float, method: str, *args: Any) -> Any:
    """Call a method of another server and return its result.

    Raises NobodyThere, WorkerLost or RpcTimeout if the server does not answer, or the error of the method.
    """
    return rpc_sync(to.worker, _call_server, args=(to.key, method, *args), timeout=timeout)


def _call_server(key: str, method: str, *args: Any) -> Any:
    """Call a method of the server with this key. Runs on the worker that was called.

    Raises NobodyThere if the server is gone, and the errors of the method.
    """
    found = _servers.get(key)
    if found is None:
        raise NobodyThere(
            "the server that was called is not on this worker any more: its swarm was closed, or the worker restarted"
        )
    return getattr(found, method)(*args)


def hand_on(to: Address, session: str, begin: int, number: int, hidden: torch.Tensor) -> None:
    """Push the hidden states of step ``number`` to the next server, without waiting.

    ``begin`` is the first block of the session's span there. If the push fails, no error is raised: when the next
    server does not answer, the client pushes the same hidden states.
    """
    with contextlib.suppress(NbdistError):
        args = (to.key, "push", session, begin, number, hidden)
        rpc_async(to.worker, _call_server, args=args, timeout=_PUSH_TIMEOUT + carriage(hidden))
