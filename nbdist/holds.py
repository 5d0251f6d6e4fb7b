"""Tells what has died, without running any Python code for that.

Python may collect an object at any moment, in any thread, with any lock held. A ``__del__`` or a callback in Python
could do little there; and Ctrl-C would cut it short, Python would swallow the Ctrl-C, and what should have been let go
of would be held for ever. So an object keeps a `Hold`, whose end adds a note to a queue, in C. Whoever has the time
asks `Holds` which have ended, and acts on it.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Generic, TypeVar

__all__ = ["Hold", "Holds"]

T = TypeVar("T")


class Hold:
    """Ends when nothing refers to it any more."""

    __slots__ = ("__weakref__", "note")

    note: _Note


class _Note(weakref.ref[Hold]):
    """Watches a `Hold`, and knows what was held."""

    __slots__ = ("held",)

    held: Any


class Holds(Generic[T]):
    """Holds, and what each of them held. All threads may use it."""

    def __init__(self) -> None:
        self.ended: deque[_Note] = deque()
        """The notes of holds that have ended, for `take_ended`; others only test whether it is empty."""
        self._notes: set[_Note] = set()
        """The notes of all holds: one that nobody keeps is told nothing."""

    def hold(self, held: T) -> Hold:
        """Return a new hold of ``held``."""
        hold = Hold()
        note = hold.note = _Note(hold, self.ended.append)
        note.held = held
        self._notes.add(note)
        return hold

    def forget(self, hold: Hold) -> None:
        """Never tell of the end of ``hold``."""
        self._notes.discard(hold.note)
        del hold.note

    def take_ended(self) -> list[T]:
        """Return what was held by the holds that have ended since this was last asked."""
        taken: list[T] = []
        while self.ended:
            try:
                note = self.ended.popleft()
            except IndexError:  # another thread does the same
                break
            self._notes.discard(note)
            taken.append(note.held)
        return taken

    def clear(self) -> None:
        """Tell of no end any more."""
        self._notes.clear()
