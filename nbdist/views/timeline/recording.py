"""Records the work of a worker, with its times, for a `Timeline` of the notebook.

A recording subscribes to `nbdist.trace`, and only while somebody records. An event with a ``start`` stands for work
that began then and ends now. A call has two events, at the start and at the end of its function.
`nbdist.views.timeline.wording` names the calls in words that users know.

`begin`, `end` and `forget` are called on the worker by the timeline's process, in this order. If that process is lost
meanwhile, the worker drops the recording by itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from nbdist import trace
from nbdist.errors import UsageError
from nbdist.gpus import spans
from nbdist.gpus.spans import GpuSpan
from nbdist.rpc.api import current_agent
from nbdist.views.drawing.gantt import micro_batch_name
from nbdist.views.timeline.wording import name_call
from nbdist.wire.messages import Record

__all__ = ["EVENTS_KEPT", "Noted", "begin", "end", "forget"]

_GPU_WITHIN = 1.0
"""Seconds to wait for a GPU at the end of a recording."""
EVENTS_KEPT = 100_000
"""The number of events that a recording keeps; later ones are only counted."""


class Noted(NamedTuple):
    """A piece of work of an agent, with its times in seconds by the worker's own monotonic clock."""

    agent: str
    kind: str
    """One of `nbdist.views.drawing.gantt.KINDS`."""
    name: str
    start: float
    end: float
    thread: int
    text: str = ""
    """The text in the bar; if empty, the last part of the name."""
    gpu: float | None = None
    """Seconds on the stream of a GPU; None if the work is not known to have used one."""


def _micro_batch(fields: dict[str, Any]) -> tuple[str, str, str]:
    """Return three texts for a pipeline's forward or backward, from the fields of the event "micro_batch.ran".

    They are the kind, which chooses the colour; the full name; and the text in the bar, the micro-batch's number.
    """
    kind = "forward" if fields["kind"] == "F" else "backward"
    return kind, micro_batch_name(kind, fields["stage"], fields["micro_batch"]), str(fields["micro_batch"])


_NAMES: dict[str, Callable[[dict[str, Any]], tuple[str, str, str]]] = {
    "micro_batch.ran": _micro_batch,
    "segment.ran": lambda _: ("segment", "segment of a backward pass", "backward"),
    "optimizer.stepped": lambda fields: ("step", f"{fields['optimizer']}.step", fields["optimizer"]),
}
"""For each event with a ``start``: a function that returns the kind, name and text of its bar."""


