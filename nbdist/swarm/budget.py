"""Who may have how much memory for caches: in the order of asking, with deadlines. Pure: the time is given.

A session that has some already comes before one that has none: else the first would wait for room that the second
waits for, too, and neither could end.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

from nbdist.errors import NbdistError

__all__ = ["Budget", "CacheFull", "Ticket"]

State = Literal["waiting", "granted", "expired", "over"]


class CacheFull(NbdistError):
    """There is no room for a session's caches: never, or not in time."""


class Ticket:
    """Some bytes, or the wish for them."""

    def __init__(self, owner: Hashable, nbytes: int, deadline: float) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self.deadline = deadline
        self.state: State = "waiting"

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes for {self.owner}, {self.state}>"


class Budget:
    """So many bytes, or without limit if that is None."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.used = 0
        self._granted: dict[Hashable, list[Ticket]] = {}
        self._waiting: list[Ticket] = []

    def ask(self, owner: Hashable, nbytes: int, deadline: float) -> Ticket:
        """Want some more; what comes back is granted, or waits. `CacheFull` where it can never fit."""
        has = self.of(owner)
        if self.limit is not None and has + nbytes > self.limit:
            more = f", besides {has} that it has," if has else ""
            raise CacheFull(f"{nbytes} bytes of caches{more} do not fit into {self.limit}, ever")
        ticket = Ticket(owner, nbytes, deadline)
        self._waiting.append(ticket)
        self._grant()
        return ticket

    def of(self, owner: Hashable) -> int:
        """What somebody has."""
        return sum(ticket.nbytes for ticket in self._granted.get(owner, ()))

    @property
    def waiting(self) -> list[Ticket]:
        """Who is next comes first."""
        return sorted(self._waiting, key=lambda ticket: ticket.owner not in self._granted)

    def release(self, owner: Hashable) -> list[Ticket]:
        """Somebody wants nothing any more; who is granted something because of that."""
        for ticket in self._granted.pop(owner, []):
            self.used -= ticket.nbytes
            ticket.state = "over"
        for ticket in [ticket for ticket in self._waiting if ticket.owner == owner]:
            self._waiting.remove(ticket)
            ticket.state = "over"
        return self._grant()

    def cancel(self, ticket: Ticket) -> list[Ticket]:
        """What was asked for is not wanted any more; who is granted something because of that."""
        if ticket.state == "waiting":
            self._waiting.remove(ticket)
        elif ticket.state == "granted":
            self._granted[ticket.owner].remove(ticket)
            if not self._granted[ticket.owner]:
                del self._granted[ticket.owner]
            self.used -= ticket.nbytes
        ticket.state = "over"
        return self._grant()

    def expire(self, now: float) -> list[Ticket]:
        """Whose time has come waits no longer; these, and those who are granted something because of that."""
        expired = [ticket for ticket in self._waiting if ticket.deadline <= now]
        for ticket in expired:
            self._waiting.remove(ticket)
            ticket.state = "expired"
        return expired + self._grant()

    def _grant(self) -> list[Ticket]:
        """Nobody overtakes: as long as the first does not fit, the others wait."""
        found = []
        for ticket in self.waiting:
            if self.limit is not None and self.used + ticket.nbytes > self.limit:
                break
            self._waiting.remove(ticket)
            self.used += ticket.nbytes
            ticket.state = "granted"
            self._granted.setdefault(ticket.owner, []).append(ticket)
            found.append(ticket)
        return found
