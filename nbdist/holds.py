"""Reports which objects have been collected, without running any Python code at that moment.

Python may collect an object at any moment, in any thread, while any lock is held. A ``__del__`` or a callback in Python
may do little there. Besides, Ctrl-C could interrupt it: Python would swallow the Ctrl-C, and the object's resources
would never be released. So an object keeps a `Hold`. When Python collects the hold, C code adds a note to a queue.
Later, a thread that may run any code asks `Holds` which holds have ended, and releases their resources.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Hold:
    """An object that ends when nothing refers to it any more. `Holds.hold` makes it."""

    __slots__ = ("__weakref__", "note")

    note: _Note


class _Note(weakref.ref[Hold]):
    """A weak reference to a `Hold`, together with the held object."""

    __slots__ = ("held",)

    held: Any


class Holds(Generic[T]):
    """A group of holds, each with its held object. Any thread may use it."""

    def __init__(self) -> None:
        self.ended: deque[_Note] = deque()
        """The notes of holds that have ended, for `take_ended`. Other code only tests whether it is empty."""
        # Python reports nothing if a hold and its note are collected together, in a cycle: so the notes live here.
        self._notes: set[_Note] = set()

    def hold(self, held: T) -> Hold:
        """Return a new `Hold`, an object that the caller keeps as long as ``held`` is needed.

        Once the `Hold` has been garbage-collected, `take_ended` returns ``held``. Until then, ``held`` stays alive.
        """
        hold = Hold()
        note = hold.note = _Note(hold, self.ended.append)  # C code: no Python code runs when the hold is collected
        note.held = held
        self._notes.add(note)
        return hold

    def forget(self, hold: Hold) -> None:
        """Drop the held object of ``hold``: `take_ended` will not return it. A second call raises AttributeError."""
        self._notes.discard(hold.note)
        del hold.note

    def take_ended(self) -> list[T]:
        """Return the held objects of the holds that were collected since the last call: each once, to one thread."""
        taken: list[T] = []
        while self.ended:
            try:
                note = self.ended.popleft()
            except IndexError:  # another thread took the last one
                break
            self._notes.discard(note)
            taken.append(note.held)
        return taken

    def clear(self) -> None:
        """Stop reporting the holds made so far. `take_ended` may still return some of their held objects."""
        self._notes.clear()
