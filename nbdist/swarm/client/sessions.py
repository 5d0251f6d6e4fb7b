"""The open sessions of a swarm: begins them, and tells the servers to drop a session when its cache is collected.

A session lasts as long as its cache on the client::

    the cache is collected ── its finaliser, in any thread ── id ──► thread "swarm settles" ── `over` ──► servers

The finaliser must not call servers: Python may collect garbage in the middle of any other call.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from typing import Any

from nbdist.errors import EncodeError
from nbdist.swarm import model_cache
from nbdist.swarm.client.crew import Crew
from nbdist.swarm.client.journal import Journal
from nbdist.swarm.client.session import Session
from nbdist.swarm.policy import Recover, check_recover


class Sessions:
    """The open sessions of a swarm. Any thread may use it."""

    def __init__(self, crew: Crew, journal: Journal) -> None:
        self.crew = crew
        self.policy = crew.policy
        self._journal = journal
        self._lock = threading.Lock()  # guards the set of sessions and the start of the thread
        self._open: weakref.WeakSet[Session] = weakref.WeakSet()
        # Ids of sessions whose caches are gone; None ends the thread.
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

    def over(self, session: str) -> None:
        """Tell all servers, without waiting, to drop the session with this id: its cache is gone, or it was closed."""
        self.crew.abandon(session)
        self._journal.news()

    def close(self) -> None:
        """End the thread that waits for caches to be collected."""
        self._over.put(None)


def _close_sessions(sessions: weakref.ref[Sessions], over: queue.SimpleQueue[str | None]) -> None:
    """Close sessions whose ids arrive on ``over``, until None arrives. The thread "swarm settles" runs this."""
    while (session := over.get()) is not None:
        # Weak while it waits: a swarm that nobody uses must end, and its thread with it.
        if (found := sessions()) is None:
            return
        with contextlib.suppress(Exception):  # an error must not end the thread: no further session would be closed
            found.over(session)
        del found  # before the next wait
