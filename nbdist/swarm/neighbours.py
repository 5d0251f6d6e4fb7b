"""How the servers of a swarm reach each other: by name and key.

Not by references: to send one to a server that is dead would be the error of whoever sends it.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nbdist.errors import NbdistError
from nbdist.rpc.api import rpc_async, rpc_sync
from nbdist.swarm.large import pieces

if TYPE_CHECKING:
    from nbdist.swarm.server import Server

__all__ = ["Address", "NobodyThere", "call", "hand_on", "register"]

_PATIENCE = 60.0
"""Seconds for which it is tried to hand on what came out."""

_servers: weakref.WeakValueDictionary[str, Server] = weakref.WeakValueDictionary()
"""Of this process."""


class NobodyThere(NbdistError):
    """There is no such server, any more."""


class Address(NamedTuple):
    """Where a server is."""

    worker: str
    key: str


def register(key: str, server: Server) -> None:
    """Have others find a server of this process."""
    _servers[key] = server


def call(to: Address, timeout: float, method: str, *args: Any) -> Any:
    """Call a server's method."""
    return rpc_sync(to.worker, _here, args=(to.key, method, *args), timeout=timeout)


def _here(key: str, method: str, *args: Any) -> Any:
    found = _servers.get(key)
    if found is None:
        raise NobodyThere("this server is gone")
    return getattr(found, method)(*args)


def hand_on(to: Address, session: str, begin: int, number: int, hidden: torch.Tensor) -> None:
    """Push hidden states, in pieces if they are large. If that fails, their client brings them."""
    with contextlib.suppress(NbdistError):
        for at, piece in pieces(hidden):
            args = (to.key, "push", session, begin, number, at, piece)
            rpc_async(to.worker, _here, args=args, timeout=_PATIENCE)
