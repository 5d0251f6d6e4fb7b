"""Limits how many views of one kind are live: the one shown longest ago becomes a picture."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Protocol

__all__ = ["LiveViews"]


class _Shows(Protocol):
    """A view of references that belong to an agent."""

    home: int
    """The agent's incarnation."""

    def freeze(self) -> None:
        """Close the widget, so that only a picture of the facts as they are known now stays on the page.

        `LiveViews` calls this, without its lock, when there are too many live views.
        """

    def leave(self) -> None:
        """Show that the cluster has ended, and close the widget, so that only a picture stays on the page.

        Called before the cluster ends.
        """


class LiveViews:
    """Keeps the live views of one kind, ``most`` at most, in the order in which they were last shown. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._views: OrderedDict[int, _Shows] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._views)

    def keep(self, view: _Shows) -> None:
        """Keep a view as the one shown last; turn the views shown longest ago into pictures if there are too many.

        That is done without the lock, in the calling thread.
        """
        with self._lock:
            self._views[id(view)] = view
            self._views.move_to_end(id(view))
            surplus = list(self._views.values())[: max(0, len(self._views) - self._most)]
        for old in surplus:
            old.freeze()

    def drop(self, view: _Shows) -> None:
        """Forget a view; does nothing if it is not kept."""
        with self._lock:
            self._views.pop(id(view), None)

    def leave(self, home: int) -> None:
        """Turn all views of one agent, given by its incarnation, into pictures that say that its cluster has ended.

        Called before the cluster ends; views of other agents stay live.
        """
        with self._lock:
            own = [view for view in self._views.values() if view.home == home]
        for view in own:
            view.leave()
