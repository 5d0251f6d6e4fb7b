"""Names that are unique in time as well as in space.

A worker's name and id can be taken again after it has died, so everything that outlives a
message carries the *incarnation* of the agent that made it: a random number drawn at start.
"""

from __future__ import annotations

import itertools
import secrets
from typing import NamedTuple

__all__ = ["GlobalId", "IdSource", "new_incarnation"]


def new_incarnation() -> int:
    """A number that no other agent, past or future, will have (62 bits, never 0)."""
    return secrets.randbits(62) | 1


class GlobalId(NamedTuple):
    """The id of an RRef or of one fork of it."""

    created_on: int
    local_id: int
    incarnation: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


class IdSource:
    """Hands out the global ids of one agent."""

    def __init__(self, worker_id: int, incarnation: int) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._counter = itertools.count()

    def next(self) -> GlobalId:
        """Return the next id. Any thread may call this: a count's `next` is one operation."""
        return GlobalId(self._worker_id, next(self._counter), self._incarnation)
