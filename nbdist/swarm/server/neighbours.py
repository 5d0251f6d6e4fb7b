"""Lets the servers of a swarm call each other, by their names.

They do not use remote references: if a server's worker is dead, a client could not even send a reference to the server.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nbdist.rpc.api import current_agent
from nbdist.swarm.carriage import carriage

_PUSH_TIMEOUT = 60.0  # seconds after which a push of hidden states times out; the client pushes them itself long before


class Address(NamedTuple):
    """The address of a server: the name of its worker, and the name under which the worker's agent has published it."""

    worker: str
    name: str

    @property
    def deputy(self) -> Address:
        """The address of this server's `nbdist.swarm.deputy.Deputy`."""
        return self._replace(name=f"deputy {self.name.partition(' ')[2]}")

    def export(self, id: str, begin: int, first: int, last: int, patience: float) -> tuple[Any, ...]:
        """Return what `Server.export` returns there; wait ``patience`` seconds at most.

        Raises NotOffered, WorkerLost or RpcTimeout if the server does not answer, or the error of the method.
        """
        there = current_agent().at(self.worker, self.name)
        # The server gives up after half of the time, so that its TimeoutError arrives before this call times out.
        found: tuple[Any, ...] = there.ask("export", id, begin, first, last, patience / 2, timeout=patience)
        return found

    def hand_on(self, session: str, begin: int, number: int, hidden: torch.Tensor) -> None:
        """Push the input of step ``number`` to the session's span there that begins with ``begin``, without waiting."""
        there = current_agent().at(self.worker, self.name)
        # A push that fails raises nothing: when the next server does not answer, the client pushes the same hidden
        # states.
        there.cast("push", session, begin, number, hidden, timeout=_PUSH_TIMEOUT + carriage(hidden))
