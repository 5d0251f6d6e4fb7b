"""Chooses the members on other hosts that an agent watches. Pure.

To watch a member is to send it a heartbeat after each second of silence (`nbdist.wire.peer`). In a world of up to
`ALL_WATCH_ALL` agents, each one watches all. In a larger world, an agent watches only

- members for whose answer it waits, or that have not acknowledged its messages;
- members near it on a ring. The ring has all members in the order of their incarnations, which are random numbers::

      ... ── A1 ── B1 ── A2 ── C1 ── B2 ── ...      A1 and A2 are on one host, B1 and B2 on another
              <─────────────────────>
      the watchers of A2: the `EACH_SIDE` nearest members on either side that are on another host than A2

So each member has `2 * EACH_SIDE` watchers, if the other hosts have that many members. An agent watches that many
members on average. It computes its list alone, from the members that it knows. If only a few agents know that a member
is lost or new, only the lists of the member's neighbours on the ring differ.

A watcher that has not heard from its member for 5 s tells all others (`Silence`). Each of them asks the member itself,
and counts these 5 s: it loses the member after 12 s of silence in all. So if the connection between two members is cut,
no other agent loses one of them; but if a member dies, all agents lose it when its watchers do.

A member that leaves says goodbye to all, but some may not receive this. So an agent that has lost a member, for any
reason, tells the few members that it watches. Each of these that still has the lost member asks it for a sign of life,
and tells it that the agent has lost it: if the connection between these two is cut, the member may wait for the agent
without watching it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nbdist.wire.messages import Record

ALL_WATCH_ALL = 16
"""The most agents of a world in which each one watches all others."""
EACH_SIDE = 2
"""The number of watchers on each side of a member. With several, some are left when others die with the member."""


def watched_by(me: Record, members: Iterable[Record]) -> set[int]:
    """Return the incarnations of the members that ``me`` watches on the ring. ``members`` may contain ``me``."""
    others = [record for record in members if record is not me]
    ring = sorted(others, key=lambda record: (record.incarnation < me.incarnation, record.incarnation))
    found: set[int] = set()
    for side in (ring, ring[::-1]):
        # By host: the number of members from this agent up to the next one, this agent included.
        passed: Counter[str] = Counter({me.host: 1})
        count = most = 1
        for record in side:
            if count - most > EACH_SIDE:
                break  # every following member has `EACH_SIDE` nearer members of other hosts, whatever its host is
            if record.host != me.host and count - passed[record.host] <= EACH_SIDE:
                found.add(record.incarnation)
            passed[record.host] += 1
            count += 1
            most = max(most, passed[record.host])
    return found
