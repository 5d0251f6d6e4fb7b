"""Ids that are never used twice, not even by a later worker.

A new worker may take the name and the id of one that has died. So everything that lives longer than a message carries
the *incarnation* of the agent that made it: a random number, drawn when the agent starts.
"""

from __future__ import annotations

import itertools
import secrets
from typing import NamedTuple


def new_incarnation() -> int:
    """Return a number that no other agent, past or future, will have: a random odd one of up to 62 bits."""
    return secrets.randbits(62) | 1


class GlobalId(NamedTuple):
    """The id of a remote value, or of one fork of a reference to it."""

    created_on: int
    local_id: int
    incarnation: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


class IdSource:
    """Makes the global ids of one agent."""

    def __init__(self, worker_id: int, incarnation: int) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._counter = itertools.count()

    def next(self) -> GlobalId:
        """Return the next id. Any thread may call this: `next` of an `itertools.count` is one operation."""
        return GlobalId(self._worker_id, next(self._counter), self._incarnation)
