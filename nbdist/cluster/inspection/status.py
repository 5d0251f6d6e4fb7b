"""Reports what each worker of a cluster is doing, without waiting for a busy worker.

::

    a worker that answers RPCs            `make_report` on the worker ─────────┐
    one that holds the GIL, and runs a    a signal has the main thread's ──────┼──> WorkerStatus
    cell                                  frames written to a file             │
    one that is dead, or starting         what the notebook knows ─────────────┘
"""

from __future__ import annotations

import contextlib
import linecache
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.amounts import duration
from nbdist.autograd.api import recorder
from nbdist.cluster.inspection import where
from nbdist.cluster.inspection.process_memory import own_bytes
from nbdist.cluster.kernels.labels import is_cell
from nbdist.cluster.worker.status_report import LINE_SHOWN, StatusReport, make_report, say_line
from nbdist.code_places import is_users, shown_name
from nbdist.errors import NbdistError
from nbdist.rpc.asking import ask_each

if TYPE_CHECKING:
    from nbdist.cluster.cluster import Cluster
    from nbdist.cluster.workers import Worker

__all__ = ["WorkerStatus", "collect"]

_REPORT_WITHIN = 0.5
"""Seconds to wait for a worker's report."""


@dataclass(frozen=True)
class WorkerStatus:
    """The state of one worker at one moment."""

    name: str
    rank: int
    pid: int | None
    """The process id; None if the worker has died or not started."""
    device: str
    """The worker's device as torch names it, with the GPU's number on the host in brackets."""
    state: str
    """One of ``idle``, ``busy``, a step of starting, or the reason for which the worker died."""
    runs: str
    """The first line of the cell that runs, with its seconds so far; without a cell, `StatusReport.doing`."""
    memory: int | None
    """Bytes in pages that no other process has; None where the system has no count."""
    calls: int | None
    """The number of RPCs that run on the worker; None if it did not answer."""
    where: str = ""
    """The line of the user's code that the worker runs."""
    waits: Mapping[str, int] = field(default_factory=dict)
    """The number of unanswered calls that the worker has made, by the name of the worker they went to."""
    log: tuple[tuple[float, str], ...] = ()
    """The last lines that the worker has printed, in any cell, each with the time at which it arrived."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the worker has sent, by the receiver's name; empty if it did not answer."""
    gpu_memory: int | None = None
    """Bytes that torch has reserved on the worker's GPUs."""
    gpu_busy: int | None = None
    """Percent of the last moment in which the worker's GPU computed, for any process."""


def collect(cluster: Cluster) -> list[WorkerStatus]:
    """Return the status of all workers, in at most about a second.

    A worker that does not answer in time gets a status from what the notebook knows; if it runs a cell, a signal has it
    write the line that it is in. The calls are not recorded in any context.
    """
    with recorder().contexts.outside():
        living = [worker.name for worker in cluster.workers if worker.alive]
        asked = ask_each(cluster.agent, make_report, dict.fromkeys(living, ()), timeout=_REPORT_WITHIN)
    reports = asked.or_raise(but=NbdistError)
    busy = [worker for worker in cluster.workers if worker.alive and worker.step == "ready" and worker.cells]
    silent = [worker for worker in busy if worker.name not in reports]
    places = _ask_silent(cluster, silent)
    return [
        _status(worker, reports.get(worker.name) or StatusReport(None, where=places.get(worker.name, "")))
        for worker in cluster.workers
    ]


def _ask_silent(cluster: Cluster, workers: Sequence[Worker]) -> dict[str, str]:
    """Return the line of code that each of these workers runs, by the worker's name.

    They have not answered a call in time, so a signal makes them write it. Waits `where.ANSWER_WITHIN` seconds at most;
    a worker that writes nothing has an empty text, and one whose file cannot be read is missing.
    """
    asked = {}
    for worker in workers:
        with contextlib.suppress(OSError):
            asked[worker] = where.Question(cluster.folder, worker.name, cluster.signal)
    deadline = time.monotonic() + where.ANSWER_WITHIN
    with contextlib.suppress(OSError):  # the workers may end meanwhile
        while time.monotonic() < deadline and not all(question.answered for question in asked.values()):
            time.sleep(where.POLL)
    found = {}
    for worker, question in asked.items():
        with contextlib.suppress(OSError):
            found[worker.name] = _place(worker, question.frames())
    return found


def _place(worker: Worker, frames: Sequence[where.Frame]) -> str:
    """Return the innermost line of the user's code among these frames; "" without one."""
    for frame in frames:
        if frame.in_cell:
            codes = [cell.source for cell in worker.cells if is_cell(frame.file, cell.source)]
            lines = codes[0].splitlines() if codes else []  # without a match, the line is in an earlier cell
            line = lines[frame.line - 1].strip() if frame.line <= len(lines) else ""
            return say_line("cell", frame.line, line)
        if is_users(frame.file):
            return say_line(shown_name(frame.file), frame.line, linecache.getline(frame.file, frame.line).strip())
    return ""


def _status(worker: Worker, report: StatusReport) -> WorkerStatus:
    """Join a worker's report with what the notebook knows of the worker.

    The pid of a worker that has died is None.
    """
    cell = worker.cells[0] if worker.cells else None
    runs = report.doing
    if cell is not None:
        part = cell.parts.get(worker.name)
        since = f" ({duration(time.monotonic() - part.began)})" if part is not None and part.began else ""
        first = cell.code.strip().partition("\n")[0]
        runs = f"{first[:LINE_SHOWN]}{since}"
    pid = worker.pid if worker.lost is None else None
    device = worker.device if worker.gpu is None else f"{worker.device} (GPU {worker.gpu})"
    return WorkerStatus(
        worker.name,
        worker.rank,
        pid,
        device,
        "busy" if report.calls and worker.state == "idle" else worker.state,
        runs,
        own_bytes(pid),
        report.calls,
        report.where if runs else "",
        report.waits,
        tuple(worker.log.timed_lines()),
        report.sent,
        report.gpu_memory,
        report.gpu_busy,
    )
