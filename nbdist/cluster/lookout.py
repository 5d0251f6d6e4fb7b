"""Shows a line below a cell that has been silent for some seconds; the line says what the cell's workers wait for.

::

    worker0 waits in dist.recv(src=1), In[3]:2, 14 s; worker1 has failed
    worker0,2 wait in dist.all_reduce(), In[7]:7, 12 s; worker1 computes at In[7]:5
    worker0 is still busy with loss.backward(), In[2]:5, 34 s; worker1 is stopped by a signal, 12 s
    worker1 has not released the GIL for 10 s (its cell is at In[3]:4)

    notebook: `Lookout` ── every 2 s of silence ──> worker: `place` ──> `Stands.saw` ──> `Stands.say` ──> the line
                        ── if it does not answer for long ──> its host: `Launcher.probe`

A worker counts as waiting if its main thread is at the same instruction as at the last look, and has used hardly any
processor time since then. The line appears after ``progress_after`` seconds of silence, if all running workers wait, if
one has waited for so long itself, or if one waits and another has ended the cell. It also appears if a worker cannot
begin, because it still runs an earlier cell or a signal such as SIGSTOP has stopped it, and if a worker has not
answered for so long. If its host then gets the frames of its main thread, by a signal, some thread holds the GIL. Each
look updates the line, or removes it. If all workers compute, there is no line.
"""

from __future__ import annotations

import contextlib
import linecache
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from nbdist.cluster.jupyter.labels import is_cell
from nbdist.cluster.output.in_place import InPlace
from nbdist.cluster.processes.probe import Probe, is_stopped
from nbdist.cluster.processes.where import Frame, read_frames
from nbdist.cluster.stands import Position, Stands
from nbdist.code_places import TORCH, is_nbdists, is_torchs, is_users, shown_name
from nbdist.errors import NbdistError
from nbdist.thread_frames import thread_frames

if TYPE_CHECKING:  # workers import this module, but not the notebook's side of cells
    from nbdist.cluster.jupyter.kernel_connection import KernelThread
    from nbdist.cluster.kernels.cells import Cell, CellPart
    from nbdist.cluster.kernels.workers import Worker
    from nbdist.rpc.agent import Agent

__all__ = ["Lookout", "say_where"]

_LOOK_EVERY = 2.0
"""Seconds between two looks."""
_ANSWER_WITHIN = 0.4
"""Seconds for the workers to answer. A worker that holds the GIL cannot."""

_SHOWN = 60
"""The most characters of a line of code that are shown."""

_COLLECTIVE_WRAPPER = f"{TORCH}distributed/c10d_logger.py"
"""The file with torch's wrapper around each collective, which is often the innermost frame of an interrupted one."""

_SHOWN_ARGUMENTS = ("src", "dst", "group_src", "group_dst", "to")
"""The arguments of a call that the line shows: they name the worker for which the call waits."""


# -- on the worker ----------------------------------------------------------------------------------------------


def place() -> Position | None:
    """Return the `Position` of this process's main thread; None if it runs no user code.

    A position is the instruction, the processor time used so far, and the call and line of the user's code. Runs by RPC
    on the worker, in another thread, which can do so as long as the main thread releases the GIL.
    """
    ident = threading.main_thread().ident or 0
    innermost = thread_frames().get(ident)
    if innermost is None:
        return None
    frames = []
    frame: FrameType | None = innermost
    while frame is not None:
        frames.append((frame, frame.f_lineno or frame.f_code.co_firstlineno))
        frame = frame.f_back
    found = _find(frames)
    if found is None:
        return None
    processor = time.clock_gettime(time.pthread_getcpuclockid(ident))
    return Position((id(innermost), innermost.f_lasti), processor, *found)


def say_where(tb: TracebackType | None) -> str:
    """Return the call and the line of user code at which an error with this traceback arose, in words; may be empty."""
    frames = []
    while tb is not None:
        frames.append((tb.tb_frame, tb.tb_lineno))
        tb = tb.tb_next
    found = _find(frames[::-1])
    return f"{found[0]}, {found[1]}" if found is not None else ""


def _find(frames: Sequence[tuple[FrameType, int]]) -> tuple[str, str] | None:
    """Return the call that the user's code is in and its place, such as ``dist.recv(src=0)`` and ``In[3]:2``.

    Returns None if there is no frame of the user's. ``frames`` has frames and line numbers, the innermost first.
    Between the wait and the user's line are frames of torch, nbdist or Python. The outermost of these that is no
    wrapper is the function that the user called.
    """
    called = ""
    for frame, number in frames:
        file = frame.f_code.co_filename
        if is_users(file):
            return called or linecache.getline(file, number).strip()[:_SHOWN], f"{shown_name(file)}:{number}"
        if file == _COLLECTIVE_WRAPPER:
            inside = frame.f_locals
            collective = inside.get("func_name") or getattr(inside.get("func"), "__name__", "")
            called = called or (f"dist.{collective}()" if collective else "")
        elif not _is_wrapper(frame):
            called = _say_call(frame)
    return None


def _is_wrapper(frame: FrameType) -> bool:
    """Return whether a frame belongs to a nested function, such as a decorator's: its name means nothing to a user."""
    return "<locals>" in frame.f_code.co_qualname or "<lambda>" in frame.f_code.co_qualname


