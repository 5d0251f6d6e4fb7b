"""The queue of requests that a server must compute: by priority, then in the order of arrival. Pure.

Requests of one kind that can be computed together are taken out together, up to a number of tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from nbdist.errors import NbdistError


class TooLarge(NbdistError):
    """A request has more tokens than a server accepts (`Options.largest`)."""


_numbers = itertools.count()


@dataclass(eq=False)
class QueuedRequest:
    """One request to compute something. The queue uses neither ``work`` nor ``answer``, which the runtime settles."""

    kind: str  # "step", "forward", "backward" or "unload"
    size: int  # in tokens, of all sequences
    priority: float  # the least is computed first
    work: Any
    together: Hashable = None  # requests of one kind with equal keys can be computed together; None: this one alone
    number: int = -1  # the position in the order of arrival, set by `RequestQueues.submit`
    answer: Future[Any] = field(default_factory=Future)


def prioritize(kind: str, tokens: int, points: float) -> float:
    """Return the priority of a request: steps of sessions come before requests for training.

    ``kind`` is "step" for a session's step; any other kind is for training. Within each of these groups, requests with
    more ``points`` come first; ``tokens`` does not matter. The request with the least number is computed first.
    """
    return (0.0 if kind == "step" else 1.0) - points / (1.0 + abs(points)) / 2


class RequestQueues:
    """The waiting requests. Not thread-safe: `Runtime` has the lock."""

    def __init__(self, largest: int | None = None, batch: int = 4096) -> None:
        self.largest = largest  # tokens of one request; None for no limit
        self.batch = batch  # tokens, in all, of several requests that are computed together
        self._waiting: list[QueuedRequest] = []

    def submit(self, request: QueuedRequest) -> None:
        """Add a request; raise `TooLarge` if it has more than `largest` tokens."""
        if self.largest is not None and request.size > self.largest:
            raise TooLarge(
                f"a {request.kind} of {request.size} tokens is more than the {self.largest} that a server accepts: "
                "send fewer at a time (chunk, micro_batch), or call serve with a larger `largest`"
            )
        request.number = next(_numbers)
        self._waiting.append(request)

    def withdraw(self, request: QueuedRequest) -> None:
        """Remove a request that is not wanted any more, unless it has been taken out already."""
        if request in self._waiting:
            self._waiting.remove(request)

    def take(self) -> list[QueuedRequest]:
        """Take out the first request, and all later ones that can be computed with it; an empty list if none waits.

        They are of one kind, have equal keys `together`, and at most `batch` tokens in all.
        """
        found: list[QueuedRequest] = []
        size = 0
        # A request that does not fit into the batch is skipped; later ones may still fit.
        for request in sorted(self._waiting, key=lambda request: (request.priority, request.number)):
            alike = found and request.kind == found[0].kind and request.together == found[0].together
            # The first is always taken, even if it is larger than a batch.
            if not found or (alike and request.together is not None and size + request.size <= self.batch):
                found.append(request)
                size += request.size
        for request in found:
            self._waiting.remove(request)
        return found

    def __len__(self) -> int:
        return len(self._waiting)
