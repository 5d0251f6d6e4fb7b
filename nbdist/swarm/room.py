"""Room for the caches of a server's sessions: a `Budget`, and the threads that wait for it."""

from __future__ import annotations

import threading
import time

from nbdist.rpc.futures import blocking_wait
from nbdist.swarm.budget import Budget, CacheFull, Ticket
from nbdist.swarm.held import Held, NoSession

__all__ = ["Room"]

_MORE = 1.25
"""By so much more than it needs a session grows that has more tokens than it has said."""

Key = tuple[str, int]
"""A session, and the first block of its span."""


class Room:
    """Who has how much of it."""

    def __init__(self, limit: int | None) -> None:
        self._budget = Budget(limit)
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes."""
        return self._budget.used

    @property
    def wanting(self) -> int:
        """How many wait."""
        with self._changed:
            return len(self._budget.waiting)

    def of(self, key: Key) -> int:
        """What one session has."""
        return self._budget.of(key)

    def reserve(self, key: Key, session: Held, per_token: float, tokens: int, deadline: float) -> None:
        """Have room for so many tokens, or for as many as there are going to be; wait for that if need be."""
        has = self.of(key)
        if per_token * tokens <= has:
            return
        expected = max(session.expected, tokens, int(_MORE * tokens) if has else 0)
        with self._changed:
            if session.ended:
                raise NoSession(session.ended)
            try:
                ticket = self._budget.ask(key, int(per_token * expected) - has, deadline)
            except CacheFull:
                if expected == tokens:
                    raise
                ticket = self._budget.ask(key, int(per_token * tokens) + 1 - has, deadline)
            self._await(ticket, session, deadline)
        if ticket.state == "expired":
            raise CacheFull(
                f"{ticket.nbytes} bytes for the caches of session {key[0]} did not become free in time: "
                f"{self.used} of {self._budget.limit} are in use"
            )
        if session.ended:
            raise NoSession(session.ended)

    def _await(self, ticket: Ticket, session: Held, deadline: float) -> None:
        try:
            with blocking_wait():
                while ticket.state == "waiting" and not session.ended:
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        self._budget.expire(time.monotonic())
        finally:
            if session.ended or ticket in self._budget.waiting:  # or it is interrupted
                self._budget.cancel(ticket)
            self._changed.notify_all()

    def release(self, key: Key) -> None:
        """A session is over."""
        with self._changed:
            self._budget.release(key)
            self._changed.notify_all()

    def expire(self, now: float) -> None:
        """Whose time has come waits no longer."""
        with self._changed:
            if self._budget.expire(now):
                self._changed.notify_all()
