"""Reports what each worker of a cluster is doing, without waiting for a busy worker.

::

    a worker that answers RPCs            `_report` on the worker ──> Report ──┐
    one that holds the GIL, and runs a    a signal has the main thread's ──────┼──> WorkerStatus
    cell                                  frames written to a file             │
    one that is dead, or starting         what the notebook knows ─────────────┘
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from nbdist.autograd.api import recorder
from nbdist.cluster.inspection import where
from nbdist.cluster.inspection.process_memory import own_bytes
from nbdist.cluster.kernels.labels import is_cell
from nbdist.cluster.users_code import is_users
from nbdist.errors import NbdistError

if TYPE_CHECKING:
    from nbdist.cluster.cluster import Cluster
    from nbdist.cluster.workers import Worker

__all__ = ["WorkerStatus", "collect", "gpu_memory"]

_REPORT_WITHIN = 0.5
"""Seconds to wait for a worker's report."""
_LINE_SHOWN = 60
"""Characters of a line of code that are shown."""


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


def collect(cluster: Cluster) -> list[WorkerStatus]:
    """Return the status of all workers, in at most about a second.

    A worker that does not answer in time gets a status from what the notebook knows. The calls are not recorded in any
    context.
    """
    with recorder().contexts.outside():
        living = [worker.name for worker in cluster.workers if worker.alive]
        asked = cluster.agent.call_each(living, _report, timeout=_REPORT_WITHIN)
    reports = {}
    for name, answer in asked.items():
        with contextlib.suppress(NbdistError):
            reports[name] = answer.wait(_REPORT_WITHIN)
    busy = [worker for worker in cluster.workers if worker.alive and worker.step == "ready" and worker.cells]
    silent = [worker for worker in busy if worker.name not in reports]
    places = _ask_silent(cluster, silent)
    return [
        _status(worker, reports.get(worker.name) or StatusReport(None, where=places.get(worker.name, "")))
        for worker in cluster.workers
    ]


def _ask_silent(cluster: Cluster, workers: Sequence[Worker]) -> dict[str, str]:
    """Return the lines of code that these workers run, by a signal, as they have not answered a call in time.

    A worker that writes nothing has an empty text.
    """
    asked = {}
    for worker in workers:
        with contextlib.suppress(OSError):
            asked[worker] = where.Question(cluster, worker.name)
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
            return _told("cell", frame.line, line)
        if is_users(frame.file):
            return _told(Path(frame.file).name, frame.line, linecache.getline(frame.file, frame.line).strip())
    return ""


def _told(name: str, number: int, line: str) -> str:
    """Return a place in words, such as ``cell:2: y = f(x)``."""
    return f"{name}:{number}" + (f": {line[:_LINE_SHOWN]}" if line else "")


def _status(worker: Worker, report: StatusReport) -> WorkerStatus:
    """Join a worker's report with what the notebook knows of the worker.

    A worker that has died keeps its name and rank, and gets no pid.
    """
    cell = worker.cells[0] if worker.cells else None
    runs = report.doing
    if cell is not None:
        part = cell.parts.get(worker.name)
        since = f" ({time.monotonic() - part.began:.1f} s)" if part is not None and part.began else ""
        first = cell.code.strip().partition("\n")[0]
        runs = f"{first[:_LINE_SHOWN]}{since}"
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
    )


class StatusReport(NamedTuple):
    """A worker's answer to `collect`."""

    calls: int | None
    """The number of calls that run, without the one that asks; None if the worker did not answer."""
    doing: str = ""
    """The call that has run longest, its caller and its seconds, and the number of further calls."""
    where: str = ""
    waits: dict[str, int] = {}  # noqa: RUF012 - never changed
    sent: dict[str, int] = {}  # noqa: RUF012
    gpu_memory: int | None = None


def _report() -> StatusReport:
    """Make this worker's report. Called on the worker, in a thread of its agent.

    A worker without an agent, which is still starting, reports no calls.
    """
    from nbdist.rpc.agent import active_agent

    agent = active_agent()
    if agent is None:
        return StatusReport(0)
    others = agent.exchange.active - 1
    waits = Counter(call.worker for call in agent.awaited())
    doing = agent.executor.doing() if others > 0 else ""
    return StatusReport(others, doing, _where(), dict(waits), agent.sent(), gpu_memory())


def gpu_memory() -> int | None:
    """Return the bytes that torch has reserved on this process's GPUs; None without GPUs, or before they are used."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return None
    # All devices, because the calling thread's current device need not be the worker's.
    return int(sum(cuda.memory_reserved(device) for device in range(cuda.device_count())))


def _where() -> str:
    """Return the line of the user's code that some thread runs: the main thread, if that runs any."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    me = threading.get_ident()
    for thread in sorted(frames, key=lambda thread: thread != main):
        frame: FrameType | None = frames[thread] if thread != me else None
        while frame is not None:
            file = frame.f_code.co_filename
            if is_users(file):
                name = "cell" if "ipykernel" in file else Path(file).name
                number = (
                    frame.f_lineno or frame.f_code.co_firstlineno
                )  # None where the code has no line, as while it unwinds
                return _told(name, number, linecache.getline(file, number).strip())
            frame = frame.f_back
    return ""
