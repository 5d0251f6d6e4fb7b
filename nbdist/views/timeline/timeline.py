"""Records the work of each worker with its times; shows it as a picture in the notebook, or as a file for Perfetto.

    with cluster.timeline() as timeline:
        …
    timeline                      # a picture with lanes by worker
    timeline.save("step.json")    # for ui.perfetto.dev

All times are on this process's clock. Workers of this host have the same clock; the clocks of other hosts are compared
by round trips (`nbdist.rpc.world.clocks`). `nbdist.views.timeline.recording` is the part that runs on the workers.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any

from nbdist.amounts import counted, duration
from nbdist.finalisers import hand_over
from nbdist.rpc.agent import Agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.named import call_method
from nbdist.rpc.world.clocks import offset
from nbdist.views.drawing.gantt import KINDS, Bar, gantt, with_legend
from nbdist.views.drawing.pictures import themed
from nbdist.views.passes.intervals import uncovered
from nbdist.views.timeline import recording
from nbdist.views.timeline.recording import Noted
from nbdist.wire.messages import Record

_log = logging.getLogger("nbdist.views")
_BARS_DRAWN = 1500  # in a picture; the shortest bars are left out
_NOTHING = (
    ": nothing to show. A timeline shows calls (RPCs), backward passes over several workers, pipelines and distributed "
    "optimizers. It does not show what a cell computes itself, a local `loss.backward()` or collectives"
)


class Timeline:
    """A recording of the work of an agent and of all members of its world, until `stop` or the end of a ``with`` block.

    Recording begins when the object is made. Workers that join later, or start again, are recorded from then on. If a
    worker dies, its events are lost, and `lost` counts the worker. If the object is collected before `stop`, recording
    ends, and its events are dropped.

    Attributes:
        noted: after `stop`, all pieces of work, sorted by start, with times in seconds since the recording began.
        workers: after `stop`, the names of the agents that were recorded.
    """

    def __init__(self, agent: Agent) -> None:
        self.noted: list[Noted] = []
        self.workers: list[str] = []
        self.lost = 0
        """The number of events that were not kept because there were too many, and of workers that did not answer."""
        self._agent = agent
        self._name = f"recording {secrets.token_hex(8)}"
        # Guards `_records`, `_offsets`, `_running` and `lost`: workers join in other threads.
        self._changing = threading.Lock()
        self._running = True
        self._end: float | None = None
        self._records: list[Record] = []
        self._offsets: dict[str, float] = {}
        self._forget = agent.on_joined(partial(_on_joined, weakref.ref(self)))  # first, so that no worker is missed
        self._finaliser = weakref.finalize(self, _on_collected, agent, self._name, self._forget)
        self._finaliser.atexit = False
        self._records = sorted(agent.members(), key=lambda record: record.id)
        self._offsets = {record.name: offset(agent.me, record, agent.ask) for record in self._records}
        self._start = time.monotonic()
        self._each(recording.begin, agent.me.incarnation)

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    # -- recording ----------------------------------------------------------------------------

    def stop(self) -> Timeline:
        """End the recording, gather the events from the workers, and return the timeline. Further calls do nothing.

        A worker that does not answer adds 1 to `lost`.
        """
        with self._changing:
            was_running, self._running = self._running, False
        if was_running:
            self._forget()
            self._end = time.monotonic()
            found = self._each(call_method, "finish", label="recording.finish")
            _stop_own(self._agent, self._name)
            self._finaliser.detach()  # only now: after an interrupt, the workers must not record for ever
            self.lost += len(self._records) - len(found)
            for name, (noted, lost) in found.items():
                self.lost += lost
                ahead = self._offsets[name] + self._start
                self.noted += [one._replace(start=one.start - ahead, end=one.end - ahead) for one in noted]
            self.noted.sort(key=lambda one: (one.start, one.end))
            in_order = sorted(self._records, key=lambda record: record.id)
            self.workers = list(dict.fromkeys(record.name for record in in_order))
        return self

    def include(self, record: Record) -> None:
        """Record a worker that has joined meanwhile, too. A thread of the agent's pool runs this."""
        if any(known.incarnation == record.incarnation for known in self._records):
            return
        try:
            ahead = offset(self._agent.me, record, self._agent.ask)
            self._agent.ask(record.name, recording.begin, self._name, self._agent.me.incarnation)
        except Exception as error:  # whatever the worker raises: the others are recorded
            _log.debug("%s is not recorded: %s", record.name, error)
            with self._changing:
                self.lost += self._running and self._is_there(record)  # a worker that is gone is not missing
            return
        with self._changing:
            if self._running:
                self._offsets[record.name] = ahead
                self._records.append(record)
                return
        self._agent.at(record.name, self._name).cast("stop")  # or the worker would record for nobody

    def _each(self, function: Callable[..., Any], *more: Any, label: str = "") -> dict[str, Any]:
        """Call a function with the recording's name, and ``more``, on all workers; return the results by worker."""
        # Results only: the error of one worker must not keep the others from ending their recordings.
        there = [record.name for record in self._records if self._is_there(record)]
        return ask_each(self._agent, function, dict.fromkeys(there, (self._name, *more)), label=label).values

    def _is_there(self, record: Record) -> bool:
        return self._agent.member(record.incarnation) is not None

    # -- looking ------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """The length of the recording in seconds, until now if it has not been stopped."""
        return (self._end or time.monotonic()) - self._start

    def __repr__(self) -> str:
        if self._running:
            return f"<a timeline, recording since {duration(self.seconds)}: .stop() ends that>"
        lines = [f"{duration(self.seconds)}{'' if self.noted else _NOTHING}"]
        for worker in self.workers:
            if own := [one for one in self.noted if one.agent == worker]:
                count = Counter(one.kind for one in own)
                kinds = ", ".join(
                    counted(count[name], kind.one, kind.many) for name, kind in KINDS.items() if count[name]
                )
                lines.append(f"{worker}: {kinds}; busy {duration(_busy_seconds(own))}{_on_gpu(own)}")
        if self.lost:
            lines.append(f"{self.lost} events or workers are missing")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if self._running or not self.noted:
            return themed(escape(repr(self).strip("<>")))
        shown = sorted(self.noted, key=lambda one: one.start - one.end)[:_BARS_DRAWN]
        rows: list[tuple[str, list[Bar]]] = []
        for worker in self.workers:
            for number, lane in enumerate(stack([one for one in shown if one.agent == worker])):
                rows.append((worker if not number else "", [_bar(one) for one in lane]))
        left = f"; the {_BARS_DRAWN} longest of {len(self.noted)}" if len(self.noted) > _BARS_DRAWN else ""
        lost = f"; {self.lost} events or workers are missing" if self.lost else ""
        title = f"{duration(self.seconds)}{left}{lost}"
        return with_legend([gantt(title, rows, self.seconds)], {one.kind for one in shown})

    def to_perfetto(self) -> dict[str, Any]:
        """Return the events in the JSON format that Perfetto and Chrome's tracing read, with times in microseconds.

        Call it after `stop`: before, there are no events, and it stops nothing itself.
        """
        events: list[dict[str, Any]] = []
        for number, worker in enumerate(self.workers):
            events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": worker}})
            for lane, row in enumerate(stack([one for one in self.noted if one.agent == worker])):
                for one in row:
                    work = {"ph": "X", "name": one.name, "cat": KINDS[one.kind].words, "pid": number, "tid": lane}
                    times = {"ts": one.start * 1e6, "dur": (one.end - one.start) * 1e6}
                    on_gpu = {"args": {"GPU ms": one.gpu * 1e3}} if one.gpu is not None else {}
                    events.append({**work, **times, **on_gpu})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write the events to a JSON file, which ui.perfetto.dev opens. Raises OSError if it cannot be written.

        Call it after `stop`: before, there are no events. A file of that name is overwritten.
        """
        Path(path).write_text(json.dumps(self.to_perfetto()))


def _on_joined(known: weakref.ref[Timeline], record: Record) -> None:
    timeline: Timeline | None = known()
    if timeline is not None:
        timeline._agent.submit(partial(timeline.include, record))  # not in this thread: it waits for the worker


def _on_collected(agent: Agent, name: str, forget: Callable[[], None]) -> None:
    """End the recording of a timeline that was collected before `Timeline.stop`."""
    forget()
    hand_over(partial(_end_recording, agent, name))  # Python may run this finaliser while any lock is held


def _end_recording(agent: Agent, name: str) -> None:
    """Tell all members to drop the recording of a name, without waiting for them; those without one ignore it."""
    _stop_own(agent, name)
    for record in agent.members():
        agent.at(record.name, name).cast("stop")


def _stop_own(agent: Agent, name: str) -> None:
    """Stop the recording of this process also if the agent is closed."""
    if (own := agent.named.find(name)) is not None:
        own.stop()


def stack(noted: Iterable[Noted]) -> list[list[Noted]]:
    """Return pieces of work in lanes, the topmost first, each in the order of time and without overlaps."""
    lanes: list[list[Noted]] = []
    for one in sorted(noted, key=lambda one: (one.start, -one.end)):  # outer work above nested work
        for lane in lanes:
            if lane[-1].end <= one.start:
                lane.append(one)
                break
        else:
            lanes.append([one])
    return lanes


def _bar(one: Noted) -> Bar:
    about = "" if one.kind in ("forward", "backward") else f"{KINDS[one.kind].words}: "  # these names say the kind
    on_gpu = f", GPU {duration(one.gpu)}" if one.gpu is not None else ""
    tip = f"{about}{one.name}, {duration(one.end - one.start)}{on_gpu}"
    return Bar(one.start, one.end, one.text or one.name.rpartition(".")[2], one.kind, tip)


def _on_gpu(noted: Sequence[Noted]) -> str:
    """Return the time on GPUs of each kind of the user's work in words; an empty text if none was measured."""
    spent: Counter[str] = Counter()
    for one in noted:
        if one.gpu is not None and one.kind != "own":  # nbdist's own work contains work of the user's
            spent[one.kind] += one.gpu  # type: ignore[assignment]  # counts seconds, in the order of KINDS below
    told = ", ".join(f"{duration(spent[name])} in {kind.many}" for name, kind in KINDS.items() if name in spent)
    return f"; GPU {told}" if told else ""


def _busy_seconds(noted: Sequence[Noted]) -> float:
    """Return the seconds in which at least one piece of work was under way."""
    spans = [(one.start, one.end) for one in noted]
    begun, ended = min(spans)[0], max(end for _, end in spans)
    return max(0.0, ended - begun - uncovered((begun, ended), spans))  # not -0, as differences of large numbers are
