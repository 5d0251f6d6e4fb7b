"""The cluster at a glance, again and again: what each worker is and does, and how that went in the last minute.

It asks as `%dist_status` does, without waiting for any worker that is busy, once a second, and only while somebody
looks. What it keeps is bounded.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from nbdist.cluster.cluster import Cluster
from nbdist.cluster.status import WorkerStatus, collect
from nbdist.pictures import themed
from nbdist.views.status import StatusTable

__all__ = ["Panel"]

_KEPT = 60
"""Samples of each worker: of a minute."""
_WAYS = 8
_QUIET = 10_000
"""Bytes in a second that are not worth a word: to look at workers, and to know that they live, takes some."""


class Panel:
    """The workers of one cluster, sampled."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.rows: list[WorkerStatus] = []
        self._courses: dict[str, Course] = {}
        self._sent: dict[str, tuple[Mapping[str, int], float]] = {}
        self._rates: dict[tuple[str, str], float] = {}
        self._awaited: list[str] = []
        self._lock = threading.Lock()
        self._sampling = threading.Lock()
        self.sample()

    def sample(self) -> None:
        """Look once."""
        with self._sampling:
            rows = collect(self.cluster)
            now = time.monotonic()
            agent = self.cluster.agent
            awaited = list({call.worker for call in agent.awaited()})
            sent = {row.name: row.sent for row in rows if row.sent} | {agent.me.name: agent.sent()}
            with self._lock:
                self.rows, self._awaited = rows, awaited
                # Of those that have answered: what a worker sent that is gone or silent is not what it sends.
                self._rates = {pair: rate for pair, rate in self._rates.items() if pair[0] in sent}
                for name, counts in sent.items():
                    self._note_rates(name, counts, now)
                for row in rows:
                    course = self._courses.setdefault(row.name, Course())
                    course.add("cpu", course.share(row.pid, now))
                    course.add("memory", row.memory or 0)
                    course.add("gpu", row.gpu_memory or 0)
                    course.add("out", round(sum(rate for (one, _), rate in self._rates.items() if one == row.name)))
                    course.add("in", round(sum(rate for (_, other), rate in self._rates.items() if other == row.name)))

    def _note_rates(self, name: str, counts: Mapping[str, int], now: float) -> None:
        known, at = self._sent.get(name, ({}, now))
        self._sent[name] = counts, now
        for other, count in counts.items():
            if other != name and now > at:
                self._rates[name, other] = max(0, count - known.get(other, 0)) / (now - at)

    def talk(self) -> list[tuple[str, str, int, float]]:
        """Who talks to whom: the calls that wait for an answer, and the bytes in a second."""
        waits = {(row.name, other): count for row in self.rows for other, count in row.waits.items()}
        pairs = [*waits, *(pair for pair, rate in self._rates.items() if rate >= _QUIET and pair not in waits)]
        return [(*pair, waits.get(pair, 0), self._rates.get(pair, 0.0)) for pair in pairs]

    def blamed(self) -> list[str]:
        """For whom others wait who waits for nobody: a line each, with the way to it and where it is."""
        return blamed(self._waits(), {row.name: row.where for row in self.rows})

    def _waits(self) -> dict[str, list[str]]:
        agent = self.cluster.agent
        waits = {agent.me.name: self._awaited, **{row.name: list(row.waits) for row in self.rows}}
        return {name: [other for other in others if other != name] for name, others in waits.items()}

    def snapshot(self) -> dict[str, Any]:
        """What a page draws."""
        with self._lock:
            return {
                "running": self.cluster.running,
                "rows": [
                    {
                        "name": row.name,
                        "state": row.state.partition("\n")[0],
                        "lost": row.pid is None,
                        "device": row.device,
                        "pid": row.pid,
                        "runs": row.runs,
                        "where": row.where,
                        "calls": row.calls,
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
            }

    def __repr__(self) -> str:
        return "\n".join([repr(StatusTable(self.rows)), *self.blamed()])

    def _repr_html_(self) -> str:
        talk = [f"{escape(one)} waits for {calls} of {escape(other)}" for one, other, calls, _ in self.talk() if calls]
        told = [*([("; ".join(talk))] if talk else []), *map(escape, self.blamed())]
        return StatusTable(self.rows)._repr_html_() + themed(*(f"<div>{line}</div>" for line in told))


def blamed(waits: Mapping[str, Sequence[str]], places: Mapping[str, str]) -> list[str]:
    """Who holds others up: the ends of the ways along which they wait, and circles. Pure."""
    awaited = {other for others in waits.values() for other in others}
    starts = [name for name in waits if waits[name] and name not in awaited]
    seen: set[str] = set()
    found = [line for name in starts for line in _ways([name], waits, places, seen)]
    for name in waits:  # those who wait for each other only
        if waits[name] and name not in seen:
            found += _ways([name], waits, places, seen)
    return found[:_WAYS]


def _ways(
    way: list[str], waits: Mapping[str, Sequence[str]], places: Mapping[str, str], seen: set[str]
) -> Iterator[str]:
    last = way[-1]
    if last in way[:-1]:
        yield f"{' → '.join(way)}: they wait for each other"
    elif not waits.get(last):
        place = places.get(last, "")
        yield " → ".join(way) + (f", which is at {place}" if place else "")
    elif last not in seen:  # else it has been told from there on
        seen.add(last)
        for other in waits[last]:
            yield from _ways([*way, other], waits, places, seen)


class Course:
    """How it went with one worker in the last minute."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[float]] = {}
        self._spent: tuple[int, float, float] | None = None

    def add(self, name: str, value: float) -> None:
        """The newest value of that name."""
        self._kept.setdefault(name, deque(maxlen=_KEPT)).append(value)

    @property
    def values(self) -> dict[str, list[float]]:
        """All of them, by name."""
        return {name: list(kept) for name, kept in self._kept.items()}

    def share(self, pid: int | None, now: float) -> float:
        """How much of a core the process has used since it was asked last."""
        spent, known = _seconds_of(pid), self._spent
        if spent is None or pid is None:
            return 0.0
        self._spent = pid, spent, now
        if known is None or known[0] != pid or now <= known[2]:
            return 0.0
        return round(max(0.0, spent - known[1]) / (now - known[2]), 3)


def _seconds_of(pid: int | None) -> float | None:
    """The time that a process has computed."""
    if pid is None:
        return None
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