def _say_call(frame: FrameType) -> str:
    """Return the call of a frame in words, such as ``dist.recv(src=0)``: the function's name as users write it."""
    code, file = frame.f_code, frame.f_code.co_filename
    space = "dist." if is_torchs(file, "distributed") else "rpc." if is_nbdists(file, "rpc") else ""
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    told = []
    for name in _SHOWN_ARGUMENTS:
        value = frame.f_locals.get(name) if name in parameters else None
        if isinstance(value, int | str):
            told.append(f"{name}={value!r}")
    return f"{space}{code.co_qualname}({', '.join(told)})"


# -- the driver -------------------------------------------------------------------------------------------------


class Lookout:
    """Looks at the workers of a silent cell, and shows the line after ``after`` seconds. In the kernel thread.

    ``probe`` is `Launcher.probe`.
    """

    def __init__(
        self,
        thread: KernelThread,
        agent: Agent,
        probe: Callable[[str], Future[Probe]],
        cell: Cell,
        workers: Sequence[Worker],
        after: float,
    ) -> None:
        self._thread, self._agent, self._probe, self._cell, self._after = thread, agent, probe, cell, after
        self._workers = {worker.name: worker for worker in workers}
        self._stopped: dict[str, float] = {}
        """The workers that a signal has stopped, each with the time at which this was seen first."""
        self._stands = Stands(after)
        self._probes: dict[str, Future[Probe]] = {}
        """The questions of this look to the hosts of workers that do not answer."""
        self._line = InPlace(cell.sink.page)

    def start(self) -> None:
        """Begin to look; stop, and remove the line, when the cell ends.

        Call it once, when the cell has been sent.
        """
        self._cell.when_done(lambda: self._line.show(""))
        self._call_later(self._look, min(_LOOK_EVERY, self._after))

    def _call_later(self, action: Any, seconds: float, *arguments: Any) -> None:
        self._thread.loop.call_later(seconds, action, *arguments)

    def _look(self) -> None:
        """Ask the workers where they are (`place`), if the cell has had no output since about the last look.

        The kernel thread must not wait for their answers. `_judge` therefore runs `_ANSWER_WITHIN` seconds later and
        takes the answers that have arrived by then.
        """
        if self._cell.done:
            return
        asked: dict[str, Any] = {}
        self._probes, now = {}, time.monotonic()
        if now - self._cell.last_output >= min(_LOOK_EVERY, self._after) * 0.9:
            for part in self._running():
                with contextlib.suppress(NbdistError):  # the worker is gone
                    asked[part.worker] = self._agent.call(part.worker, place, timeout=_ANSWER_WITHIN)
            self._probes = {worker: self._probe(worker) for worker in self._stands.unplaced(now) if worker in asked}
        self._call_later(self._judge, _ANSWER_WITHIN, asked)

    def _judge(self, asked: Mapping[str, Any]) -> None:
        """Take the answers that have arrived; show, change or remove the line; and plan the next look.

        ``asked`` has the future of each worker's `Position`, by name.
        """
        if self._cell.done:
            return
        now = time.monotonic()
        held: dict[str, str] = {}
        for part in self._running():
            found, answer = None, asked.get(part.worker)
            if answer is not None and answer.done():
                with contextlib.suppress(Exception):  # the worker died, or the answer is late
                    found = answer.value()
                    answer = None
            if answer is None:
                self._stands.saw(part.worker, found, now)
            else:
                self._stands.heard_nothing(part.worker, now)
            if why := self._say_held(self._workers[part.worker], found, now):
                held[part.worker] = why
        for worker, answer in self._probes.items():
            if answer.done() and (frames := answer.result().frames):
                self._stands.told(worker, _place_of(read_frames(frames), self._cell))
        ended = {part.worker: part.error is not None for part in self._cell.parts.values() if part.done}
        silent = now - self._cell.last_output >= self._after
        running = [part.worker for part in self._running()]
        self._line.show(self._stands.say(running, ended, held, now) if silent else "")
        self._call_later(self._look, max(0.1, min(_LOOK_EVERY, self._after) - _ANSWER_WITHIN))

    def _say_held(self, worker: Worker, found: Position | None, now: float) -> str:
        """Return what keeps a worker from running the cell, in words that follow its name; "" if nothing does."""
        if not worker.host and is_stopped(worker.pid):  # on another host, the worker is lost some seconds later
            return f"is stopped by a signal, {now - self._stopped.setdefault(worker.name, now):.0f} s"
        self._stopped.pop(worker.name, None)
        first = worker.present_cell or self._cell
        place = f"{found.call}, {found.line}" if found else f"In[{first.number}]"
        since = now - (first.parts[worker.name].began or now)
        return f"is still busy with {place}, {since:.0f} s" if first is not self._cell else ""

    def _running(self) -> list[CellPart]:
        """Return the parts of the cell (one for each worker) that have not ended."""
        return [part for part in self._cell.parts.values() if not part.done]


def _place_of(frames: Sequence[Frame], cell: Cell) -> str:
    """Return the innermost line of the user's code among frames, such as ``In[3]:2``; "" if there is none."""
    for frame in frames:
        if is_cell(frame.file, cell.source):
            return f"In[{cell.number}]:{frame.line}"
        if frame.in_cell:
            return f"line {frame.line} of an earlier cell"
        if is_users(frame.file):
            return f"{shown_name(frame.file)}:{frame.line}"
    return ""
