"""The cluster at a glance, again and again: what each worker is and does, and how that went in the last minute.

It asks as `%dist_status` does, without waiting for any worker that is busy, once a second, and only while somebody
looks. What it keeps is bounded.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from html import escape
from typing import Any

from nbdist.cluster.cluster import Cluster
from nbdist.cluster.status import WorkerStatus, collect
from nbdist.views.status import StatusTable

__all__ = ["Panel"]

_KEPT = 60
"""Samples of each worker: of a minute."""
_LOG = 5


class Panel:
    """The workers of one cluster, sampled."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.rows: list[WorkerStatus] = []
        self._cpu: dict[str, deque[float]] = {}
        self._memory: dict[str, deque[int]] = {}
        self._last: dict[str, tuple[int, float, float]] = {}
        self._lock = threading.Lock()
        self.sample()

    def sample(self) -> None:
        """Look once."""
        rows = collect(self.cluster)
        now = time.monotonic()
        with self._lock:
            self.rows = rows
            for row in rows:
                spent = _seconds_of(row.pid)
                known = self._last.get(row.name)
                share = 0.0
                if spent is not None and row.pid is not None:
                    if known is not None and known[0] == row.pid and now > known[2]:
                        share = max(0.0, spent - known[1]) / (now - known[2])
                    self._last[row.name] = row.pid, spent, now
                self._cpu.setdefault(row.name, deque(maxlen=_KEPT)).append(round(share, 3))
                self._memory.setdefault(row.name, deque(maxlen=_KEPT)).append(row.memory or 0)

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
                        "waits": dict(row.waits),
                        "log": list(row.log)[-_LOG:],
                        "cpu": list(self._cpu[row.name]),
                        "memory": list(self._memory[row.name]),
                    }
                    for row in self.rows
                ],
            }

    def __repr__(self) -> str:
        return repr(StatusTable(self.rows))

    def _repr_html_(self) -> str:
        talk = [
            f"{escape(row.name)} waits for {count} of {escape(other)}"
            for row in self.rows
            for other, count in row.waits.items()
        ]
        return StatusTable(self.rows)._repr_html_() + (f"<div>{'; '.join(talk)}</div>" if talk else "")


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
