"""What a process did, and when, noted for a timeline: this is what runs on the workers.

It listens to `nbdist.trace` while somebody records, and only then. An event with a ``start`` is something that took
from then to now; a call is told of by two, when its function begins and when it has ended.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from nbdist import trace
from nbdist.errors import UsageError

__all__ = ["MOST", "Noted", "begin", "end", "forget"]

MOST = 100_000
"""So many are kept; what comes after is counted."""


class Noted(NamedTuple):
    """Something that took time on a worker, by its own clock."""

    agent: str
    kind: str
    name: str
    start: float
    end: float
    thread: int


_NAMES = {
    "micro_batch.ran": ("micro-batch", "{kind}{micro_batch} of stage {stage}"),
    "segment.ran": ("segment", "backward"),
    "optimizer.stepped": ("step", "{optimizer}.step"),
}


class _Recording:
    """One that is under way in this process."""

    def __init__(self) -> None:
        self.noted: list[Noted] = []
        self.lost = 0
        self._calls: dict[tuple[str, int, int], float] = {}
        self.stop = trace.subscribe(self._take)

    def _take(self, event: str, fields: dict[str, Any]) -> None:
        now = time.monotonic()
        thread = threading.get_ident()
        if event == "call.run":
            self._calls[fields["agent"], thread, fields["id"]] = now
        elif event == "call.ran":
            start = self._calls.pop((fields["agent"], thread, fields["id"]), None)
            if start is not None:
                self._note(Noted(fields["agent"], "call", fields["function"], start, now, thread))
        elif event in _NAMES:
            kind, name = _NAMES[event]
            self._note(Noted(fields["agent"], kind, name.format(**fields), fields["start"], now, thread))

    def _note(self, noted: Noted) -> None:
        if len(self.noted) < MOST:
            self.noted.append(noted)
        else:
            self.lost += 1


_recordings: dict[str, _Recording] = {}


def begin(key: str) -> None:
    """Note from now on."""
    if key not in _recordings:
        _recordings[key] = _Recording()


def end(key: str, agent: str) -> tuple[list[Noted], int]:
    """What has been noted of an agent, and how much more there was; a recording goes on that is asked for again."""
    recording = _recordings.get(key)
    if recording is None:
        raise UsageError("nothing is recorded here: the worker has come later than the recording")
    return [noted for noted in recording.noted if noted.agent == agent], recording.lost


def forget(key: str) -> None:
    """Note nothing more."""
    recording = _recordings.pop(key, None)
    if recording is not None:
        recording.stop()
