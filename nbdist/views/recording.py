"""What a process did, and when, noted for a timeline: this is what runs on the workers.

It listens to `nbdist.trace` while somebody records, and only then. An event with a ``start`` is something that took
from then to now; a call is told of by two, when its function begins and when it has ended. What is noted has a name
that its user knows: `nbdist.views.wording`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from nbdist import trace
from nbdist.errors import UsageError
from nbdist.nn.charts import micro_batch_name
from nbdist.views.wording import name_call

__all__ = ["MOST", "Noted", "begin", "end", "forget"]

MOST = 100_000
"""So many are kept; what comes after is counted."""


class Noted(NamedTuple):
    """Something that took time on a worker, by its own clock."""

    agent: str
    kind: str
    """One of `nbdist.nn.charts.KINDS`."""
    name: str
    start: float
    end: float
    thread: int
    text: str = ""
    """What stands in its bar, if not the end of its name."""


def _micro_batch(fields: dict[str, Any]) -> tuple[str, str, str]:
    kind = "forward" if fields["kind"] == "F" else "backward"
    return kind, micro_batch_name(kind, fields["stage"], fields["micro_batch"]), str(fields["micro_batch"])


_NAMES: dict[str, Callable[[dict[str, Any]], tuple[str, str, str]]] = {
    "micro_batch.ran": _micro_batch,
    "segment.ran": lambda _: ("segment", "segment of a backward pass", "backward"),
    "optimizer.stepped": lambda fields: ("step", f"{fields['optimizer']}.step", fields["optimizer"]),
}
"""The kind, name and text of what an event tells of."""


class _Recording:
    """One that is under way in this process."""

    def __init__(self) -> None:
        self.noted: list[Noted] = []
        self.lost = 0
        self._calls: dict[tuple[str, int, int], tuple[str, str, float]] = {}
        self.stop = trace.subscribe(self._take)

    def _take(self, event: str, fields: dict[str, Any]) -> None:
        now = time.monotonic()
        thread = threading.get_ident()
        if event == "call.run":
            named = name_call(fields["function"], fields["callee"], fields["args"])
            if named is not None:
                self._calls[fields["agent"], thread, fields["id"]] = (*named, time.monotonic())
        elif event == "call.ran":
            begun = self._calls.pop((fields["agent"], thread, fields["id"]), None)
            if begun is not None:
                kind, name, start = begun
                self._note(Noted(fields["agent"], kind, name, start, now, thread))
        elif event in _NAMES:
            kind, name, text = _NAMES[event](fields)
            self._note(Noted(fields["agent"], kind, name, fields["start"], now, thread, text))

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
