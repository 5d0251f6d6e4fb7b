"""What keeps values and forks alive on this agent, and how its end is noted.

Python may collect an object at any moment, in any thread, with any lock held. So the end of a hold is only noted, and
the thread that reads releases what it held. No function in Python runs for the note: Ctrl-C would cut it short, and
Python would swallow the Ctrl-C.
"""

from __future__ import annotations

import weakref
from collections import deque

from nbdist.ids import GlobalId

__all__ = ["Hold", "Holds"]


class Hold:
    """What keeps a value: its reference has it, and so has each message with which that is on its way."""

    __slots__ = ("__weakref__",)


class _Note(weakref.ref[Hold]):
    """Watches a `Hold`, and knows what its end releases."""

    __slots__ = ("released",)

    released: tuple[GlobalId, GlobalId | None]
    """The ids of a value and of the fork held here; None for the fork on the owner."""


class Holds:
    """The holds of one agent."""

    def __init__(self) -> None:
        self.ended: deque[_Note] = deque()
        """The notes of holds that are gone; who has the time looks whether there are any, and calls `take_ended`."""
        self._notes: set[_Note] = set()
        """All notes: one that nobody keeps is told nothing."""

    def hold(self, rref: GlobalId, fork: GlobalId | None) -> Hold:
        """Return what holds ``fork`` (on the owner, where it is None, the value) until it goes."""
        hold = Hold()
        note = _Note(hold, self.ended.append)
        note.released = rref, fork
        self._notes.add(note)
        return hold

    def take_ended(self) -> list[tuple[GlobalId, GlobalId | None]]:
        """Return what each hold held that has gone: the ids of the value and of the fork, as in `hold`."""
        taken = []
        while self.ended:
            try:
                note = self.ended.popleft()
            except IndexError:  # another thread does the same
                break
            self._notes.discard(note)
            taken.append(note.released)
        return taken

    def clear(self) -> None:
        """Note no more ends: the agent has ended."""
        self._notes.clear()
