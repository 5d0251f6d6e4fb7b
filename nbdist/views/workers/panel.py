"""Samples a cluster for `%dist_panel`: the state of each worker, and its course in the last minute.

A sample asks the workers as `%dist_status` does, without waiting for a busy worker. The live view
(`nbdist.views.widgets.panel`) samples once a second while somebody looks. The last `_SAMPLES_KEPT` samples are kept.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from nbdist.amounts import plural
from nbdist.cluster.cluster import Cluster
from nbdist.cluster.inspection.status import Status, WorkerStatus, collect
from nbdist.cluster.inspection.status_report import users_calls
from nbdist.cluster.inspection.thread_stacks import read_stacks
from nbdist.views.drawing.pictures import themed
from nbdist.views.workers.stacks import say
from nbdist.views.workers.status import StatusTable

_SAMPLES_KEPT = 60  # for each worker: one minute's
_CHAINS_SHOWN = 8  # of waiting workers
_QUIET_BYTES_PER_SECOND = 10_000  # traffic below this is not shown: samples and signs of life take some


class Panel:
    """The workers of one cluster, as last sampled; the first sample is taken at once. Any thread may use it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._status = Status()
        self._courses: dict[str, Course] = {}
        self._sent: dict[str, tuple[Mapping[str, int], float]] = {}
        self._rates: dict[tuple[str, str], float] = {}
        self._awaited: list[str] = []
        self._sampled_at = ""
        self._stacks: dict[str, str] = {}
        self._lock = threading.Lock()  # guards the last sample; not held while workers are asked
        self._sampling = threading.Lock()  # held during one whole sample
        self.sample()

    @property
    def rows(self) -> Sequence[WorkerStatus]:
        """The state of each worker, as last sampled."""
        return self._status.rows

    def sample(self) -> None:
        """Take one sample of all workers, as `%dist_status` does; a second thread waits for its turn."""
        with self._sampling:
            status = collect(self.cluster)
            rows, now = status.rows, time.monotonic()
            agent = self.cluster.agent
            awaited = list({call.worker for call in users_calls(agent)})
            sent = {row.name: row.report.sent for row in rows if row.report.sent} | {agent.me.name: agent.sent()}
            with self._lock:
                self._status, self._awaited = status, awaited
                self._sampled_at = f"Sampled at {time.strftime('%H:%M:%S')}."
                # Keep only rates of workers that have answered: the old rates of a lost worker mean nothing.
                self._rates = {pair: rate for pair, rate in self._rates.items() if pair[0] in sent}
                for name, counts in sent.items():
                    self._note_rates(name, counts, now)
                for row in rows:
                    course = self._courses.setdefault(row.name, Course())
                    course.add("cpu", course.share(row.pid, row.report.cpu_seconds, now))
                    course.add("memory", row.report.memory or 0)
                    course.add("gpu_busy", (row.report.gpu_busy or 0) / 100)
                    course.add("gpu", row.report.gpu_memory or 0)
                    course.add("out", round(sum(rate for (one, _), rate in self._rates.items() if one == row.name)))
                    course.add("in", round(sum(rate for (_, other), rate in self._rates.items() if other == row.name)))

    def _note_rates(self, name: str, counts: Mapping[str, int], now: float) -> None:
        """Compute the bytes a second that the worker ``name`` sends to each other worker, since the last sample."""
        # ``counts`` has its total bytes until now by receiver. The caller holds the lock.
        known, at = self._sent.get(name, ({}, now))
        self._sent[name] = counts, now
        for other, count in counts.items():
            if other != name and now > at:
                # A worker that was restarted counts from 0 again: no rate is negative.
                self._rates[name, other] = max(0, count - known.get(other, 0)) / (now - at)

    def talk(self) -> list[tuple[str, str, int, float]]:
        """Return the pairs of workers where the first waits for the second, or sends it much data, as last sampled."""
        waits = {(row.name, other): count for row in self.rows for other, count in row.report.waits.items()}
        busy = [pair for pair, rate in self._rates.items() if rate >= _QUIET_BYTES_PER_SECOND]
        pairs = dict.fromkeys([*waits, *busy])
        # Each with the calls of the first that wait for an answer, and the bytes a second.
        return [(*pair, waits.get(pair, 0), self._rates.get(pair, 0.0)) for pair in pairs]

    def blamed(self) -> list[str]:
        """Return a line for each collective to which workers have not come, and for each chain of waiting workers."""
        # For each worker, and for the notebook, the other workers for whose answers it waits.
        notebook = self.cluster.agent.me.name
        waits = {notebook: self._awaited, **{row.name: list(row.report.waits) for row in self.rows}}
        for parting in self._status.partings:
            for worker in parting.present:
                waits[worker] += [other for other in parting.absent if other not in waits[worker]]
        chains = blamed(waits, {row.name: row.report.where for row in self.rows})
        return [parting.text for parting in self._status.partings] + chains

    def show_stacks(self, worker: str) -> None:
        """Show the threads of a worker below the rows; a second call with the same worker removes them."""
        self._stacks = {} if worker in self._stacks else {worker: say(read_stacks(self.cluster, worker))}

    def snapshot(self) -> dict[str, Any]:
        """Return the last sample, with the course of the last minute, as values that JSON can hold. Asks no worker."""
        with self._lock:
            return {
                "running": self.cluster.running,
                "tells_busy": any(row.report.gpu_busy is not None for row in self.rows),
                "rows": [
                    {
                        "name": row.name,
                        "state": row.state.partition("\n")[0],
                        "lost": row.pid is None,
                        "device": row.device,
                        "pid": row.pid,
                        "runs": row.runs,
                        "where": row.report.where,
                        "calls": row.report.calls,
                        "log": list(row.log),
                        **self._courses[row.name].values,
                    }
                    for row in self.rows
                ],
                "talk": [
                    {"from": one, "to": other, "calls": calls, "rate": round(rate)}
                    for one, other, calls, rate in self.talk()
                ],
                "blamed": self.blamed(),
                "stacks": list(self._stacks.values()),
            }

    def __repr__(self) -> str:
        return "\n".join([repr(StatusTable(self.rows)), *self.blamed(), self._sampled_at])

    def _repr_html_(self) -> str:
        talk = [f"{escape(one)} waits for {calls} of {escape(other)}" for one, other, calls, _ in self.talk() if calls]
        told = [*([("; ".join(talk))] if talk else []), *map(escape, self.blamed()), self._sampled_at]
        return StatusTable(self.rows)._repr_html_() + themed(*(f"<div>{line}</div>" for line in told))


