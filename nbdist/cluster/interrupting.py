"""The stop button: interrupts the workers that a cell waits for, and names what does not give way.

SIGINT reaches Python code, sleeps and locks. A worker that has not begun the cell ignores it, so it is sent when the
cell begins. A collective does not notice it: its connections are shut down. Who is still there after that is asked
where it is by a signal whose handler needs no GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import TYPE_CHECKING

from nbdist.cluster import collectives, where
from nbdist.cluster.worker_output import call_off
from nbdist.errors import NbdistError
from nbdist.rpc.stopping import PATIENCE

if TYPE_CHECKING:
    from nbdist.cluster.cells import Cell, Part
    from nbdist.cluster.cluster import Cluster

__all__ = ["interrupt_cell"]

_LISTENS_AFTER = 0.3
_WAKE_AFTER = 0.02
_BREAK_AFTER = 0.4
_POLL = 0.005


async def interrupt_cell(cluster: Cluster, cell: Cell) -> list[str]:
    """Interrupt what runs of a cell; what is to be said of the workers that do not give way in time."""
    began = time.monotonic()
    parts = [part for part in cell.parts.values() if not part.done]
    for part in parts:
        if _is_next(cluster, cell, part):
            _signal(cluster, part)
        else:
            _call_off(cluster, part)
    await _gone(parts, began + _BREAK_AFTER)
    for part in parts:
        if not part.done and _is_next(cluster, cell, part):
            _break_collective(cluster, part)
    await _gone(parts, began + PATIENCE)
    return [await _describe(cluster, cell, part) for part in parts if not part.done]


def _is_next(cluster: Cluster, cell: Cell, part: Part) -> bool:
    """Whether its kernel has nothing else to do; who holds the GIL from the first cannot even say that it began."""
    cells = cluster.find(part.worker).cells
    return part.began is not None or (bool(cells) and cells[0] is cell)


async def _gone(parts: list[Part], deadline: float) -> None:
    while time.monotonic() < deadline and not all(part.done for part in parts):
        await asyncio.sleep(_POLL)


def _signal(cluster: Cluster, part: Part) -> None:
    """Send SIGINT, as soon as the worker listens."""
    loop = asyncio.get_running_loop()

    def send() -> None:
        if not part.done:
            cluster.signal(part.worker, signal.SIGINT)
            loop.call_later(_WAKE_AFTER, wake)

    def wake() -> None:
        kernel = cluster.find(part.worker).kernel
        if not part.done and kernel is not None:
            kernel.send("kernel_info_request", {})  # an event loop that waits learns of a signal with its next event

    if part.began is not None:
        send()
        return
    # It is about to begin, and does not listen before it has; or it has, and holds the GIL, so that nobody can say so.
    late = loop.call_later(_LISTENS_AFTER, send)

    def begun() -> None:
        if not late.cancelled():
            late.cancel()
            send()

    part.when_begun.append(begun)


def _call_off(cluster: Cluster, part: Part) -> None:
    """Have a cell that waits for its turn not run."""
    part.when_begun.append(lambda: _signal(cluster, part))
    with contextlib.suppress(NbdistError):
        cluster.agent.caller.asynchronous(part.worker, call_off, (part.id,), None, PATIENCE)


def _break_collective(cluster: Cluster, part: Part) -> None:
    def note(future: object) -> None:
        with contextlib.suppress(Exception):
            part.note = future.value()  # type: ignore[attr-defined]

    with contextlib.suppress(NbdistError):
        cluster.agent.caller.asynchronous(part.worker, collectives.break_off, (), None, PATIENCE).then(note)


async def _describe(cluster: Cluster, cell: Cell, part: Part) -> str:
    if not _is_next(cluster, cell, part):
        return f"{part.worker} has not begun this cell: it still runs one from before, and will not run this one"
    place = await _where(cluster, part.worker)
    return (
        f"{part.worker} has not given way within {PATIENCE:g} s{place}; `%dist_restart {part.worker}` ends what it does"
    )


async def _where(cluster: Cluster, worker: str) -> str:
    """Where its main thread is; the innermost frame, and that of the cell."""
    with contextlib.suppress(OSError):
        asked = where.Question(cluster, worker)
        deadline = time.monotonic() + where.PATIENCE
        while time.monotonic() < deadline and not asked.answered:
            await asyncio.sleep(where.POLL)
        await asyncio.sleep(where.POLL)
        frames = asked.frames()
        if frames:
            inner = frames[0]
            of_cell = next((frame.line for frame in frames if frame.in_cell), None)
            if inner.in_cell:
                return f" (it is in line {inner.line} of its cell)"
            cell = f", called by line {of_cell} of its cell" if of_cell else ""
            return f" (it is in {inner.function}, line {inner.line} of {inner.file}{cell})"
    return ""
