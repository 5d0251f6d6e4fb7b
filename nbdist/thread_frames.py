"""Finds where the threads of this process stand: their frames, and the lines of these."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from nbdist.code_lines import CodeLine
from nbdist.code_places import NBDIST, TORCH


def thread_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread of Python, by the thread's ident."""
    if sys.version_info >= (3, 12):
        return sys._current_frames()
    # Python 3.11's own function makes frame objects while it holds a lock of the interpreter. If that begins a garbage
    # collection that frees a `threading.local`, the thread waits for itself, with the GIL, and the process hangs.
    # Without a lock, which a fork could leave held. Of two threads that look at once, the second may find the collector
    # on again; none leaves it off.
    collects = gc.isenabled()
    try:
        gc.disable()
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, its caller's, and so on; nothing for None."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def line_number(frame: FrameType) -> int:
    """Return the line that a frame is in; its function's first, where it is in none, as while it unwinds."""
    return frame.f_lineno or frame.f_code.co_firstlineno


def lines_of(frame: FrameType | None) -> Iterator[CodeLine]:
    """Yield the lines that a frame, its caller's, and so on are in; nothing for None."""
    return (CodeLine(each.f_code.co_filename, line_number(each), each.f_code.co_name) for each in outwards(frame))


def calling_line() -> tuple[str, int] | None:
    """Return the file and line of the innermost caller outside of nbdist and torch; None without one.

    The file may be Python's own, as in a thread. Keeps no frame alive, and takes about a microsecond.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((NBDIST, TORCH)):
        frame = frame.f_back
    return (frame.f_code.co_filename, line_number(frame)) if frame is not None else None


def thread_name(ident: int) -> str:
    """Return the name of a thread, or its ident if it has ended."""
    return next((each.name for each in threading.enumerate() if each.ident == ident), str(ident))
