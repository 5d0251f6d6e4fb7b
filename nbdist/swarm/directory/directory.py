"""The servers of a swarm: one table, which the placer changes and all clients read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from nbdist.swarm.directory.entry import ServerEntry

News = tuple[int, list[ServerEntry]]
"""A version of the directory, and its entries."""


class Directory:
    """The entries by name of the worker, in the order in which the workers joined. Any thread may use it."""

    def __init__(self) -> None:
        self._entries: dict[str, ServerEntry] = {}
        self._changes = 1
        self._lock = threading.Lock()
        self._watchers: list[Callable[[News], object]] = []

    def watch(self, watcher: Callable[[News], object]) -> None:
        """Call ``watcher(news)`` now and after each change, in the thread that made it, until it returns False."""
        if watcher(self.news()) is not False:
            self._watchers.append(watcher)

    def _tell(self) -> None:
        news = self.news()
        for watcher in list(self._watchers):
            if watcher(news) is False:
                with contextlib.suppress(ValueError):  # another thread has removed it
                    self._watchers.remove(watcher)

    def all(self) -> list[ServerEntry]:
        """Return the entries. If a worker has had several servers, the last one."""
        with self._lock:
            return list(self._entries.values())

    def find(self, worker: str) -> ServerEntry | None:
        """Return the entry of the last server on a worker."""
        return self._entries.get(worker)

    def news(self) -> News:
        """Return what the directory has now."""
        with self._lock:
            return self._changes, list(self._entries.values())

    def add(self, entry: ServerEntry) -> None:
        """Add a new server, in place of an older one on its worker."""
        with self._lock:
            before = self._entries.pop(entry.name, None)  # so that the new server is the last one
            had = (before.blocks or before.had) if before is not None else ()
            self._entries[entry.name] = entry._replace(had=had)
            self._changes += 1
        self._tell()

    def change(self, entry: ServerEntry, change: Callable[[ServerEntry], ServerEntry]) -> ServerEntry | None:
        """Replace the entry of the same server by ``change`` of it; return the new one, None if it is not here now."""
        with self._lock:
            now = self._entries.get(entry.name)
            if now is None or now.address != entry.address:  # a newer server of the same worker
                return None
            if (changed := change(now)) == now:
                return now
            self._entries[entry.name] = changed
            self._changes += 1
        self._tell()
        return changed
