"""What each worker of a cluster is doing, asked without waiting for any that is busy."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.errors import NbdistError

if TYPE_CHECKING:
    from nbdist.cluster.cluster import Cluster
    from nbdist.cluster.workers import Worker

__all__ = ["WorkerStatus", "collect"]

_PATIENCE = 0.5
_SHOWN = 60


@dataclass(frozen=True)
class WorkerStatus:
    """One worker at one moment."""

    name: str
    rank: int
    pid: int | None
    device: str
    state: str
    runs: str
    memory: int | None
    """Bytes that are its own, not shared with other workers."""
    calls: int | None
    """RPCs that run there."""


def collect(cluster: Cluster) -> list[WorkerStatus]:
    """The state of all workers; one that does not answer at once is shown by what is known here."""
    asked = {}
    for worker in cluster.workers:
        if worker.alive:
            with contextlib.suppress(NbdistError):
                asked[worker.name] = cluster.agent.caller.asynchronous(worker.name, _report, (), None, _PATIENCE)
    return [_status(worker, asked.get(worker.name)) for worker in cluster.workers]


def _status(worker: Worker, asked: object) -> WorkerStatus:
    calls, doing = None, ""
    with contextlib.suppress(NbdistError):
        if asked is not None:
            calls, doing = asked.wait(_PATIENCE)  # type: ignore[attr-defined]
    cell = worker.cells[0] if worker.cells else None
    runs = doing
    if cell is not None:
        part = cell.parts.get(worker.name)
        since = f" ({time.monotonic() - part.began:.1f} s)" if part is not None and part.began else ""
        first = cell.code.strip().partition("\n")[0]
        runs = f"{first[:_SHOWN]}{since}"
    pid = worker.pid if worker.lost is None else None
    device = worker.device if worker.gpu is None else f"{worker.device} (GPU {worker.gpu})"
    return WorkerStatus(worker.name, worker.rank, pid, device, worker.state, runs, _own_memory(pid), calls)


def _report() -> tuple[int, str]:
    """On the worker: how many calls run, and which the longest, this one aside."""
    from nbdist.rpc.agent import active_agent

    agent = active_agent()
    if agent is None:
        return 0, ""
    others = agent.executor.active - 1
    return others, agent.executor.doing() if others > 0 else ""


def _own_memory(pid: int | None) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        if pid is not None:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                return sum(int(line.split()[1]) for line in file if line.startswith("Private_")) * 1024
    return None
