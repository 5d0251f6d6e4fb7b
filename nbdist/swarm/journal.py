"""What has happened in a swarm, for whoever watches it: lines of text, and the session that writes."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.swarm.session import Session

__all__ = ["Journal"]

_log = logging.getLogger("nbdist.swarm")
_KEPT = 200
_SHOWN = 50
_RATE = 20
"""Steps over which the rate of a session is told."""
_PAUSE = 2.0
"""Seconds without a step after which a session is idle: between two steps its client computes."""


class Journal:
    """Tells its listeners that there is news, and has it for them."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=_KEPT)
        self._listeners: list[Callable[[], None]] = []
        self._session: weakref.ref[Session] | None = None
        """That which has taken a step last."""
        self._steps: deque[tuple[float, int]] = deque(maxlen=_RATE)
        """When its last were taken, and of how many tokens."""
        self._lock = threading.Lock()

    @property
    def lines(self) -> list[str]:
        """What has happened."""
        return [text for _, text in list(self._lines)]

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback()`` called, by whatever thread, when something has changed. Returns what ends that."""
        self._listeners.append(callback)

        def forget() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(callback)

        return forget

    def news(self) -> None:
        """Something has changed."""
        for listener in list(self._listeners):
            try:
                listener()
            except Exception:  # who has news is not to blame, and goes on
                _log.exception("a listener of a swarm failed")

    def tell(self, text: str) -> None:
        """Something has happened."""
        self._lines.append((time.time(), text))
        self.news()

    def stepped(self, session: Session, tokens: int) -> None:
        """A session has taken a step."""
        with self._lock:
            if self._session is None or self._session() is not session:
                self._session = weakref.ref(session)
                self._steps.clear()
            self._steps.append((time.monotonic(), tokens))
        self.news()

    def told(self) -> dict[str, Any]:
        """What a map shows of it."""
        lines = [[at, text] for at, text in list(self._lines)[-_SHOWN:]]
        with self._lock:
            session = self._session() if self._session is not None else None
            steps = list(self._steps)
        if session is None:
            return {"route": [], "session": None, "log": lines}
        elapsed = steps[-1][0] - steps[0][0]
        rate = sum(tokens for _, tokens in steps[1:]) / elapsed if elapsed else 0.0
        writes = session.state == "idle" and time.monotonic() - steps[-1][0] < _PAUSE
        state = "writing" if writes else session.state
        told = {"id": session.id, "tokens": session.tokens, "rate": round(rate, 1), "state": state}
        return {"route": [list(span) for span in session.route], "session": told, "log": lines}
