"""The cache memory of a server: a `Budget` with a lock, and threads that wait until it grants their tickets."""

from __future__ import annotations

import threading
import time

from nbdist.amounts import size
from nbdist.rpc.waits import blocking_wait
from nbdist.swarm.server.cache_budget import Budget, CacheFull, Ticket
from nbdist.swarm.server.session_caches import NoSession, ServerSession

_MOST = 2**63 - 1  # a client may say that it expects any number of tokens, and answers carry these numbers
_GROWTH = 1.25  # a session that outgrows what it expected reserves this many times its need, and so seldom asks again


class Room:
    """The cache memory of one server: up to ``limit`` bytes, None for no limit. Any thread may call it.

    Memory belongs to a `ServerSession`, not to its id: a session may be opened anew while its earlier object ends.
    """

    def __init__(self, limit: int | None) -> None:
        self._budget = Budget(limit)
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """The bytes that are reserved."""
        return min(self._budget.used, _MOST)

    @property
    def wanting(self) -> int:
        """The number of waiting requests for memory."""
        with self._changed:
            return len(self._budget.waiting)

    def of(self, session: ServerSession) -> int:
        """Return the bytes that a session has reserved for its span."""
        return min(self._budget.of(session), _MOST)

    def reserve(self, id: str, session: ServerSession, per_token: float, tokens: int, deadline: float) -> None:
        """Reserve memory for ``tokens`` tokens of ``per_token`` bytes; do nothing if the session has that much.

        Reserves for all tokens that the session expects, if so many can ever fit. ``deadline`` is as of
        `time.monotonic`, ``id`` for errors. Raises CacheFull if the memory can never suffice, or is not free by then,
        and NoSession if the session ends meanwhile.
        """
        has = self.of(session)
        # ``per_token`` is 0 until a step has shown the size of a token's cache. Until then nothing is reserved.
        if per_token * tokens <= has:
            return
        expected = max(session.expected, tokens, int(_GROWTH * tokens) if has else 0)
        with self._changed:
            if session.ended:
                raise NoSession(session.ended)
            try:
                ticket = self._budget.ask(session, int(per_token * expected) - has, deadline)
            except CacheFull:
                if expected == tokens:
                    raise
                # What the session expects can never fit; what it needs now may. `int` rounds down.
                ticket = self._budget.ask(session, int(per_token * tokens) + 1 - has, deadline)
            self._await(ticket, session, deadline)
        if ticket.state == "expired":
            assert self._budget.limit is not None  # else the ticket would have been granted at once
            raise CacheFull(
                f"{size(ticket.nbytes)} for the caches of session {id} did not become free in time: "
                f"{size(self.used)} of {size(self._budget.limit)} are in use. Wait until other sessions end, "
                "or call serve with more cache_bytes. A longer cache_timeout helps only when sessions start."
            )
        if session.ended:
            raise NoSession(session.ended)

    def _await(self, ticket: Ticket, session: ServerSession, deadline: float) -> None:
        """Wait until a ticket is granted or expired, or the session ends; raise for none. The caller holds the lock."""
        try:
            with blocking_wait():
                while ticket.state == "waiting" and not session.ended:
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        self._budget.expire(time.monotonic())
        finally:
            if session.ended or ticket in self._budget.waiting:  # it only still waits if this thread was interrupted
                self._budget.cancel(ticket)
            self._changed.notify_all()  # a cancelled ticket may have let others through

    def release(self, session: ServerSession) -> None:
        """Free the memory of a session's span, and wake the threads that wait for its memory."""
        with self._changed:
            self._budget.release(session)
            self._changed.notify_all()

    def expire(self, now: float) -> None:
        """End the waiting requests for memory whose deadline has come; their threads raise CacheFull."""
        with self._changed:
            if self._budget.expire(now):
                self._changed.notify_all()
