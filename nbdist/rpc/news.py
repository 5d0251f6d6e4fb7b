"""Tells whoever shows a reference that there is news of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from nbdist.ids import GlobalId

__all__ = ["News"]

_log = logging.getLogger("nbdist.rpc")


class News:
    """Tells listeners what becomes of the values and forks of one agent."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._watched: dict[GlobalId, list[Callable[[], None]]] = {}

    def when_changed(self, ids: Sequence[GlobalId], then: Callable[[], None]) -> Callable[[], None]:
        """Call ``then`` with each news of a value or fork among ``ids``; returns a function that ends that.

        It is called by whatever thread has the news, and must not block.
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
        """Say that there is news of a value or fork, or, without an id, of all."""
        if not self._watched:
            return
        with self._lock:
            of = [id] if id is not None else [*self._watched]
            found = [then for each in of for then in self._watched.get(each, ())]
        for then in found:
            try:
                then()
            except Exception:  # what shows a reference must not keep the news from those who use it
                _log.exception("a reference could not be shown")