class _Recording:
    """A recording under way in this process, from its creation until `stop` is called. Any thread may emit events.

    `stop` also calls ``unwatch``, which ends the watch of the timeline's agent.
    """

    def __init__(self, unwatch: Callable[[], None] = lambda: None) -> None:
        self.noted: list[Noted] = []
        self.lost = 0
        self._calls: dict[tuple[str, int, int], tuple[Noted, GpuSpan | None]] = {}
        """The calls under way, whose end is not known yet, by agent, thread and id."""
        self._gpu_seconds: dict[int, float] = {}
        """The seconds on a GPU of the pieces of work in `noted`, by the piece's id."""
        self._on_gpu: deque[tuple[Noted, GpuSpan]] = deque()
        """The pieces of work that a GPU had not finished when somebody last looked."""
        self._measuring = threading.Lock()
        self._unsubscribe = trace.subscribe(self._take)
        self._unwatch = unwatch

    def stop(self) -> None:
        """End the recording. A second call does nothing."""
        self._unsubscribe()
        self._unwatch()

    def _take(self, event: str, fields: dict[str, Any]) -> None:
        """Note the piece of work that an event of `nbdist.trace` stands for; called by the thread that emits it.

        A call is noted when it ends; a call that still runs at the end of the recording is left out. Events that a
        timeline does not draw are ignored.
        """
        now = time.monotonic()
        thread = threading.get_ident()
        if event == "call.run":
            named = name_call(fields["function"], fields["callee"], fields["args"])
            if named is not None:
                span = spans.begin(spans.device_of(fields["args"]))
                noted = Noted(fields["agent"], *named, start=time.monotonic(), end=0.0, thread=thread)
                self._calls[noted.agent, thread, fields["id"]] = noted, span
        elif event == "call.ran":
            if (begun := self._calls.pop((fields["agent"], thread, fields["id"]), None)) is not None:
                noted, span = begun
                if span is not None:
                    span.end()
                self._note(noted._replace(end=now), span)
        elif event in _NAMES:
            kind, name, text = _NAMES[event](fields)
            self._note(Noted(fields["agent"], kind, name, fields["start"], now, thread, text), fields["gpu"])

    def _note(self, noted: Noted, span: GpuSpan | None) -> None:
        """Keep a piece of work, with its span on a GPU, which has ended in the stream but maybe not on the GPU."""
        if len(self.noted) >= EVENTS_KEPT:
            self.lost += 1
            return
        self.noted.append(noted)
        if span is not None:
            self._on_gpu.append((noted, span))
            self._measure()

    def _measure(self, *, waits: bool = False) -> bool:
        """Note the GPU's times of the pieces that it has finished, in order; return whether it has finished all.

        Does not wait for the GPU. If another thread is doing this, waits for it, or returns False without ``waits``.
        """
        if not self._measuring.acquire(blocking=waits):
            return False
        try:
            while self._on_gpu:
                noted, span = self._on_gpu[0]
                if not span.is_over():
                    return False
                if (seconds := span.seconds) is not None:
                    self._gpu_seconds[id(noted)] = seconds
                self._on_gpu.popleft()
            return True
        finally:
            self._measuring.release()

    def of(self, agent: str) -> list[Noted]:
        """Return the pieces of work of one agent, with their times on a GPU.

        Waits a second at most for what the GPU still does; the times that are not known then are left out.
        """
        deadline = time.monotonic() + _GPU_WITHIN
        while not self._measure(waits=True) and time.monotonic() < deadline:
            time.sleep(0.01)
        return [one._replace(gpu=self._gpu_seconds.get(id(one))) for one in self.noted if one.agent == agent]


_recordings: dict[str, _Recording] = {}
_beginning = threading.Lock()
"""Held while `begin` adds a recording: a process with several agents is asked several times at once."""


def begin(key: str, home: int) -> None:
    """Begin to record under a key, the timeline's; does nothing if a recording of that key is under way.

    A worker runs this by RPC, from the notebook's `Timeline`. ``home`` is the incarnation of the timeline's agent. When
    the worker loses that agent, it drops the recording, for which nobody would ask any more.
    """
    agent = current_agent()
    with _beginning:
        if key in _recordings:
            return
        _recordings[key] = _Recording(agent.on_lost(partial(_on_lost, key, home)))
    if agent.member(home) is None:  # it was lost before this worker watched it
        forget(key)


def _on_lost(key: str, home: int, record: Record, _: str) -> None:
    """Drop a recording if the lost agent, ``record``, is its timeline's."""
    if record.incarnation == home:
        forget(key)


def end(key: str, agent: str) -> tuple[list[Noted], int]:
    """Return the pieces of work that a recording has noted of an agent, and the number of events that it dropped.

    A worker runs this by RPC when the timeline ends. Raises UsageError if the worker records nothing under ``key``. The
    recording continues until `forget`: if a process has several agents, each of them is asked.
    """
    recording = _recordings.get(key)
    if recording is None:
        raise UsageError("nothing is recorded on this worker: it started after the timeline. Record a new timeline")
    return recording.of(agent), recording.lost


def forget(key: str) -> None:
    """End a recording and drop it; does nothing if there is none.

    A worker runs this by RPC when the timeline has the events, or was collected.
    """
    recording = _recordings.pop(key, None)
    if recording is not None:
        recording.stop()
