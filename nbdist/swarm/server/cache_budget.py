"""Grants cache memory to sessions in the order of their requests, with deadlines. Pure: callers pass the time.

The states of a ticket, and the methods of `Budget` that change them::

    ask ──► "waiting" ──memory is free──► "granted" ──cancel, release──► "over"
                │
                ├──cancel, release──► "over"
                └──expire──► "expired"

A session that holds memory already comes before a session that holds none. Otherwise the first could wait for memory
for which the second waits, too, and neither would end.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

from nbdist.errors import NbdistError

State = Literal["waiting", "granted", "expired", "over"]


class CacheFull(NbdistError):
    """A server has no memory for a session's caches: they exceed its limit, or no memory became free in time.

    The limit is ``cache_bytes`` of `nbdist.swarm.serve`, the wait ``cache_timeout``. Calls of models and steps of
    sessions raise it. The session cannot continue; the swarm and other sessions can.
    ``docs/errors.md`` has examples.
    """


class NeverFits(CacheFull, NbdistError):  # the page of errors has the classes with a base in `nbdist.errors`
    """A session's caches exceed the limit of a server's memory: waiting would not help, shorter sequences would."""


class Ticket:
    """A request for some bytes by an owner, until the time ``deadline``. While it is granted, it holds the bytes."""

    def __init__(self, owner: Hashable, nbytes: int, deadline: float) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self.deadline = deadline
        self.state: State = "waiting"

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes for {self.owner}, {self.state}>"


class Budget:
    """Up to ``limit`` bytes that owners share, by tickets; None for no limit. Not thread-safe: `Room` has the lock.

    Methods that return tickets have granted or ended them: the caller wakes the threads that wait for these tickets.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.used = 0  # granted to all owners
        self._granted: dict[Hashable, list[Ticket]] = {}  # by owner
        self._waiting: list[Ticket] = []  # in the order of `ask`

    def ask(self, owner: Hashable, nbytes: int, deadline: float) -> Ticket:
        """Ask for more bytes for an owner; return a ticket that is granted at once, or waits for its turn.

        Only `expire`, whose clock ``deadline`` is of, ends a ticket that still waits then. Raises `NeverFits` if the
        owner would have more than the limit, so that waiting would not help.
        """
        has = self.of(owner)
        if self.limit is not None and has + nbytes > self.limit:
            more = f", besides {has} that it has," if has else ""
            raise NeverFits(
                f"{nbytes} bytes of caches{more} can never fit, as the limit is {self.limit} bytes: "
                "use shorter or fewer sequences, or call serve with more cache_bytes"
            )
        ticket = Ticket(owner, nbytes, deadline)
        self._waiting.append(ticket)
        self._grant()
        return ticket

    def of(self, owner: Hashable) -> int:
        """Return the bytes that are granted to an owner."""
        return sum(ticket.nbytes for ticket in self._granted.get(owner, ()))

    @property
    def waiting(self) -> list[Ticket]:
        """The tickets that wait, in the order in which they will be granted."""
        # Owners with memory first, for the reason in the module's head. `sorted` keeps the order of `ask` among the
        # others.
        return sorted(self._waiting, key=lambda ticket: ticket.owner not in self._granted)

    def release(self, owner: Hashable) -> list[Ticket]:
        """Take back all bytes and end all tickets of an owner, if any; return the tickets that are granted now."""
        for ticket in [*self._granted.get(owner, ()), *self._waiting]:
            if ticket.owner == owner:
                self._end(ticket, "over")
        return self._grant()

    def cancel(self, ticket: Ticket) -> list[Ticket]:
        """End one ticket, if it is not over, and take back its bytes; return the tickets that are granted now."""
        self._end(ticket, "over")
        return self._grant()

    def expire(self, now: float) -> list[Ticket]:
        """End the waiting tickets whose deadline has come; return these, and the tickets that are granted now."""
        expired = [ticket for ticket in self._waiting if ticket.deadline <= now]
        for ticket in expired:
            self._end(ticket, "expired")
        return expired + self._grant()

    def _end(self, ticket: Ticket, state: State) -> None:
        if ticket.state == "waiting":
            self._waiting.remove(ticket)
        elif ticket.state == "granted":
            self._granted[ticket.owner].remove(ticket)
            # With an empty list, the owner would keep its precedence in `waiting`.
            if not self._granted[ticket.owner]:
                del self._granted[ticket.owner]
            self.used -= ticket.nbytes
        ticket.state = state

    def _grant(self) -> list[Ticket]:
        """Grant waiting tickets in order, up to the first that does not fit; return the granted tickets."""
        found: list[Ticket] = []
        # The order is computed anew after each ticket: an owner that gets its first bytes comes before others from then
        # on.
        while waiting := self.waiting:
            ticket = waiting[0]
            if self.limit is not None and self.used + ticket.nbytes > self.limit:
                # No smaller ticket overtakes this one, which could otherwise wait for ever.
                break
            self._waiting.remove(ticket)
            self.used += ticket.nbytes
            ticket.state = "granted"
            self._granted.setdefault(ticket.owner, []).append(ticket)
            found.append(ticket)
        return found
