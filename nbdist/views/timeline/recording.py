"""Records the work of a worker, with its times, for a `Timeline` of the notebook.

A recording subscribes to `nbdist.trace`, and only while somebody records. An event with a ``start`` stands for work
that began then and ends now. A call has two events, at the start and at the end of its function.
`nbdist.views.timeline.wording` names the calls in words that users know.

The timeline's process calls `begin` on the worker, and later a method of the `WorkRecording`, which has a name there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from nbdist import trace
from nbdist.gpus import spans
from nbdist.gpus.spans import GpuSpan
from nbdist.rpc.api import current_agent
from nbdist.views.drawing.gantt import micro_batch_name
from nbdist.views.timeline.wording import name_call

_GPU_WITHIN = 1.0  # seconds to wait for a GPU at the end of a recording
EVENTS_KEPT = 100_000  # by one recording; later events are only counted


class Noted(NamedTuple):
    """A piece of work of an agent, with its times in seconds by the worker's own monotonic clock."""

    agent: str
    kind: str  # one of `nbdist.views.drawing.gantt.KINDS`
    name: str
    start: float
    end: float
    thread: int
    text: str = ""  # in the bar; if empty, the last part of the name
    gpu: float | None = None  # seconds on the stream of a GPU; None if the work is not known to have used one


# For each event with a ``start``: a function that returns the kind, name and text of its bar.
_NAMES: dict[str, Callable[[dict[str, Any]], tuple[str, str, str]]] = {
    "micro_batch.ran": lambda fields: (
        fields["kind"],
        micro_batch_name(fields["kind"], fields["stage"], fields["micro_batch"]),
        str(fields["micro_batch"]),
    ),
    "segment.ran": lambda _: ("segment", "segment of a backward pass", "backward"),
    "optimizer.stepped": lambda fields: ("step", f"{fields['optimizer']}.step", fields["optimizer"]),
}


class WorkRecording:
    """A recording of an agent's work, from its creation until it is finished. Any thread may emit events.

    It is published under ``name``, and lives as long as it is subscribed to the events. If the timeline's agent, which
    has the incarnation ``home``, is lost, nobody would ask for it any more, and it stops.
    """

    def __init__(self, name: str, home: int) -> None:
        agent = current_agent()
        self._agent = agent.me.name
        self.noted: list[Noted] = []
        self.lost = 0
        self._calls: dict[tuple[int, int], tuple[Noted, GpuSpan | None]] = {}  # under way, by thread and id
        self._gpu_seconds: dict[int, float] = {}  # of pieces of work in `noted`, by their `id`
        self._on_gpu: deque[tuple[Noted, GpuSpan]] = deque()  # that a GPU had not finished at the last look
        self._measuring = threading.Lock()
        self._unsubscribe = trace.subscribe(self._take)
        self._unwatch = agent.on_lost(lambda lost, _: self.stop() if lost.incarnation == home else None)
        self._withdraw = partial(agent.named.withdraw, name)
        agent.named.publish(name, self, "finish", "stop")

    def stop(self) -> None:
        """End the recording, and drop it. A second call does nothing."""
        self._unsubscribe()
        self._unwatch()
        self._withdraw()

    def _take(self, event: str, fields: dict[str, Any]) -> None:
        """Note the piece of work that an event of `nbdist.trace` stands for. The event's thread calls this."""
        if fields.get("agent") != self._agent:  # agents of one process share `nbdist.trace`
            return
        now = time.monotonic()
        thread = threading.get_ident()
        if event == "call.run":
            if (named := name_call(fields["function"], fields["callee"], fields["args"])) is not None:
                span = spans.begin(spans.device_of(fields["args"]))
                noted = Noted(self._agent, *named, start=time.monotonic(), end=0.0, thread=thread)
                self._calls[thread, fields["id"]] = noted, span
        elif event == "call.ran":  # a call without this event still runs at the end of the recording, and is left out
            if (begun := self._calls.pop((thread, fields["id"]), None)) is not None:
                noted, span = begun
                if span is not None:
                    span.end()
                self._note(noted._replace(end=now), span)
        elif event in _NAMES:
            kind, name, text = _NAMES[event](fields)
            self._note(Noted(self._agent, kind, name, fields["start"], now, thread, text), fields["gpu"])

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
        """Note the GPU's times of the pieces that it has finished, in order; return whether it has finished all."""
        # Another thread may do this now. `finish` waits for it, so that no time is left out that is being read.
        if not self._measuring.acquire(blocking=waits):
            return False
        try:
            while self._on_gpu:
                noted, span = self._on_gpu[0]
                if not span.is_over():  # never wait for it here: this thread runs the user's work
                    return False
                if (seconds := span.seconds) is not None:
                    self._gpu_seconds[id(noted)] = seconds
                self._on_gpu.popleft()
            return True
        finally:
            self._measuring.release()

    def finish(self) -> tuple[list[Noted], int]:
        """End the recording; return the pieces of work, with their times on a GPU, and the number of events dropped."""
        self.stop()
        deadline = time.monotonic() + _GPU_WITHIN
        while not self._measure(waits=True) and time.monotonic() < deadline:  # later times are left out
            time.sleep(0.01)
        return [one._replace(gpu=self._gpu_seconds.get(id(one))) for one in self.noted], self.lost


_beginning = threading.Lock()  # held while `begin` makes a recording


def begin(name: str, home: int) -> None:
    """Begin a `WorkRecording` for the agent ``home``, an incarnation, unless there is one of that name."""
    agent = current_agent()
    with _beginning:
        recording = agent.named.find(name) or WorkRecording(name, home)
    if agent.member(home) is None:  # it was lost before this worker watched it
        recording.stop()
