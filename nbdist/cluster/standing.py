"""Says where each worker stands when a cell goes on and nothing comes of it: one line below the cell.

While a cell is silent, its workers are asked every two seconds where their main threads are. A thread stands in a wait
if it is at the same instruction as before and has used no processor time meanwhile. The line is shown when the silence
has lasted for long enough and either all workers that run wait, or one waits and another has ended. It is written anew
in its place as long as that holds, and taken away otherwise; a cell that computes never has it.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from nbdist.cluster.arrange import say_names
from nbdist.cluster.in_place import InPlace
from nbdist.cluster.status import is_users

if TYPE_CHECKING:
    from nbdist.cluster.cells import Cell, Part
    from nbdist.cluster.cluster import Cluster

__all__ = ["Lookout", "Place", "Stands", "say_where"]

_LOOK_EVERY = 2.0
_ANSWER_WITHIN = 0.4
"""Seconds for the workers to answer; one that holds the GIL cannot, and is taken to compute."""

_AT_REST = 0.05
"""The share of the time between two looks that a waiting thread may spend on the processor."""

_SHOWN = 60
_LOGGER = "/torch/distributed/c10d_logger.py"
"""Holds the wrapper around each collective; an interrupt of a collective often ends in that wrapper."""

_TOLD = ("src", "dst", "group_src", "group_dst", "to")
"""The arguments of a call that say for whom it waits."""


class Place(NamedTuple):
    """Where a worker's main thread is."""

    instruction: tuple[int, int]
    """The innermost frame, by id, and how far it has come."""
    processor: float
    """Seconds of processor time that the thread has used."""
    call: str
    """What the user's code has called, such as ``dist.recv(src=0)``, or the line itself."""
    line: str
    """The line of the user's code, such as ``cell:2``."""


# -- on the worker ----------------------------------------------------------------------------------------------


def place() -> Place | None:
    """Return where this process's main thread is; None if it runs none of the user's code."""
    ident = threading.main_thread().ident or 0
    innermost = sys._current_frames().get(ident)
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
    return Place((id(innermost), innermost.f_lasti), processor, *found)


def say_where(tb: TracebackType | None) -> str:
    """Return what the user's code had called, and from which line, when an error came that has this traceback."""
    frames = []
    while tb is not None:
        frames.append((tb.tb_frame, tb.tb_lineno))
        tb = tb.tb_next
    found = _find(frames[::-1])
    return f"{found[0]}, {found[1]}" if found is not None else ""


def _find(frames: Sequence[tuple[FrameType, int]]) -> tuple[str, str] | None:
    """Return the call and the line of a `Place`, of frames with their lines, the innermost first."""
    called = ""
    for frame, number in frames:
        file = frame.f_code.co_filename
        if is_users(file):
            name = "cell" if "ipykernel" in file else Path(file).name
            return called or linecache.getline(file, number).strip()[:_SHOWN], f"{name}:{number}"
        if file.endswith(_LOGGER):
            inside = frame.f_locals
            collective = inside.get("func_name") or getattr(inside.get("func"), "__name__", "")
            called = called or (f"dist.{collective}()" if collective else "")
        elif not _is_wrapper(frame):
            called = _say_call(frame)
    return None


def _is_wrapper(frame: FrameType) -> bool:
    return "<locals>" in frame.f_code.co_qualname or "<lambda>" in frame.f_code.co_qualname


def _say_call(frame: FrameType) -> str:
    code = frame.f_code
    space = (
        "dist." if "/torch/distributed/" in code.co_filename else "rpc." if "/nbdist/rpc/" in code.co_filename else ""
    )
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    told = []
    for name in _TOLD:
        value = frame.f_locals.get(name) if name in parameters else None
        if isinstance(value, int | str):
            told.append(f"{name}={value!r}")
    return f"{space}{code.co_qualname}({', '.join(told)})"


# -- what is said of it: pure -----------------------------------------------------------------------------------


