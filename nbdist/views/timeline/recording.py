"""Records the work of a worker, with its times, for a `Timeline` of the notebook.

A recording subscribes to `nbdist.trace`, and only while somebody records. An event with a ``start`` stands for work
that began then and ends now. A call has two events, at the start and at the end of its function.
`nbdist.views.timeline.wording` names the calls in words that users know.

The timeline's process calls `begin` on the worker, and later a method of the `WorkRecording`, which has a name there.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import dropwhile
from typing import Any, NamedTuple

from nbdist import trace
from nbdist.cluster.worker.flight_recorder import CollectiveCalls, calls_since
from nbdist.code_places import is_nbdists, is_users
from nbdist.gpus import spans
from nbdist.gpus.spans import GpuSpan
from nbdist.rpc.api import current_agent
from nbdist.rpc.here import here
from nbdist.thread_frames import lines_of
from nbdist.views.drawing.gantt import micro_batch_name
from nbdist.views.timeline.taps import taps
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
    place: str = ""  # the user's line, such as ``In[3]:2``
    call: tuple[int, int] | None = None  # the caller's incarnation, and its number of the call
    sending: float | None = None  # seconds from the caller's call until the work began


class Recorded(NamedTuple):
    """The result of a worker's recording."""

    noted: list[Noted]
    lost: int
    """The number of events that were dropped."""
    sent: dict[tuple[int, int], float]
    """When the worker began each call that it has sent, as in `Noted.call`."""
    calls: CollectiveCalls


# For each event with a ``start``: a function that returns the kind, name and text of its bar. Events
# without an agent tell what torch does: for the user's code, or for nbdist's, which has a bar of its own.
_NAMES: dict[str, Callable[[dict[str, Any]], tuple[str, str, str]]] = {
    "micro_batch.ran": lambda fields: (
        fields["kind"],
        micro_batch_name(fields["kind"], fields["stage"], fields["micro_batch"]),
        str(fields["micro_batch"]),
    ),
    "segment.ran": lambda _: ("segment", "segment of a backward pass", "backward"),
    "optimizer.stepped": lambda fields: ("step", f"{fields['optimizer']}.step", fields["optimizer"]),
    "cell.ran": lambda fields: ("cell", fields["cell"], ""),
    "pass.ran": lambda _: ("pass", "local backward pass", "backward"),
    "data.loaded": lambda _: ("load", "next batch of a DataLoader", "data"),
}


class WorkRecording:
    """A recording of an agent's work, from its creation until it is finished. Any thread may emit events.

    It is published under ``name``, and lives as long as it is subscribed to the events. If the timeline's agent, which
    has the incarnation ``home``, is lost, nobody would ask for it any more, and it stops.
    """

    def __init__(self, name: str, home: int) -> None:
        agent = current_agent()
        self._me, self._agent = agent.me, agent.me.name
        self.noted: list[Noted] = []
        self.lost = 0
        self._sent: dict[tuple[int, int], float] = {}
        self._calls: dict[tuple[int, int], tuple[Noted, GpuSpan | None]] = {}  # under way, by thread and id
        self._gpu_seconds: dict[int, float] = {}  # of pieces of work in `noted`, by their `id`
        self._on_gpu: deque[tuple[Noted, GpuSpan]] = deque()  # that a GPU had not finished at the last look
        self._measuring = threading.Lock()
        self._since = time.monotonic()
        self._unsubscribe = trace.subscribe(self._take)
        taps.open()
        self._close_taps = weakref.finalize(self, taps.close)  # once, however often `stop` is called
        self._unwatch = agent.on_lost(lambda lost, _: self.stop() if lost.incarnation == home else None)
        self._withdraw = partial(agent.named.withdraw, name)
        agent.named.publish(name, self, "finish", "stop")

    def stop(self) -> None:
        """End the recording, and drop it. A second call does nothing."""
        self._unsubscribe()
        self._close_taps()
        self._unwatch()
        self._withdraw()

    def _take(self, event: str, fields: dict[str, Any]) -> None:
        """Note the piece of work that an event of `nbdist.trace` stands for. The event's thread calls this."""
        # Agents of one process share `nbdist.trace`. An event of torch's is of the agent for which its thread acts.
        if fields.get("agent", getattr(here.agent, "me", self._me).name) != self._agent:
            return
        now = time.monotonic()
        thread = threading.get_ident()
        if event == "call.run":
            if (named := name_call(fields["function"], fields["callee"], fields["args"])) is not None:
                span = spans.begin(spans.device_of(fields["args"]))
                call = fields["caller"], fields["id"]
                noted = Noted(self._agent, *named, start=time.monotonic(), end=0.0, thread=thread, call=call)
                self._calls[thread, fields["id"]] = noted, span
        elif event == "call.ran":  # a call without this event still runs at the end of the recording, and is left out
            if (begun := self._calls.pop((thread, fields["id"]), None)) is not None:
                noted, span = begun
                if span is not None:
                    span.end()
                self._note(noted._replace(end=now), span)
        elif event == "call.sent" and len(self._sent) < EVENTS_KEPT:
            self._sent[self._me.incarnation, fields["id"]] = fields["started"]
        elif event in _NAMES:
            place = "" if "agent" in fields else _users_place()
            if place or "agent" in fields:
                kind, name, text = _NAMES[event](fields)
                noted = Noted(self._agent, kind, name, fields["start"], now, thread, text, place=place)
                self._note(noted, fields.get("gpu"))

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

    def finish(self) -> Recorded:
        """End the recording; return the pieces of work, with their times on a GPU, and the collectives."""
        output, now = current_agent().named.find("output"), time.monotonic()
        for cell, start in output.running if output is not None else ():
            self._note(Noted(self._agent, "cell", f"{cell}, which goes on", start, now, 0, cell), None)
        self.stop()
        deadline = time.monotonic() + _GPU_WITHIN
        while not self._measure(waits=True) and time.monotonic() < deadline:  # later times are left out
            time.sleep(0.01)
        noted = [one._replace(gpu=self._gpu_seconds.get(id(one))) for one in self.noted]
        return Recorded(noted, self.lost, self._sent, calls_since(self._since))


def _users_place() -> str:
    """Return the line of the user's code that has called what emits an event; empty if nbdist's code has called it."""
    outside = dropwhile(lambda line: _is_of_user(line.file) is False, lines_of(sys._getframe()))
    line = next((line for line in outside if _is_of_user(line.file) is not None), None)
    return line.place if line is not None and _is_of_user(line.file) else ""


@lru_cache(maxsize=1024)  # a step of a training asks for its frames' files each time
def _is_of_user(file: str) -> bool | None:
    """Return whether a file is the user's; None if it is neither the user's nor nbdist's."""
    return is_users(file) or (False if is_nbdists(file) else None)


_beginning = threading.Lock()  # held while `begin` makes a recording


def begin(name: str, home: int) -> None:
    """Begin a `WorkRecording` for the agent ``home``, an incarnation, unless there is one of that name."""
    agent = current_agent()
    with _beginning:
        recording = agent.named.find(name) or WorkRecording(name, home)
    if agent.member(home) is None:  # it was lost before this worker watched it
        recording.stop()