def blamed(waits: Mapping[str, Sequence[str]], places: Mapping[str, str]) -> list[str]:
    """Return a line for each chain of workers that wait for one another, `_CHAINS_SHOWN` at most. Pure."""
    # A chain ends at a worker that waits for nobody, which holds up the others, or it is a circle.
    awaited = {other for others in waits.values() for other in others}
    seen: set[str] = set()
    found: list[str] = []
    # First those for whom nobody waits. Of the others, only circles that no other worker waits for are left then.
    for name in sorted(waits, key=awaited.__contains__):
        if waits[name] and name not in seen:
            found += _lines_of_ways([name], waits, places, seen)
    return found[:_CHAINS_SHOWN]


def _lines_of_ways(
    way: list[str], waits: Mapping[str, Sequence[str]], places: Mapping[str, str], seen: set[str]
) -> Iterator[str]:
    """Yield a line for each chain of waiting workers that begins with ``way``; workers in ``seen`` have their lines."""
    last = way[-1]
    if last in way[:-1]:
        yield _say_circle(way[way.index(last) : -1], way[: way.index(last)])
    elif not waits.get(last):
        place = places.get(last, "")
        yield " → ".join(way) + (f", which is at {place}" if place else "")
    elif last not in seen:  # otherwise other lines have the ways on from here
        seen.add(last)
        for other in waits[last]:
            yield from _lines_of_ways([*way, other], waits, places, seen)


def _say_circle(circle: Sequence[str], behind: Sequence[str]) -> str:
    """Return a line about workers that wait for one another, and about those that wait for the first of these."""
    if len(circle) == 1:
        said = f"{circle[0]} waits for itself"
    elif len(circle) == 2:
        said = f"{' and '.join(circle)} wait for each other"
    else:
        said = f"{' → '.join([*circle, circle[0]])} wait for each other"
    waits = f"; {' → '.join(behind)} {plural(len(behind), 'waits', 'wait')} behind {plural(len(circle), 'it', 'them')}"
    return said + (waits if behind else "")


class Course:
    """The samples of one worker in the last minute, by name of the quantity, the oldest first."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[float]] = {}
        self._spent: tuple[int, float, float] | None = None

    def add(self, name: str, value: float) -> None:
        """Append the newest value of a quantity; the oldest one is dropped after `_SAMPLES_KEPT` values."""
        self._kept.setdefault(name, deque(maxlen=_SAMPLES_KEPT)).append(value)

    @property
    def values(self) -> dict[str, list[float]]:
        """The values of each quantity, by its name, the oldest first."""
        return {name: list(kept) for name, kept in self._kept.items()}

    def share(self, pid: int | None, spent: float | None, now: float) -> float:
        """Return how many CPU cores a process has used on average since the last call, 0 if that is not known."""
        known = self._spent
        if spent is None or pid is None:
            return 0.0
        self._spent = pid, spent, now
        if known is None or known[0] != pid or now <= known[2]:  # the first call, or a restart
            return 0.0
        return round(max(0.0, spent - known[1]) / (now - known[2]), 3)
