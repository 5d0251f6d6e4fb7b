"""Interrupts work on the workers, and reports the workers that do not stop.

Every interrupt goes through `Interrupts.interrupt`::

    Ctrl-C, the stop button, a time limit,    one cell, on all its workers              `stop_cell`
    `Cell.cancel`, ``fail_fast``
    `Cluster.interrupt`, the panel's button   everything that the chosen workers do     `stop_workers`

===================================  ==============================================================================
what a worker does                   how it ends
===================================  ==============================================================================
Python code, a sleep, a lock         SIGINT, once the cell has begun: before that, a kernel ignores it
a call to another worker             SIGINT; the wait for the call ends, and the call is stopped where it runs
a collective                         ignores SIGINT; 0.4 s later the connections of its process group are shut
a cell that has not begun            the worker is told not to run it. If it is the worker's next cell and has not
                                     reported its beginning after 0.3 s, SIGINT: the cell may hold the GIL, or the
                                     worker handles another request first
a call that runs for another worker  `Stopping` raises KeyboardInterrupt in its thread (for `stop_workers` only)
===================================  ==============================================================================

If a worker has not ended its cell after 2 s, it is asked for its present line, by a signal whose handler needs no GIL.
A worker that is formatting the traceback of its interrupt has stopped, and gets up to 30 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nbdist.cluster.jupyter.labels import is_cell, read_frames
from nbdist.cluster.processes.probe import ANSWER_WITHIN
from nbdist.code_lines import CodeLine
from nbdist.errors import NbdistError
from nbdist.rpc.agent import Agent, active_agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.calls.stopping import BREAK_OFF_AFTER, NAME_AFTER

if TYPE_CHECKING:  # workers import this module for `stop_served_calls`, but not the notebook's side of cells
    from nbdist.cluster.jupyter.kernel_connection import KernelThread
    from nbdist.cluster.kernels.cells import Cell, CellPart
    from nbdist.cluster.kernels.workers import Worker
    from nbdist.cluster.processes.launchers.contract import Launcher
    from nbdist.cluster.team import Team
    from nbdist.rpc.futures import Future

# Seconds after which a worker gets SIGINT for its next cell, even if it has not reported that the cell began.
_SIGNAL_ANYWAY_AFTER = 0.3
_WAKE_AFTER = 0.02  # seconds from SIGINT to a message that wakes the worker's event loop, which may not notice SIGINT
# Seconds to wait for a worker to confirm that it skips a cell, and for the skipped cell to end once it has begun.
_SKIP_CONFIRMED_WITHIN = 0.3
_CALLS_STOP_WITHIN = 0.5  # seconds for a worker to confirm that it has stopped its calls; one that holds the GIL cannot
_TRACEBACK_WITHIN = 30.0  # seconds for a stopped worker's traceback, for which it reads and parses files
_TRACEBACK_FORMATTERS = ("showtraceback", "_format_exception_for_storage")  # functions of IPython
_BROKEN_OFF_WITHIN = 8.0  # seconds for a worker to break a collective off; an abort of NCCL may take 5 s of them
_POLL = 0.005  # seconds between two looks at a condition that `_wait_until` waits for


class Interrupts:
    """Interrupts work on the workers of one cluster."""

    def __init__(self, team: Team, thread: KernelThread, agent: Agent, launcher: Launcher) -> None:
        self._team, self._thread, self._agent, self._launcher = team, thread, agent, launcher

    def stop_cell(self, cell: Cell) -> list[str]:
        """Interrupt a cell on the workers that still run it; return a text for each worker that does not stop."""
        work = self.interrupt([(cell, part) for part in cell.parts.values()])
        # The kernel thread must not wait: the interrupt continues in the background.
        if self._thread.is_current():
            self._thread.loop.create_task(work)
            return []
        return self._thread.run(work).result()

    def stop_workers(self, workers: Sequence[Worker]) -> None:
        """Interrupt everything that these workers do: cells, begun or not, and the calls that they run for others."""

        # Not in the kernel thread, which the interrupts need. Work that is sent afterwards runs.
        def begin() -> None:
            work = [(cell, cell.parts[worker.name]) for worker in workers for cell in worker.cells]
            self._thread.loop.create_task(self.interrupt(work))

        self._thread.soon(begin)
        names = [worker.name for worker in workers]
        stopped = ask_each(self._agent, stop_served_calls, dict.fromkeys(names, ()), timeout=_CALLS_STOP_WITHIN)
        stopped.or_raise(but=NbdistError)

    async def interrupt(self, work: Sequence[tuple[Cell, CellPart]]) -> list[str]:
        """Interrupt cells on workers, in the kernel thread; return a text for each worker that does not stop."""
        began = time.monotonic()
        work = [(cell, part) for cell, part in work if not part.done]
        running = [part for _, part in work if part.began is not None]
        for cell, part in work:
            if part.began is None and self._is_next(cell, part):
                self._stop_next(part)
        asked = [self._call_off(part) for cell, part in work if not self._is_next(cell, part)]
        called_off = [each for each in asked if each is not None]
        # Call cells off before any signal: once the signalled cell ends, the worker begins the next one.
        await _wait_until(lambda: all(each.done() for each in called_off), began + _SKIP_CONFIRMED_WITHIN)
        for part in running:
            self._signal(part)
        parts = [part for _, part in work]
        await _wait_until(lambda: all(part.done for part in parts), began + BREAK_OFF_AFTER)
        for cell, part in work:
            if not part.done and self._is_next(cell, part):
                self._break_collective(cell, part)
        await _wait_until(lambda: all(part.done for part in parts), began + NAME_AFTER)
        said = [await self._describe(cell, part, began + _TRACEBACK_WITHIN) for cell, part in work if not part.done]
        return [text for text in said if text]

    def _is_next(self, cell: Cell, part: CellPart) -> bool:
        # Not by ``part.began`` alone: a cell that takes the GIL at once cannot report that it began.
        cells = self._team.find(part.worker).cells
        return part.began is not None or (bool(cells) and cells[0] is cell)

    def _signal(self, part: CellPart) -> None:

        def wake() -> None:
            if not part.done and (kernel := self._team.find(part.worker).kernel) is not None:
                kernel.send("kernel_info_request", {})  # a waiting event loop notices a signal with its next event

        if not part.done:
            self._launcher.signal(part.worker, signal.SIGINT)
            asyncio.get_running_loop().call_later(_WAKE_AFTER, wake)

    def _stop_next(self, part: CellPart) -> None:
        """Stop a cell that its worker will run next, and whose beginning has not been reported. Returns at once."""

        def signal_anyway() -> None:
            # The cell has begun but holds the GIL, so that the kernel cannot report it; or the worker handles another
            # request, such as a widget's, and skips the cell afterwards.
            if part.began is None:
                part.signalled = True
                self._signal(part)

        self._call_off(part)
        asyncio.get_running_loop().call_later(_SIGNAL_ANYWAY_AFTER, signal_anyway)

    def _call_off(self, part: CellPart) -> Future[Any] | None:
        """Tell the worker of a cell's part to skip the cell, which has not begun there; None if the worker is gone."""
        loop = asyncio.get_running_loop()

        def begun() -> None:
            # The worker ends the cell now. An earlier signal could hit the cell before; this one comes if it runs on.
            if not part.signalled:  # a second signal could hit what the cell does to clean up
                loop.call_later(_SKIP_CONFIRMED_WITHIN, self._signal, part)

        # If the cell begins all the same.
        part.when_begun.append(begun)
        with contextlib.suppress(NbdistError):
            return self._agent.at(part.worker, "output").call("call_off", part.id, timeout=NAME_AFTER)
        return None

    def _break_collective(self, cell: Cell, part: CellPart) -> None:
        """Make the worker of a cell's part shut the process group of the collective in which it may wait."""

        def answered(future: Future[Any]) -> None:
            note = ""
            with contextlib.suppress(Exception):  # the worker's error, or RPC's: it has broken nothing off
                note = future.value()
            self._thread.soon(cell.on_broken_off, part, note)

        # The part ends only after the answer, which has the sentence for the user. An abort of NCCL ends the wait for
        # the GPU before the worker has asked for a new process group, and the next cell must not run in the old one.
        part.breaks_off += 1
        try:
            # Returns at once. A worker that does not answer in time, or is lost, has broken nothing off.
            asked = self._agent.at(part.worker, "collectives").call("break_off", timeout=_BROKEN_OFF_WITHIN)
        except NbdistError:
            part.breaks_off -= 1
        else:
            asked.then(answered)

    async def _describe(self, cell: Cell, part: CellPart, deadline: float) -> str:
        """Return a sentence on a worker that has not ended its cell: where it is, and how to restart it; or ""."""
        await _wait_until(lambda: part.done or not part.breaks_off or part.reply is None, deadline)
        if part.done:
            return ""
        name = part.worker
        if not self._is_next(cell, part):
            return f"{name} has not begun this cell and will skip it: it still runs an earlier one"
        frames = await self._main_frames(name)
        while _formats_traceback(frames) and not part.done:
            if time.monotonic() > deadline:
                return f"{name} has stopped, but still formats its traceback; `%dist_restart {name}` starts it again"
            await _wait_until(lambda: part.done, time.monotonic() + ANSWER_WITHIN)
            frames = await self._main_frames(name)
            if not _formats_traceback(frames):  # the traceback is done, and the reply arrives in a moment
                await _wait_until(lambda: part.done, time.monotonic() + NAME_AFTER)
        if part.done:
            return ""
        place = _say_place(frames, cell)
        return (
            f"{name} did not stop within {NAME_AFTER:g} s of the interrupt{place}; "
            f"`%dist_restart {name}` kills it and starts it again"
        )

    async def _main_frames(self, worker: str) -> list[CodeLine]:
        """Return the frames of a worker's main thread, innermost first; [] if its host has none within a second."""
        with contextlib.suppress(Exception):  # the worker ends, or its host cannot be reached
            seen = await asyncio.wait_for(asyncio.wrap_future(self._launcher.probe(worker)), 1.0)
            return read_frames(seen.frames)
        return []


def stop_served_calls() -> None:
    """Raise KeyboardInterrupt in the calls that this worker runs for others. The notebook calls this on the worker."""
    if (agent := active_agent()) is not None:
        agent.stopping.stop_served()


async def _wait_until(happened: Callable[[], bool], deadline: float) -> None:
    # ``deadline`` is by `time.monotonic`.
    while not happened() and time.monotonic() < deadline:
        await asyncio.sleep(_POLL)


def _formats_traceback(frames: Sequence[CodeLine]) -> bool:
    # To show it, or to keep it with the cell.
    return any(frame.function in _TRACEBACK_FORMATTERS and "/IPython/core/" in frame.file for frame in frames)


def _say_place(frames: Sequence[CodeLine], cell: Cell) -> str:
    """Return in words, to end a sentence, the innermost of these frames, and the line of the cell that called it."""
    if not frames:
        return ""
    inner = frames[0]
    of_cell = next((frame.number for frame in frames if is_cell(frame.file, cell.source)), None)
    called = f", called by line {of_cell} of its cell" if of_cell else ""
    if is_cell(inner.file, cell.source):
        return f" (it is in line {inner.number} of its cell)"
    return f" (it is in {inner.function_and_line}{called})"
