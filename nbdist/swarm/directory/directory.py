"""The servers of a swarm, and what its clients have of it: one table, which all clients read."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nbdist.swarm.directory.entry import ServerEntry
from nbdist.swarm.server.neighbours import Address

_log = logging.getLogger("nbdist.swarm")
Usage = dict[str, Any]
"""A client's ``name`` and its `USAGE` of the swarm, as `Sessions.usage` makes it: JSON for maps; {} for none."""
USAGE = ("sessions", "cache", "rate", "texts")


class Term(NamedTuple):
    """The time of one placer. A later term is larger; of two placers with one number, one is larger, too."""

    number: int
    incarnation: int  # of the placer's agent


class SwarmNews(NamedTuple):
    """The contents of the directory at one moment. Newer news are larger."""

    term: Term
    changes: int
    placer: Address
    entries: Sequence[ServerEntry]
    clients: Sequence[Address]
    usage: Mapping[int, Usage]  # by the incarnations of the clients' agents

    def for_outside(self) -> SwarmNews:
        """Return these news for a client on another host, which hears nothing of other clients."""
        return self._replace(clients=(), usage={})

    def is_newer(self, other: SwarmNews | None) -> bool:
        """Return whether these news are newer than other news, or there are no others."""
        return other is None or self[:2] > other[:2]


class Directory:
    """The entries by name of the worker, in the order in which the workers joined. Any thread may use it."""

    def __init__(self, placer: Address, term: Term) -> None:
        self._placer, self._term = placer, term
        self._entries: dict[str, ServerEntry] = {}
        self._clients: dict[Address, None] = {}  # a set with an order
        self._usage: dict[int, Usage] = {}  # of those that have anything
        self._changes = 1
        self._lock = threading.Lock()
        self._watchers: list[Callable[[SwarmNews], object]] = []

    def watch(self, watcher: Callable[[SwarmNews], object]) -> None:
        """Call ``watcher(news)`` now and after each change, in the thread that made it, until it returns False.

        Its errors are logged. News of two threads may overtake each other: see `SwarmNews.is_newer`.
        """
        self._watchers.append(watcher)  # first: it must hear of a change that another thread makes meanwhile
        self._call(watcher, self.news())

    def _tell(self) -> None:
        news = self.news()
        for watcher in list(self._watchers):
            self._call(watcher, news)

    def _call(self, watcher: Callable[[SwarmNews], object], news: SwarmNews) -> None:
        try:
            is_over = watcher(news) is False
        except Exception:  # neither the thread that made the change nor the other clients have caused it
            _log.exception("a client of a swarm could not be told of its servers")
            return
        if is_over:
            with contextlib.suppress(ValueError):  # another thread has removed it
                self._watchers.remove(watcher)

    def all(self) -> list[ServerEntry]:
        """Return the entries. If a worker has had several servers, the last one."""
        with self._lock:
            return list(self._entries.values())

    def find(self, worker: str) -> ServerEntry | None:
        """Return the entry of the last server on a worker."""
        return self._entries.get(worker)

    def news(self) -> SwarmNews:
        """Return what the directory has now."""
        with self._lock:
            entries, clients = list(self._entries.values()), list(self._clients)
            return SwarmNews(self._term, self._changes, self._placer, entries, clients, self._usage.copy())

    def _contents(self) -> tuple[object, ...]:
        return self._entries.copy(), self._clients.copy(), self._usage.copy()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Return a context manager for changes; the watchers hear of those that made a difference."""
        with self._lock:
            before = self._contents()
            yield
            if self._contents() == before:
                return
            self._changes += 1
        self._tell()

    def change_all(self, change: Callable[[ServerEntry], ServerEntry]) -> None:
        """Replace each entry by ``change`` of it, in one step: nobody hears of a part of the change alone."""
        with self._changing():
            self._entries = {name: change(entry) for name, entry in self._entries.items()}

    def reset(
        self, entries: Sequence[ServerEntry], clients: Sequence[Address], usage: Mapping[int, Usage] | None = None
    ) -> None:
        """Replace the entries by those of another directory, and add its clients, and what they have."""
        with self._changing():
            self._entries = {entry.name: entry for entry in entries}
            self._clients |= dict.fromkeys(clients)
            self._usage = {**(usage or {}), **self._usage}

    def enter(self, client: Address) -> None:
        """Add a client of the swarm; does nothing if it is here already."""
        with self._changing():
            self._clients[client] = None

    def leave(self, client: Address) -> bool:
        """Remove a client; return whether no client is left."""
        with self._changing():
            self._clients.pop(client, None)
        return not self._clients

    def note_usage(self, client: int, usage: Usage) -> None:
        """Note what a client, known by its incarnation or by a negative number of its door, has now."""
        with self._changing():
            self._usage.pop(client, None)
            self._usage |= {client: usage} if usage else {}

    def add(self, entry: ServerEntry) -> None:
        """Add a new server, in place of an older one on its worker."""
        with self._changing():
            before = self._entries.pop(entry.name, None)  # so that the new server is the last one
            had = (before.blocks or before.had) if before is not None else ()
            self._entries[entry.name] = entry._replace(had=had)

    def change(self, entry: ServerEntry, change: Callable[[ServerEntry], ServerEntry]) -> ServerEntry | None:
        """Replace the entry of the same server by ``change`` of it; return the new one, None if it is not here now."""
        with self._changing():
            now = self._entries.get(entry.name)
            if now is None or now.address != entry.address:  # a newer server of the same worker
                return None
            self._entries[entry.name] = changed = change(now)
        return changed
