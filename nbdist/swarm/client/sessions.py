"""The open sessions of a swarm: begins them, and tells the servers to drop a session when its cache is collected.

A session lasts as long as its cache on the client::

    the cache is collected ── its finaliser, in any thread ── id ──► thread "swarm settles" ── `over` ──► servers

The finaliser must not call servers: Python may collect garbage in the middle of any other call. The thread also tells
the swarm's directory, once a second at most, what this client has of the swarm.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from typing import Any

from nbdist.errors import EncodeError
from nbdist.swarm import model_cache
from nbdist.swarm.client.crew import Crew
from nbdist.swarm.client.journal import Journal
from nbdist.swarm.client.session import Session
from nbdist.swarm.directory.directory import Usage
from nbdist.swarm.policy import Recover, check_recover

_TELLING_SECONDS = 1.0  # between two times at which the directory is told what this client has

_BEGUN = ""  # in the place of an id: a session has begun


class Sessions:
    """The open sessions of a swarm. Any thread may use it."""

    def __init__(self, crew: Crew, journal: Journal) -> None:
        self.crew = crew
        self.policy = crew.policy
        self._journal = journal
        self._lock = threading.Lock()  # guards the set of sessions and the start of the thread
        self._open: weakref.WeakSet[Session] = weakref.WeakSet()
        self.endpoints: weakref.WeakSet[Any] = weakref.WeakSet()  # over HTTP, that have texts written
        # Ids of sessions whose caches are gone, and `_BEGUN`; None ends the thread.
        self._over: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._settler: threading.Thread | None = None
        weakref.finalize(self, self._over.put, None).atexit = False

    def __reduce__(self) -> Any:
        raise EncodeError(
            "a swarm and its models stay in their process: they cannot be sent, copied or saved. Call the model here, "
            "or save its `state_dict()`; another process can use the swarm by nbdist.swarm.connect(sw.address())"
        )

    def begin(
        self, cache: Any, begin: int = 0, end: int | None = None, *, expected: int = 0, recover: Recover | None = None
    ) -> Session:
        """Begin a session that lasts as long as ``cache``, as `nbdist.swarm.Swarm.session` describes."""
        self.crew.check_open()
        recover = self.way_to_recover(recover)
        recorded = model_cache.RecordedCache(cache, len(self.crew.sizes))
        end = len(self.crew.sizes) if end is None else end
        session = Session(
            self.crew, self._journal, recorded.empty, begin=begin, end=end, recover=recover, expected=expected
        )
        recorded.tell = session.note
        cache.nbdist = recorded, session
        with self._lock:
            self._open.add(session)
            if self._settler is None:
                self._settler = threading.Thread(
                    target=_close_sessions, args=(weakref.ref(self), self._over), name="swarm settles", daemon=True
                )
                self._settler.start()
        self._over.put(_BEGUN)
        # `SimpleQueue.put` is reentrant: Python may run this finaliser in the middle of another `put`.
        weakref.finalize(cache, self._over.put, session.id).atexit = False
        return session

    def way_to_recover(self, recover: Recover | None) -> Recover:
        """Return ``recover``; if it is None, the swarm's own value. Raise UsageError if it is not valid."""
        return check_recover(self.policy.recover if recover is None else recover)

    def open(self) -> list[Session]:
        """Return the sessions whose caches have not been collected, including those that refuse further steps."""
        with self._lock:
            return list(self._open)

    def usage(self) -> Usage:
        """Return what this client has of the swarm now, as JSON for maps; {} for nothing.

        ``sessions`` and ``texts`` (those written and those that wait, of its HTTP endpoints) are numbers, ``rate`` is
        in tokens a second, and ``cache`` the bytes that servers have reserved.
        """
        sessions = self.open()
        texts = [sum(each) for each in zip((0, 0), *(each.texts for each in list(self.endpoints)), strict=True)]
        counts = {"sessions": len(sessions), "cache": sum(each.cache for each in sessions), "texts": texts}
        return {"name": self.crew.name, "rate": self._journal.pace, **counts} if sessions or any(texts) else {}

    def over(self, session: str) -> None:
        """Tell all servers, without waiting, to drop the session with this id: its cache is gone, or it was closed."""
        self.crew.abandon(session)
        self._journal.news()

    def close(self) -> None:
        """End the thread that waits for caches to be collected."""
        self._over.put(None)


def _close_sessions(sessions: weakref.ref[Sessions], over: queue.SimpleQueue[str | None]) -> None:
    """Close sessions whose ids arrive on ``over``, until None arrives. The thread "swarm settles" runs this."""
    told: Usage = {}
    due, idle = 0.0, True  # when the directory may be told again; whether there is nothing to tell
    while True:
        session: str | None = _BEGUN
        with contextlib.suppress(queue.Empty):
            session = over.get(timeout=None if idle else max(0.0, due - time.monotonic()))
        # Weak while it waits: a swarm that nobody uses must end, and its thread with it.
        if session is None or (found := sessions()) is None:
            return
        idle = False
        with contextlib.suppress(Exception):  # an error must not end the thread: no further session would be closed
            if session != _BEGUN:
                found.over(session)
            if time.monotonic() >= due:
                due = time.monotonic() + _TELLING_SECONDS
                before, told = told, found.usage()
                idle = not told
                if told != before:
                    found.crew.note_usage(found.crew.incarnation, told)
        del found  # before the next wait