class Stands:
    """What is known of where the workers of a cell stand: looks in, a line out."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Place]] = {}
        self._since: dict[str, float] = {}

    def saw(self, worker: str, found: Place | None, now: float) -> None:
        """Note what a worker has answered; None if it has not, or runs no code of the user's."""
        if found is None:
            self._last.pop(worker, None)
            self._since.pop(worker, None)
            return
        before = self._last.get(worker)
        self._last[worker] = now, found
        if before is not None:
            then, place = before
            used = found.processor - place.processor
            if found.instruction == place.instruction and used <= _AT_REST * (now - then):
                self._since.setdefault(worker, then)
                return
        self._since.pop(worker, None)

    def say(self, running: Sequence[str], ended: Mapping[str, bool], now: float) -> str:
        """Return the line; empty if there is nothing to say.

        ``ended`` has the workers that have ended the cell, and whether they failed.
        """
        waiting = [worker for worker in running if worker in self._since]
        if not waiting or not (ended or len(waiting) == len(running)):
            return ""
        groups: dict[tuple[str, str], list[str]] = {}
        for worker in waiting:
            found = self._last[worker][1]
            groups.setdefault((found.call, found.line), []).append(worker)
        said = []
        for (call, line), workers in groups.items():
            since = min(self._since[worker] for worker in workers)
            said.append(f"{say_names(workers)} wait{_s(workers)} in {call}, {line}, {now - since:.0f} s")
        if computing := [worker for worker in running if worker not in self._since]:
            said.append(f"{say_names(computing)} compute{_s(computing)}")
        for failed, verb in ((True, "failed"), (False, "ended")):
            if workers := [worker for worker, how in ended.items() if how == failed]:
                said.append(f"{say_names(workers)} {'has' if len(workers) == 1 else 'have'} {verb}")
        return "; ".join(said)


def _s(workers: Sequence[str]) -> str:
    return "s" if len(workers) == 1 else ""


# -- the driver -------------------------------------------------------------------------------------------------


class Lookout:
    """Looks after the silence of one cell. Of the kernel thread."""

    def __init__(self, cluster: Cluster, cell: Cell, after: float) -> None:
        self._cluster = cluster
        self._cell = cell
        self._after = after
        self._stands = Stands()
        self._line = InPlace(cell.sink.page)

    def start(self) -> None:
        """Look from now on, until the cell ends."""
        self._cell.when_done(lambda: self._line.show(""))
        self._later(self._look, min(_LOOK_EVERY, self._after))

    def _later(self, action: Any, seconds: float, *arguments: Any) -> None:
        self._cluster.kernel_thread.loop.call_later(seconds, action, *arguments)

    def _look(self) -> None:
        if self._cell.done:
            return
        asked: Mapping[str, Any] = {}
        if time.monotonic() - self._cell.last_output >= min(_LOOK_EVERY, self._after) * 0.9:
            running = [part.worker for part in self._running()]
            asked = self._cluster.agent.call_each(running, place, timeout=_ANSWER_WITHIN)
        self._later(self._judge, _ANSWER_WITHIN, asked)

    def _judge(self, asked: Mapping[str, Any]) -> None:
        if self._cell.done:
            return
        now = time.monotonic()
        for part in self._running():
            found, answer = None, asked.get(part.worker)
            if answer is not None and answer.done():
                with contextlib.suppress(Exception):  # lost, or late
                    found = answer.value()
            self._stands.saw(part.worker, found, now)
        ended = {part.worker: part.error is not None for part in self._cell.parts.values() if part.done}
        silent = now - self._cell.last_output >= self._after
        self._line.show(self._stands.say([part.worker for part in self._running()], ended, now) if silent else "")
        self._later(self._look, max(0.1, min(_LOOK_EVERY, self._after) - _ANSWER_WITHIN))

    def _running(self) -> list[Part]:
        return [part for part in self._cell.parts.values() if not part.done]
