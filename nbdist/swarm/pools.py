"""What a server is asked to compute, in the order in which it does: by priority, then by time. Pure.

Requests of one kind that can be computed as one are handed out together, up to a size.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from nbdist.errors import NbdistError

__all__ = ["Pools", "Request", "TooLarge", "prioritize"]


class TooLarge(NbdistError):
    """A request is larger than a server takes."""


_numbers = itertools.count()


@dataclass(eq=False)
class Request:
    """Something to compute."""

    kind: str
    size: int
    """Tokens."""
    priority: float
    work: Any
    together: Hashable = None
    """What it has in common with those with which it can be computed as one; None if it cannot."""
    number: int = -1
    """When it came."""

    @property
    def order(self) -> tuple[float, int]:
        """The least is first."""
        return self.priority, self.number


def prioritize(kind: str, tokens: int, points: float) -> float:
    """How soon something is computed: the least is first. Text that somebody waits for goes before training; and of
    each, what more points are spent on."""
    return (0.0 if kind == "step" else 1.0) - points / (1.0 + abs(points)) / 2


class Pools:
    """What waits."""

    def __init__(self, largest: int | None = None, batch: int = 4096) -> None:
        self.largest = largest
        """So many tokens may one request have;"""
        self.batch = batch
        """and so many those that are computed as one."""
        self._waiting: list[Request] = []

    def submit(self, request: Request) -> None:
        """One more; `TooLarge` if it is."""
        if self.largest is not None and request.size > self.largest:
            raise TooLarge(
                f"a {request.kind} of {request.size} tokens is more than the {self.largest} that a server takes"
            )
        request.number = next(_numbers)
        self._waiting.append(request)

    def withdraw(self, request: Request) -> bool:
        """It is not wanted any more; whether it had not been handed out."""
        if request not in self._waiting:
            return False
        self._waiting.remove(request)
        return True

    def take(self) -> list[Request]:
        """What is to be computed next, as one; nothing if there is nothing."""
        found: list[Request] = []
        size = 0
        for request in sorted(self._waiting, key=lambda request: request.order):
            alike = found and request.kind == found[0].kind and request.together == found[0].together
            if not found or (alike and request.together is not None and size + request.size <= self.batch):
                found.append(request)
                size += request.size
        for request in found:
            self._waiting.remove(request)
        return found

    def __len__(self) -> int:
        return len(self._waiting)
