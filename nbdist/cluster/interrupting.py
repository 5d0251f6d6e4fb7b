"""Interrupts work on the workers, and names what does not stop. Every interrupt goes through `interrupt`::

    Ctrl-C, the stop button, a time limit   the cell that the notebook waits for       `interrupt_cell`
    `Cluster.interrupt`, the panel's button  everything that the chosen workers do      `interrupt_workers`

===================================  ==============================================================================
what a worker does                   how it ends
===================================  ==============================================================================
Python code, a sleep, a lock         SIGINT, once the cell has begun: before that, a kernel ignores it
a call to another worker             SIGINT; the wait for the call ends, and the call is stopped where it runs
a collective                         deaf to SIGINT; 0.4 s later the connections of its process group are shut
a cell that has not begun            the worker is told not to run it
a call that runs for another worker  `Stopping` raises KeyboardInterrupt in its thread (for `interrupt_workers` only)
===================================  ==============================================================================

A worker that has not ended its cell 2 s later is asked where it is, by a signal whose handler needs no GIL. One that
formats the traceback of its interrupt has stopped, and is given more time.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nbdist.cluster import collectives, where
from nbdist.cluster.labels import is_cell
from nbdist.cluster.worker_output import call_off
from nbdist.errors import NbdistError
from nbdist.rpc.agent import active_agent
from nbdist.rpc.stopping import BREAK_AFTER, PATIENCE

if TYPE_CHECKING:
    from nbdist.cluster.cells import Cell, Part
    from nbdist.cluster.cluster import Cluster
    from nbdist.cluster.workers import Worker
    from nbdist.rpc.futures import Future

__all__ = ["interrupt", "interrupt_cell", "interrupt_workers", "stop_served_calls"]

_LISTENS_AFTER = 0.3
_WAKE_AFTER = 0.02
_CALLED_OFF_WITHIN = 0.3
"""Seconds within which a worker hears that a cell was called off, and ends it after it has begun."""

_CALLS_STOP_WITHIN = 0.5
"""Seconds for a worker to say that it has told its calls to stop; one that holds the GIL cannot say so."""

_TRACEBACK_WITHIN = 30.0
"""Seconds for a worker that has stopped to format its traceback, which reads and parses the files of all frames."""

_FORMATS = ("showtraceback", "_format_exception_for_storage")
_POLL = 0.005


async def interrupt_cell(cluster: Cluster, cell: Cell) -> list[str]:
    """Interrupt a cell where it has not ended; return what to say of the workers that do not stop in time."""
    return await interrupt(cluster, [(cell, part) for part in cell.parts.values()])


def interrupt_workers(cluster: Cluster, workers: Sequence[Worker]) -> None:
    """Interrupt all that workers do: their cells, begun or not, and the calls that they run for others.

    Returns once that is on its way. What is sent to the workers afterwards runs.
    """
    cluster.kernel_thread.soon(_interrupt_cells_of, cluster, workers)
    names = [worker.name for worker in workers]
    stopping = cluster.agent.call_each(names, stop_served_calls, timeout=_CALLS_STOP_WITHIN)
    for stopped in stopping.values():
        with contextlib.suppress(NbdistError):
            stopped.wait()


def _interrupt_cells_of(cluster: Cluster, workers: Sequence[Worker]) -> None:
    work = [(cell, cell.parts[worker.name]) for worker in workers for cell in worker.cells]
    cluster.kernel_thread.loop.create_task(interrupt(cluster, work))


async def interrupt(cluster: Cluster, work: Sequence[tuple[Cell, Part]]) -> list[str]:
    """Interrupt cells on workers; return what to say of those that do not stop in time."""
    began = time.monotonic()
    work = [(cell, part) for cell, part in work if not part.done]
    running = [part for cell, part in work if _is_next(cluster, cell, part)]
    called_off = [_call_off(cluster, part) for cell, part in work if not _is_next(cluster, cell, part)]
    # First, lest a cell that is called off begins, because the one before it has ended, and the worker does not know.
    await _until(lambda: all(future is None or future.done() for future in called_off), began + _CALLED_OFF_WITHIN)
    for part in running:
        _signal(cluster, part)
    parts = [part for _, part in work]
    await _until(lambda: all(part.done for part in parts), began + BREAK_AFTER)
    for cell, part in work:
        if not part.done and _is_next(cluster, cell, part):
            _break_collective(cluster, part)
    await _until(lambda: all(part.done for part in parts), began + PATIENCE)
    said = [await _describe(cluster, cell, part, began + _TRACEBACK_WITHIN) for cell, part in work if not part.done]
    return [text for text in said if text]


def stop_served_calls() -> None:
    """Stop the calls that this worker runs for others; called on the worker."""
    agent = active_agent()
    if agent is not None:
        agent.stopping.stop_served()


def _is_next(cluster: Cluster, cell: Cell, part: Part) -> bool:
    """Whether its kernel has nothing else to do; who holds the GIL from the first cannot even say that it began."""
    cells = cluster.find(part.worker).cells
    return part.began is not None or (bool(cells) and cells[0] is cell)


async def _until(happened: Callable[[], bool], deadline: float) -> None:
    while not happened() and time.monotonic() < deadline:
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


def _call_off(cluster: Cluster, part: Part) -> Future[Any] | None:
    """Have a cell that waits for its turn not run; return what is done once the worker knows, None if it is gone.

    A worker that has heard of that ends the cell as soon as it begins. A signal at that moment would come too late, and
    hit what the worker does next; so only a cell that goes on is signalled.
    """
    loop = asyncio.get_running_loop()

    def begun() -> None:
        loop.call_later(_CALLED_OFF_WITHIN, _signal, cluster, part)

    part.when_begun.append(begun)
    with contextlib.suppress(NbdistError):
        return cluster.agent.call(part.worker, call_off, part.id, timeout=PATIENCE)
    return None


def _break_collective(cluster: Cluster, part: Part) -> None:
    def note(future: object) -> None:
        with contextlib.suppress(Exception):
            part.note = future.value()  # type: ignore[attr-defined]

    with contextlib.suppress(NbdistError):
        cluster.agent.call(part.worker, collectives.break_off, timeout=PATIENCE).then(note)


async def _describe(cluster: Cluster, cell: Cell, part: Part, deadline: float) -> str:
    """Return what to say of a worker that has not ended its cell; nothing if it only has to format its traceback."""
    name = part.worker
    if not _is_next(cluster, cell, part):
        return f"{name} has not begun this cell: it still runs one from before, and will not run this one"
    frames = await _frames(cluster, name)
    while _formats_traceback(frames) and not part.done:
        if time.monotonic() > deadline:
            return f"{name} has stopped, and has not formatted its traceback yet; `%dist_restart {name}` ends that"
        await _until(lambda: part.done, time.monotonic() + where.PATIENCE)
        frames = await _frames(cluster, name)
        if not _formats_traceback(frames):  # it is done with that, and says so in a moment
            await _until(lambda: part.done, time.monotonic() + PATIENCE)
    if part.done:
        return ""
    place = _say_place(frames, cell)
    return f"{name} has not given way within {PATIENCE:g} s{place}; `%dist_restart {name}` ends what it does"


async def _frames(cluster: Cluster, worker: str) -> list[where.Frame]:
    """Return the frames of a worker's main thread, innermost first; none if they cannot be had."""
    with contextlib.suppress(OSError):
        asked = where.Question(cluster, worker)
        deadline = time.monotonic() + where.PATIENCE
        while time.monotonic() < deadline and not asked.answered:
            await asyncio.sleep(where.POLL)
        return asked.frames()
    return []


def _formats_traceback(frames: Sequence[where.Frame]) -> bool:
    """Whether IPython formats an error, to show it or to keep it with the cell."""
    return any(frame.function in _FORMATS and "/IPython/core/" in frame.file for frame in frames)


def _say_place(frames: Sequence[where.Frame], cell: Cell) -> str:
    """Return in words the innermost of these frames, and the line of the cell from which it was called."""
    if not frames:
        return ""
    inner = frames[0]
    of_cell = next((frame.line for frame in frames if is_cell(frame.file, cell.source)), None)
    called = f", called by line {of_cell} of its cell" if of_cell else ""
    if is_cell(inner.file, cell.source):
        return f" (it is in line {inner.line} of its cell)"
    of = "an earlier cell" if inner.in_cell else inner.file
    return f" (it is in {inner.function}, line {inner.line} of {of}{called})"
