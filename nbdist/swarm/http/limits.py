"""`Limits`: how many texts are written at once, how many wait, and how many requests a minute are let in. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from nbdist.swarm.http.api_error import ApiError
from nbdist.swarm.policy import check_amount, check_count

_NO_LIMIT = 10**9  # more than any endpoint has

Start = Callable[[], None]


class Limits:
    """The turns and the rate of an endpoint. Only the thread of its event loop uses it.

    ``at_once`` texts are written at once, ``queue`` texts wait, and ``rate`` requests a minute are let in; as many may
    come in one moment. None is for no limit. Raises UsageError if one of them is not valid.
    """

    def __init__(self, at_once: int | None, queue: int | None, rate: int | None) -> None:
        check_count("at_once", at_once)
        check_amount("queue", queue)
        check_count("rate", rate)
        self._at_once, self._queue, self._rate = (
            _NO_LIMIT if each is None else each for each in (at_once, queue, rate)
        )
        self._left = float(self._rate)  # requests that may come now
        self._since = 0.0  # when that was so
        self._waiting: deque[Start] = deque()
        self.running = 0
        """Texts that are written now."""

    @property
    def queued(self) -> int:
        """Texts that wait for their turn."""
        return len(self._waiting)

    def admit(self, now: float) -> None:
        """Let a request in; raise `ApiError` (429), which says when to come again, if too many came before it."""
        self._left = min(float(self._rate), self._left + (now - self._since) * self._rate / 60)
        self._since = now
        if self._left < 1:
            wait = math.ceil((1 - self._left) * 60 / self._rate)
            why = f"more than {self._rate} requests a minute: try again in {wait} s"
            raise ApiError(429, why, code="rate_limit_exceeded", retry=wait)
        self._left -= 1

    def enter(self, starts: Sequence[Start]) -> None:
        """Call each of ``starts`` when its text has its turn; raise `ApiError` (429) if the queue is too full."""
        if self.running + self.queued + len(starts) > self._at_once + self._queue:
            why = f"{self.queued} texts wait for their turn, and {self._queue} may: try again later"
            raise ApiError(429, why, code="queue_full", retry=5)
        self._waiting.extend(starts)
        self._start()

    def withdraw(self, starts: Sequence[Start]) -> None:
        """Give up those turns that have not come yet."""
        self._waiting = deque(each for each in self._waiting if each not in starts)

    def leave(self) -> None:
        """End the turn of a text."""
        self.running -= 1
        self._start()

    def _start(self) -> None:
        while self.running < self._at_once and self._waiting:
            self.running += 1
            self._waiting.popleft()()
