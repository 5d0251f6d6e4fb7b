"""Says where a thread of this process is in the user's code: the call that it waits in, and the line."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterable
from types import FrameType, TracebackType

from nbdist.cluster.stands import Position
from nbdist.code_lines import CodeLine
from nbdist.code_places import TORCH, is_nbdists, is_torchs, is_users
from nbdist.thread_frames import line_number, outwards, thread_frames

_COLLECTIVE_WRAPPER = f"{TORCH}distributed/c10d_logger.py"
"""The file with torch's wrapper around each collective, which is often the innermost frame of an interrupted one."""

_MODULE_CALL = "_wrapped_call_impl"
"""torch's function for the call of a module."""

_SHOWN_ARGUMENTS = ("src", "dst", "group_src", "group_dst", "to")
"""The arguments of a call that the line shows: they name the worker for which the call waits."""


def place() -> Position | None:
    """Return the `Position` of this process's main thread; None if it runs no user code. Runs by RPC."""
    # In another thread, which can do so as long as the main thread releases the GIL.
    ident = threading.main_thread().ident or 0
    innermost = thread_frames().get(ident)
    found = say_place(innermost)
    if innermost is None or found is None:
        return None
    processor = time.clock_gettime(time.pthread_getcpuclockid(ident))
    return Position((id(innermost), innermost.f_lasti), processor, *found)


def say_place(innermost: FrameType | None) -> tuple[str, str] | None:
    """Return the call that the user's code is in and its place, such as ``dist.recv(src=0)`` and ``In[3]:2``."""
    # All frames at once: those of a thread that runs on have no caller any more.
    return _find([(frame, line_number(frame)) for frame in outwards(innermost)])


def say_where(tb: TracebackType | None) -> str:
    """Return the call and the line of user code at which an error with this traceback arose, in words; may be empty."""
    return ", ".join(_find(reversed(list(traceback.walk_tb(tb)))) or ())


def _find(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, str] | None:
    """Return the call and the place of the user's code, as `say_place` does, from frames, the innermost first."""
    # Between the wait and the user's line are frames of torch, nbdist or Python. The outermost of these that is no
    # wrapper is the function that the user called.
    called = ""
    for frame, number in frames:
        file = frame.f_code.co_filename
        if is_users(file):
            line = CodeLine(file, number, frame.f_code.co_name)
            return called or line.text, line.place
        if file == _COLLECTIVE_WRAPPER:
            inside = frame.f_locals
            collective = inside.get("func_name") or getattr(inside.get("func"), "__name__", "")
            called = called or (f"dist.{collective}()" if collective else "")
        elif frame.f_code.co_name == _MODULE_CALL:
            called = ""  # the text of the line names the module
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
    values = {name: frame.f_locals.get(name) for name in _SHOWN_ARGUMENTS if name in parameters}
    told = [f"{name}={value!r}" for name, value in values.items() if isinstance(value, int | str)]
    return f"{space}{code.co_qualname}({', '.join(told)})"
