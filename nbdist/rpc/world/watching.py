"""Chooses the members on other hosts that an agent watches. Pure.

To watch a member is to send it a heartbeat after each second of silence (`nbdist.wire.peer`). Up to `ALL_WATCH_ALL`
agents, each one watches all. In a larger world, an agent watches only

- those for whose answer it waits, or that have not acknowledged its messages;
- those whose watcher it is on a ring. The ring has all members in the order of their incarnations, which are random::

      ... ── A1 ── B1 ── A2 ── C1 ── B2 ── ...      A1 and A2 are on one host, B1 and B2 on another
              <─────────────────────>
      the watchers of A2: the `EACH_SIDE` nearest members on either side that are on another host than A2

So each member always has `2 * EACH_SIDE` watchers, if the other hosts have as many members. An agent watches as many
members on average. It computes its list alone, from the members that it knows. A member that only a few agents know to
be lost or new changes the lists of its neighbours alone.

A watcher that has not heard its member for 5 s tells all others (`Silence`). Each of them asks that member itself, and
counts the 5 s; it loses the member after 12 s, unless it hears it. So a cut between two members makes nobody else lose
one of them, and yet all lose a dead one when its watchers do.

A member that leaves says so to all, but some may not hear it. So an agent that has lost a member, for any reason, tells
the few that it watches. Each of those that still has the member asks it, and tells it that this agent has lost it: if
the connection between the two is cut, the member may wait for this agent without watching it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nbdist.wire.messages import Record

__all__ = ["ALL_WATCH_ALL", "watched_by"]

ALL_WATCH_ALL = 16
"""The most agents of a world in which each one watches all others."""
EACH_SIDE = 2
"""The watchers of a member on each side of the ring. A member stays watched if some of its watchers die with it."""


def watched_by(me: Record, members: Iterable[Record]) -> set[int]:
    """Return the incarnations of the members whose watcher ``me`` is on the ring. ``members`` may contain ``me``."""
    ring = sorted((record for record in members if record is not me), key=lambda record: record.incarnation)
    place = sum(record.incarnation < me.incarnation for record in ring)
    ring = ring[place:] + ring[:place]
    found: set[int] = set()
    for side in (ring, ring[::-1]):
        passed: Counter[str] = Counter({me.host: 1})
        """The members from this agent up to the next one, this agent included, by host."""
        count = most = 1
        for record in side:
            if count - most > EACH_SIDE:
                break  # enough others stand before each one that follows, whatever its host
            if record.host != me.host and count - passed[record.host] <= EACH_SIDE:
                found.add(record.incarnation)
            passed[record.host] += 1
            count += 1
            most = max(most, passed[record.host])
    return found
