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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any

from nbdist.amounts import counted, duration
from nbdist.cluster.output.arranger import grouped
from nbdist.finalisers import hand_over
from nbdist.rpc.agent import Agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.named import call_method
from nbdist.rpc.world.clocks import offset
from nbdist.views.drawing.gantt import KINDS, Bar, fold, gantt, with_legend
from nbdist.views.drawing.pictures import themed
from nbdist.views.passes.intervals import uncovered
from nbdist.views.timeline import recording
from nbdist.views.timeline.collectives import Collective, join, say_gaps
from nbdist.views.timeline.recording import Noted, Recorded
from nbdist.wire.messages import Record

_log = logging.getLogger("nbdist.views")
_FLAT = ("wait", "collective")  # kinds that have a single lane, whatever overlaps
_TOLD_KINDS = ("call", "segment", "step", "own")  # the names of other kinds say the kind
_BARS_DRAWN = 1500  # in a picture; the shortest bars are left out
_NOTHING = (
    ": nothing to show. A timeline shows cells of workers, calls (RPCs), backward passes, optimizer steps, batches of "
    "a DataLoader and collectives. It does not show what else a cell of the notebook computes"
)


class Timeline:
    """A recording of the work of an agent and of all members of its world, until `stop` or the end of a ``with`` block.

    Recording begins when the object is made. Workers that join later, or start again, are recorded from then on. If a
    worker dies, its events are lost, and `lost` counts the worker. If the object is collected before `stop`, recording
    ends, and its events are dropped.

    Attributes:
        noted: after `stop`, all pieces of work, sorted by start, with times in seconds since the recording began.
        workers: after `stop`, the names of the agents that were recorded.
        collectives: after `stop`, the collectives of the workers, sorted by start.
        gaps: after `stop`, sentences about what is missing.
    """

    def __init__(self, agent: Agent) -> None:
        self.noted: list[Noted] = []
        self.workers: list[str] = []
        self.collectives: list[Collective] = []
        self.gaps: list[str] = []
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
            self._gather(found)
            self.noted.sort(key=lambda one: (one.start, one.end))
            in_order = sorted(self._records, key=lambda record: record.id)
            self.workers = list(dict.fromkeys(record.name for record in in_order))
        return self

    def _gather(self, found: Mapping[str, Recorded]) -> None:
        """Add what the workers have recorded, on the clock of this timeline."""
        begun = {name: self._offsets[name] + self._start for name in found}
        sent = {call: time - begun[name] for name, each in found.items() for call, time in each.sent.items()}
        for name, each in found.items():
            self.lost += each.lost
            for one in each.noted:
                start, end = one.start - begun[name], min(one.end - begun[name], self.seconds)
                sending = max(0.0, start - sent[one.call]) if one.call in sent else None
                self.noted.append(one._replace(start=max(0.0, start), end=end, sending=sending))  # a cell may be older
        calls = {name: recorded.calls for name, recorded in found.items()}
        self.collectives = join(calls, begun, self.seconds)
        self.gaps = say_gaps(calls, begun)
        for call in self.collectives:
            name, start = next(iter(call.given.values())).name, min(call.came.values())
            self.noted.append(Noted(call.title, "collective", str(call), start, call.end, 0, name))
            for worker, waited in call.waits.items() if not call.is_transfer else ():
                start, about = call.came[worker], (f"{name} waits for {call.last}", call.given[worker].place)
                self.noted.append(Noted(worker, "wait", about[0], start, start + waited, 0, "waits", place=about[1]))

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
                waited = _busy_seconds([one for one in own if one.kind == "wait"])
                waits = f"; waited {duration(waited)} for others" if waited else ""
                busy = duration(_busy_seconds([one for one in own if one.kind != "wait"]))
                lines.append(f"{worker}: {kinds}; busy {busy}{waits}{_on_gpu(own)}")
        lines += self._say_collectives()
        if self.lost:
            lines.append(f"{self.lost} events or workers are missing")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if self._running or not self.noted:
            return themed(escape(repr(self).strip("<>")))
        groups = self._by_group()
        rows: list[tuple[str, list[Bar]]] = []
        of_agent: dict[str, range] = {}
        for agent in [*groups, *self.workers]:
            own = [one for one in self.noted if one.agent == agent]
            flat = [one for one in own if one.kind in _FLAT]
            lanes = [*stack([one for one in own if one.kind not in _FLAT]), *([flat] if flat else [])]
            of_agent[agent] = range(len(rows), len(rows) + len(lanes))
            drawn = [fold(list(map(_bar, lane)), self.seconds) for lane in lanes]
            rows += zip([agent, *[""] * len(drawn)], drawn, strict=False)
        bars = sorted((bar for _, row in rows for bar in row), key=lambda bar: bar.start - bar.end)
        shown = set(map(id, bars[:_BARS_DRAWN]))
        rows = [(label, [bar for bar in row if id(bar) in shown]) for label, row in rows]
        bands = [
            (row, {number for each in own for name in each.given for number in of_agent[name]})
            for (_, row), own in zip(rows, groups.values(), strict=False)
        ]
        left = f"; the {_BARS_DRAWN} longest of {len(bars)}" if len(bars) > _BARS_DRAWN else ""
        lost = f"; {self.lost} events or workers are missing" if self.lost else ""
        picture = gantt(f"{duration(self.seconds)}{left}{lost}", rows, self.seconds, bands)
        told = [f"<div>{escape(line)}</div>" for line in self._say_collectives()]
        return with_legend([picture, *told], {bar.kind for _, row in rows for bar in row})

    def _by_group(self) -> dict[str, list[Collective]]:
        return grouped(self.collectives, lambda each: each.title)

    def _say_collectives(self) -> list[str]:
        """Return a line for each group, who came last how often and where the longest wait was; and what is missing."""
        lines = []
        for title, own in self._by_group().items():
            late = Counter(each.last for each in own if each.last)
            often = "".join(f"; {worker} came last to {count}" for worker, count in late.most_common(3))
            longest = max(own, key=lambda each: (not each.is_over, max(each.waits.values(), default=0.0)))
            kind, apart = ("transfer", "Furthest apart") if longest.is_transfer else ("collective", "The longest wait")
            label = "Not ended" if not longest.is_over else apart if longest.waits else "For example"
            lines.append(f"{title}: {counted(len(own), kind)}{often}. {label}: {longest}")
        return lines + self.gaps

    def to_perfetto(self) -> dict[str, Any]:
        """Return the events in the JSON format that Perfetto and Chrome's tracing read, with times in microseconds.

        Call it after `stop`: before, there are no events, and it stops nothing itself.
        """
        events: list[dict[str, Any]] = []
        for number, worker in enumerate([*self.workers, *self._by_group()]):
            events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": worker}})
            for lane, row in enumerate(stack([one for one in self.noted if one.agent == worker])):
                for one in row:
                    work = {"ph": "X", "name": one.name, "cat": KINDS[one.kind].words, "pid": number, "tid": lane}
                    times = {"ts": one.start * 1e6, "dur": (one.end - one.start) * 1e6}
                    facts = {"GPU ms": one.gpu, "sending ms": one.sending}
                    args: dict[str, Any] = {name: part * 1e3 for name, part in facts.items() if part is not None}
                    args |= {"line": one.place} if one.place else {}
                    events.append({**work, **times, **({"args": args} if args else {})})
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
    about = f"{KINDS[one.kind].words}: " if one.kind in _TOLD_KINDS else ""
    place = f" ({one.place})" if one.place else ""
    on_gpu = f", GPU {duration(one.gpu)}" if one.gpu is not None else ""
    sending = f"; {duration(one.sending)} from the call until it began here" if one.sending is not None else ""
    tip = f"{about}{one.name}{place}, {duration(one.end - one.start)}{on_gpu}{sending}"
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
    begun, ended = min(spans, default=(0.0, 0.0))[0], max((end for _, end in spans), default=0.0)
    return max(0.0, ended - begun - uncovered((begun, ended), spans))  # not -0, as differences of large numbers are
