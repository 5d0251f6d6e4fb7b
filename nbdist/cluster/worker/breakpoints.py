"""Breakpoints that `%dist_break` sets on this worker, in code that stays as it is.

::

    Python 3.12 and newer    `_Monitored`: events of `sys.monitoring`, at the lines of code that has a breakpoint; all
                             other code costs one event, when it first runs
    Python 3.11              `_Traced`: a trace function, which each call of a Python function calls, in cells, calls by
                             RPC and threads that begin after the breakpoint was set

A place is compared with the code that runs, so a function that is defined anew keeps its breakpoints. Without any, this
leaves no trace function and no event behind.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Sequence
from itertools import chain
from types import CodeType, FrameType
from typing import Any, NamedTuple

from nbdist.cluster.worker.debugger import DEBUGGER, stop_at
from nbdist.code_places import CELLS, is_of_cell, is_users, shown_name
from nbdist.rpc.agent import Agent
from nbdist.thread_frames import outwards, thread_frames


class Breakpoint(NamedTuple):
    """A breakpoint as the notebook sends it."""

    number: int
    file: str
    """The end of a path, or a cell such as ``In[7]``; empty for a function."""
    line: int
    function: str
    """The end of a name such as ``losses.Focal.forward``; empty for a line."""
    condition: str


class Breakpoints:
    """The breakpoints of this worker. The notebook may call `replace`."""

    def __init__(self, shell: Any) -> None:
        self.agent: Agent | None = None
        self._all: Sequence[Breakpoint] = ()
        self._cells: dict[str, set[str]] = {}  # the files that a cell's number stood for when its breakpoint was set
        self._stops: dict[tuple[CodeType, str], dict[int, list[Breakpoint]]] = {}
        shell.events.register("pre_run_cell", self._arm)
        DEBUGGER.on_end = self.resume

    def replace(self, breakpoints: Sequence[Breakpoint]) -> None:
        """Have these breakpoints and no others."""
        self._all = breakpoints
        for each in breakpoints:
            self._cells.setdefault(each.file, {file for file in list(CELLS) if shown_name(file) == each.file})
        self._stops.clear()
        self._switch()

    def resume(self, frame: FrameType) -> None:
        """Stop again in the calling thread, in whose innermost frame, which is given, a debugger has ended to step."""

    def _arm(self, *_: object) -> None:
        """Stop in the calling thread, which begins a cell or a call."""

    def _switch(self) -> None:
        raise NotImplementedError

    def stops_in(self, code: CodeType) -> dict[int, list[Breakpoint]]:
        """Return the breakpoints of a code object, by line."""
        key = code, code.co_filename  # with the name: equal code of two files is the same key
        if (stops := self._stops.get(key)) is None:
            stops = self._stops[key] = {}
            for each in self._all:
                if (line := self._line_in(each, code)) is not None:
                    stops.setdefault(line, []).append(each)
        return stops

    def _is_in(self, name: str, file: str) -> bool:
        if is_of_cell(file):
            return shown_name(file) == name or file in self._cells.get(name, ())
        return bool(name) and f"/{file}".endswith(f"/{name}")

    def _line_in(self, breakpoint: Breakpoint, code: CodeType) -> int | None:
        """Return the line of a code object at which a breakpoint stops, or None."""
        lines, line = _lines_of(code), breakpoint.line
        if breakpoint.function:
            return lines[0] if _is_named(code, breakpoint.function) else None
        if not self._is_in(breakpoint.file, code.co_filename):
            return None
        inside = [each for each in code.co_consts if isinstance(each, CodeType) and each.co_name[0] != "<"]
        if any(each.co_firstlineno <= line <= max(_lines_of(each)) for each in inside):
            return None  # the function inside stops, and not its definition
        # The next line after one without code, such as a comment; but top-level code has run already.
        is_within = _is_function(code) and code.co_firstlineno <= line
        return min((each for each in lines if each == line or (is_within and each > line)), default=None)

    def hit(self, frame: FrameType, line: int) -> bool:
        """Stop in a frame at a line that has breakpoints, if the condition of one is true there; else return False."""
        is_hit = any(_holds(each, frame) for each in self.stops_in(frame.f_code).get(line, ()))
        if is_hit:
            stop_at(frame)
        return is_hit


def _holds(breakpoint: Breakpoint, frame: FrameType) -> bool:
    try:
        return not breakpoint.condition or bool(eval(breakpoint.condition, {**frame.f_globals, **frame.f_locals}))
    except Exception as error:
        told = f"{breakpoint.condition!r} raises {type(error).__name__}: {error}"
        print(f"breakpoint {breakpoint.number} stops, as its condition {told}", file=sys.stderr)
        return True


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_NEWLOCALS)


def _lines_of(code: CodeType) -> list[int]:
    """Return the lines at which code can stop, in order; for a function, without the line of its ``def``."""
    lines = sorted({line for *_, line in code.co_lines() if line}) or [code.co_firstlineno]
    return [line for line in lines if line > code.co_firstlineno or not _is_function(code)] or lines


def _is_named(code: CodeType, name: str) -> bool:
    """Return whether a function has a name that ends so; a function of a package needs its module's name, too."""
    parts, own = name.split("."), code.co_qualname.split(".")
    path = code.co_filename.removesuffix(".py").removesuffix("/__init__").split("/")
    is_far = len(parts) <= len(own) and not is_users(code.co_filename)
    return _is_function(code) and not is_far and [*path, *own][-len(parts) :] == parts


