"""The views of one kind that are live: at most so many, of which the one shown longest ago becomes a picture."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Protocol

__all__ = ["Live"]


class _Shows(Protocol):
    """A view of what belongs to an agent."""

    home: int
    """The agent's incarnation."""

    def freeze(self) -> None:
        """Be a picture from now on, of what is known now."""

    def leave(self) -> None:
        """Be a picture from now on, which says that the cluster has ended."""


class Live:
    """Keeps live views; any thread may call."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._views: OrderedDict[int, _Shows] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._views)

    def keep(self, view: _Shows) -> None:
        """Keep a view, as the one that was shown last."""
        with self._lock:
            self._views[id(view)] = view
            self._views.move_to_end(id(view))
            surplus = list(self._views.values())[: max(0, len(self._views) - self._most)]
        for old in surplus:
            old.freeze()

    def drop(self, view: _Shows) -> None:
        """Keep a view no longer; it may have been dropped before."""
        with self._lock:
            self._views.pop(id(view), None)

    def leave(self, home: int) -> None:
        """Have all views of an agent, by its incarnation, say that its cluster has ended."""
        with self._lock:
            own = [view for view in self._views.values() if view.home == home]
        for view in own:
            view.leave()
