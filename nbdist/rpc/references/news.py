"""Tells displays of a reference that its state has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from nbdist.ids import GlobalId

_log = logging.getLogger("nbdist.rpc")


class News:
    """Calls listeners when a value or fork of one agent changes."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._watched: dict[GlobalId, list[Callable[[], None]]] = {}

    def when_changed(self, ids: Sequence[GlobalId], then: Callable[[], None]) -> Callable[[], None]:
        """Call ``then`` whenever a value or fork among ``ids`` changes; return a function that removes the listener.

        ``then`` runs in the thread that handles the change, and must not block.
        """
        with self._lock:
            for id in ids:
                self._watched.setdefault(id, []).append(then)

        def end() -> None:
            with self._lock:
                for id in ids:
                    left = [other for other in self._watched.pop(id, ()) if other is not then]
                    if left:
                        self._watched[id] = left

        return end

    def tell(self, id: GlobalId | None = None) -> None:
        """Call the listeners of a value or fork; without an id, all listeners. The caller does not hold the lock."""
        if not self._watched:
            return
        with self._lock:
            of = [id] if id is not None else [*self._watched]
            found = [then for each in of for then in self._watched.get(each, ())]
        for then in found:
            try:
                then()
            except Exception:  # an error in a display must not affect the threads that use the reference
                _log.exception("a reference could not be shown")