class _Traced(Breakpoints):
    """Breakpoints by a trace function of each thread."""

    _around: Any = None  # of the agent's calls, while this has replaced it
    _names: frozenset[str] = frozenset()  # of functions that have a breakpoint, without their modules
    _other_files: frozenset[str] = frozenset()  # those without one that have run code

    def _switch(self) -> None:
        self._names, self._other_files = frozenset(each.function.rpartition(".")[2] for each in self._all), frozenset()
        threading.settrace(self._trace if self._all else None)  # type: ignore[arg-type, unused-ignore]
        if self.agent is not None and bool(self._all) != bool(self._around):
            executor, plain = self.agent.executor, self._around
            self._around = None if plain else executor.around
            executor.around = plain or self._armed

    def _armed(self, origin: str) -> Any:
        self._arm()
        return self._around(origin)

    def _arm(self, *_: object) -> None:
        # A debugger or a profiler of the user's keeps the thread.
        if self._all and sys.gettrace() is None:
            sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_filename in self._other_files and code.co_name not in self._names:
            return None
        if not self._all:
            sys.settrace(None)  # each thread ends it itself
        elif self.stops_in(code):
            return self._trace_lines
        elif not any(self._is_in(each.file, code.co_filename) for each in self._all):
            self._other_files |= {code.co_filename}
        return None

    def _trace_lines(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and self.hit(frame, frame.f_lineno):
            if sys.gettrace() not in (None, self._trace):
                return frame.f_trace  # of a debugger, which steps
            self.resume(frame)
        return self._trace_lines

    def resume(self, frame: FrameType) -> None:
        """Trace again what a debugger has ended to trace."""
        sys.settrace(self._trace if self._all else None)
        for each in outwards(frame):
            if self.stops_in(each.f_code):
                each.f_trace = self._trace_lines


class _Monitored(Breakpoints):
    """Breakpoints by events of `sys.monitoring`, in all threads; debuggers leave these alone."""

    _tool: int | None = None
    _watched: Sequence[CodeType] = ()  # that have events for their lines

    def _switch(self) -> None:
        self._monitoring: Any = vars(sys)["monitoring"]
        events = self._monitoring.events
        if self._tool is None:
            # Debuggers, coverage and profilers use the others.
            self._tool = next(each for each in (4, 3) if self._monitoring.get_tool(each) is None)
            self._monitoring.use_tool_id(self._tool, "nbdist")
            self._monitoring.register_callback(self._tool, events.PY_START, self._on_start)
            self._monitoring.register_callback(self._tool, events.LINE, self._on_line)
        for code in self._watched:
            self._monitoring.set_local_events(self._tool, code, 0)
        self._watched = ()
        self._monitoring.set_events(self._tool, events.PY_START if self._all else 0)
        self._monitoring.restart_events()  # those disabled for other breakpoints
        for frame in chain.from_iterable(map(outwards, thread_frames().values())):
            self._on_start(frame.f_code, 0)  # it runs already
        if not self._all:
            self._monitoring.free_tool_id(self._tool)
            self._tool = None

    def _on_start(self, code: CodeType, _: int) -> Any:
        if self.stops_in(code):
            self._watched = [*self._watched, code]
            self._monitoring.set_local_events(self._tool, code, self._monitoring.events.LINE)
        return self._monitoring.DISABLE

    def _on_line(self, code: CodeType, line: int) -> Any:
        if line not in self.stops_in(code):
            return self._monitoring.DISABLE
        return self.hit(sys._getframe(1), line)


BreakpointsHere = _Monitored if sys.version_info >= (3, 12) else _Traced
"""The class of this Python."""
