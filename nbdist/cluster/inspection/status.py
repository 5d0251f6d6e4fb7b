"""Reports the state and the work of each worker of a cluster, without waiting for a busy worker.

::

    a worker that answers RPCs            `make_report` on the worker ─────────┐
    one that holds the GIL                its launcher asks the worker's host ─┼──> WorkerStatus
    one that is dead, or starting         what the notebook knows ─────────────┘
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from nbdist.amounts import duration
from nbdist.autograd.api import recorder
from nbdist.cluster.cluster import Cluster
from nbdist.cluster.inspection.status_report import StatusReport, make_report
from nbdist.cluster.jupyter.labels import read_frames
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.partings import Parting
from nbdist.cluster.processes.probe import ANSWER_WITHIN, Probe
from nbdist.code_lines import LINE_SHOWN, users_lines
from nbdist.errors import NbdistError
from nbdist.rpc.asking import ask_each

_REPORT_WITHIN = 0.5
"""Seconds to wait for a worker's report."""


@dataclass(frozen=True)
class WorkerStatus:
    """The state of one worker at one moment."""

    name: str
    rank: int
    pid: int | None
    """The process id on the worker's host; None if the worker has died or not started."""
    device: str
    """The worker's device as torch names it, with the GPU's number on the host in brackets."""
    state: str
    """``idle``, ``busy``, where it stands in a debugger, a step of starting, or the reason for which it died."""
    runs: str
    """The first line of the cell that runs, with its seconds so far; without a cell, `StatusReport.doing`."""
    report: StatusReport
    """The report of the worker or of its host, whose ``where`` is empty if nothing runs."""
    log: tuple[tuple[float, str], ...] = ()
    """The last lines that the worker has printed, in any cell, each with the time at which it arrived."""


class Status(NamedTuple):
    """The state of all workers, and where those that are in collectives have parted."""

    rows: Sequence[WorkerStatus] = ()
    partings: Sequence[Parting] = ()


def collect(cluster: Cluster) -> Status:
    """Return the status of all workers, in at most about a second.

    For a worker that does not answer in time, the status has the facts that the notebook and the worker's host know,
    such as its present line. The calls are not recorded in any context.
    """
    with recorder().contexts.outside():
        living = [worker.name for worker in cluster.workers if worker.alive]
        asked = ask_each(cluster.agent, make_report, dict.fromkeys(living, ()), timeout=_REPORT_WITHIN)
        reports = asked.or_raise(but=NbdistError)
        in_collective = any(report.in_collective for report in reports.values())
        silent = [each for each in cluster.workers if each.alive and each.step == "ready" and each.name not in reports]
        probes = {worker.name: cluster.probe(worker.name) for worker in silent}
        partings = cluster.partings(probes) if in_collective else []
    reports |= _read(probes, [worker.name for worker in silent if worker.cells])
    rows = [_status(cluster, worker, reports.get(worker.name) or StatusReport(None)) for worker in cluster.workers]
    return Status(rows, partings)


def _read(probes: Mapping[str, Future[Probe]], busy: Collection[str]) -> dict[str, StatusReport]:
    """Return a report on each of these workers, by name, from its host: the worker has not answered a call."""
    deadline = time.monotonic() + 2 * ANSWER_WITHIN
    found = {}
    for name, answer in probes.items():
        with contextlib.suppress(Exception):  # the worker ends, or its host cannot be reached
            seen = answer.result(max(0.0, deadline - time.monotonic()))
            lines = users_lines(read_frames(seen.frames)) if name in busy else ()
            where = next(map(str, lines), "")
            found[name] = StatusReport(None, where=where, memory=seen.memory, cpu_seconds=seen.cpu_seconds)
    return found


def _status(cluster: Cluster, worker: Worker, report: StatusReport) -> WorkerStatus:
    """Join a worker's report with the facts that the notebook knows about the worker."""
    cell = worker.present_cell
    runs = report.doing
    if cell is not None:
        part = cell.parts.get(worker.name)
        since = f" ({duration(time.monotonic() - part.began)})" if part is not None and part.began else ""
        first = cell.code.strip().partition("\n")[0]
        runs = f"{first[:LINE_SHOWN]}{since}"
    pid = worker.pid if worker.lost is None else None
    device = worker.device if worker.gpu is None else f"{worker.device} (GPU {worker.gpu})"
    state = "busy" if report.calls and worker.state == "idle" else worker.state
    if stands_at := cluster.stops.place(worker.name):
        state = f"stands in the debugger at {stands_at}"
    report = report if runs else report._replace(where="")
    log = tuple(worker.log.timed_lines())
    return WorkerStatus(worker.name, worker.rank, pid, device, state, runs, report, log)
