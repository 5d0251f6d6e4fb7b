"""What each worker of a cluster is doing, asked without waiting for any that is busy."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from nbdist.autograd.api import recorder
from nbdist.cluster import where
from nbdist.cluster.labels import is_cell
from nbdist.cluster.process_memory import own_bytes
from nbdist.errors import NbdistError

if TYPE_CHECKING:
    from nbdist.cluster.cluster import Cluster
    from nbdist.cluster.workers import Worker

__all__ = ["WorkerStatus", "collect", "gpu_memory", "is_users"]

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
    where: str = ""
    """The line of the user's code at which it is."""
    waits: Mapping[str, int] = field(default_factory=dict)
    """So many calls it has made that are not answered, by whom they are awaited from."""
    log: tuple[tuple[float, str], ...] = ()
    """The last lines that it has printed, in whichever cells, each with the time at which it came."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """Bytes that it has sent, by whom they were sent to; empty where it did not say."""
    gpu_memory: int | None = None
    """Bytes that torch has taken of its GPU."""


def collect(cluster: Cluster) -> list[WorkerStatus]:
    """The state of all workers; one that does not answer at once is shown by what is known here."""
    with recorder().contexts.outside():
        living = [worker.name for worker in cluster.workers if worker.alive]
        asked = cluster.agent.call_each(living, _report, timeout=_PATIENCE)
    reports = {}
    for name, answer in asked.items():
        with contextlib.suppress(NbdistError):
            reports[name] = answer.wait(_PATIENCE)
    busy = [worker for worker in cluster.workers if worker.alive and worker.step == "ready" and worker.cells]
    silent = [worker for worker in busy if worker.name not in reports]
    places = _ask_silent(cluster, silent)
    return [
        _status(worker, reports.get(worker.name) or Report(None, where=places.get(worker.name, "")))
        for worker in cluster.workers
    ]


def _ask_silent(cluster: Cluster, workers: Sequence[Worker]) -> dict[str, str]:
    """Where those are that answer nothing: they hold the GIL, or it is held from them."""
    asked = {}
    for worker in workers:
        with contextlib.suppress(OSError):
            asked[worker] = where.Question(cluster, worker.name)
    deadline = time.monotonic() + where.PATIENCE
    with contextlib.suppress(OSError):  # they may end meanwhile
        while time.monotonic() < deadline and not all(question.answered for question in asked.values()):
            time.sleep(where.POLL)
    found = {}
    for worker, question in asked.items():
        with contextlib.suppress(OSError):
            found[worker.name] = _place(worker, question.frames())
    return found


def _place(worker: Worker, frames: Sequence[where.Frame]) -> str:
    """The innermost line of the user's code among these."""
    for frame in frames:
        if frame.in_cell:
            codes = [cell.source for cell in worker.cells if is_cell(frame.file, cell.source)]
            lines = codes[0].splitlines() if codes else []  # else it is a function of an earlier cell
            line = lines[frame.line - 1].strip() if frame.line <= len(lines) else ""
            return _told("cell", frame.line, line)
        if is_users(frame.file):
            return _told(Path(frame.file).name, frame.line, linecache.getline(frame.file, frame.line).strip())
    return ""


def _told(name: str, number: int, line: str) -> str:
    return f"{name}:{number}" + (f": {line[:_SHOWN]}" if line else "")


def is_users(file: str) -> bool:
    """Return whether a file holds the user's code: neither Python's, nor a package's, nor ours.

    A relative name is of compiled code, such as Cython's.
    """
    installed = "/site-packages/" in file or "/dist-packages/" in file  # also where another environment is on the path
    return os.path.isabs(file) and not (installed or file.startswith(_INNER))


def _status(worker: Worker, report: Report) -> WorkerStatus:
    cell = worker.cells[0] if worker.cells else None
    runs = report.doing
    if cell is not None:
        part = cell.parts.get(worker.name)
        since = f" ({time.monotonic() - part.began:.1f} s)" if part is not None and part.began else ""
        first = cell.code.strip().partition("\n")[0]
        runs = f"{first[:_SHOWN]}{since}"
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


class Report(NamedTuple):
    """What a worker says of itself."""

    calls: int | None
    """How many run,"""
    doing: str = ""
    """and which the longest, the one aside that asks."""
    where: str = ""
    waits: dict[str, int] = {}  # noqa: RUF012 - never changed
    sent: dict[str, int] = {}  # noqa: RUF012
    gpu_memory: int | None = None


def _report() -> Report:
    """On the worker."""
    from nbdist.rpc.agent import active_agent

    agent = active_agent()
    if agent is None:
        return Report(0)
    others = agent.exchange.active - 1
    waits = Counter(call.worker for call in agent.awaited())
    doing = agent.executor.doing() if others > 0 else ""
    return Report(others, doing, _where(), dict(waits), agent.sent(), gpu_memory())


def gpu_memory() -> int | None:
    """Return the bytes that torch has taken of this process's GPUs; None where there are none, or they are not used."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return None
    # This thread's own device need not be the worker's.
    return int(sum(cuda.memory_reserved(device) for device in range(cuda.device_count())))


def _where() -> str:
    """Where in the user's code some thread is, the main one if it is there."""
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


_INNER = tuple(
    {sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")} | {str(Path(__file__).parents[1])}
)
"""Where code is that is not the user's."""
