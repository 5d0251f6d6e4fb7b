"""The log of a swarm and its last session, which a map shows, and the listeners that are called on changes."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("nbdist.swarm")
_LINES_KEPT = 200
_LINES_SHOWN = 50  # on a map
_RATE_STEPS = 20  # steps over which the tokens per second of a session are measured
_PACE_SECONDS = 2.0  # over which those of all sessions are measured
_PACE_STEPS = 2000  # in that time, at most
# Seconds without a step after which a session is shown as idle: between two steps its client computes a moment.
_IDLE_SECONDS = 2.0


class Journal:
    """Keeps the log and the last session of a swarm, and calls listeners when something changes. Thread-safe."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=_LINES_KEPT)
        self._listeners: list[Callable[[], None]] = []
        # Describes the session that took the last step.
        self._session: Callable[[], Callable[[], dict[str, Any]] | None] = lambda: None
        # The time and the number of tokens of each of that session's last steps.
        self._steps: deque[tuple[float, int]] = deque(maxlen=_RATE_STEPS)
        # The time and the number of tokens, of all sequences, of the last steps of all sessions; without the first step
        # of each session, which reads the prompt.
        self._written: deque[tuple[float, int]] = deque(maxlen=_PACE_STEPS)
        self._lock = threading.Lock()

    @property
    def lines(self) -> list[str]:
        """The last lines of the log, 200 at most, oldest first, without their times."""
        return [text for _, text in list(self._lines)]

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback()`` on every change, in the thread that made it; return a function that removes the callback.

        ``callback`` must be quick; its errors are logged.
        """
        self._listeners.append(callback)

        def forget() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(callback)

        return forget

    def news(self) -> None:
        """Call all listeners. Their errors are logged."""
        for listener in list(self._listeners):
            try:
                listener()
            except Exception:  # the user's function: the thread that made the change has not caused its error
                _log.exception("a listener of a swarm, such as its map, failed")

    def tell(self, text: str) -> None:
        """Append a line to the log, and call all listeners."""
        self._lines.append((time.time(), text))
        self.news()

    def stepped(self, told: Callable[[], dict[str, Any]], tokens: int, rows: int) -> None:
        """Record that a session has taken a step of ``tokens`` new tokens of ``rows`` sequences; call all listeners.

        ``told`` is the session's method `nbdist.swarm.client.session.Session.told`.
        """
        with self._lock:
            if self._session() != told:
                self._session = weakref.WeakMethod(told)
                self._steps.clear()  # the rate is of one session
            self._steps.append((time.monotonic(), tokens))
            if told()["tokens"] > tokens:
                self._written.append((time.monotonic(), tokens * rows))
        self.news()

    @property
    def pace(self) -> float:
        """The tokens that all sessions write in a second, as of the last two seconds."""
        since = time.monotonic() - _PACE_SECONDS
        with self._lock:
            return round(sum(tokens for at, tokens in self._written if at > since) / _PACE_SECONDS, 1)

    def told(self) -> dict[str, Any]:
        """Return the data for a map: ``route`` and ``session`` of the session that took the last step, and the ``log``.

        ``route`` has a list [server, begin, end] for each span. ``session`` is a dict of its id, tokens, rate (tokens
        per second) and state. ``session`` is None, and ``route`` is empty, before the first step and after the session
        was garbage-collected. ``log`` has the last 50 lines, each as [seconds since 1970, text].
        """
        lines = [[at, text] for at, text in list(self._lines)[-_LINES_SHOWN:]]
        with self._lock:
            told, steps = self._session(), list(self._steps)
        if told is None:
            return {"route": [], "session": None, "log": lines}
        elapsed = steps[-1][0] - steps[0][0]  # the first step's tokens do not count: they were computed before it
        rate = sum(tokens for _, tokens in steps[1:]) / elapsed if elapsed else 0.0
        session = told()
        if session["state"] == "idle" and time.monotonic() - steps[-1][0] < _IDLE_SECONDS:
            session["state"] = "writing"
        return {"route": session.pop("route"), "session": {**session, "rate": round(rate, 1)}, "log": lines}
