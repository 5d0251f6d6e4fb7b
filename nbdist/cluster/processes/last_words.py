"""Saves the *last words* of a worker: the text that it writes to standard error just before it crashes.

Text that C code writes goes through a pipe, which a thread of ipykernel reads. A crashing process usually holds the
GIL: ipykernel's thread would take the text out of the pipe and then never get to show it. Therefore::

    pipe ── tee: copy ──> log file          first (`_watch`)
     └───── read: remove ──> notebook       then
     └───── read ──> log file               by the zygote, if text is left when the worker is dead (`hand_over`)
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from nbdist.cluster.processes.zygote import leave_last_words

_SIZE = 1 << 16  # bytes copied at once: all that a pipe holds


def guard_streams() -> None:
    """Make ipykernel copy C code's output to the worker's log before it takes the text out of the pipe."""
    # Before the kernel starts.
    from ipykernel.iostream import OutStream

    stream: Any = OutStream
    stream._watch_pipe_fd = _watch


def hand_over(file: int) -> None:
    """Let the zygote, the parent process, read this worker's standard error, then ``file``, after its death."""
    # Once the kernel has replaced `sys.stderr` with its pipe. The offset of ``file`` is 0; -1 for none.
    pipe = getattr(sys.stderr, "_fid", None)
    leave_last_words([each for each in (pipe, file) if each not in (None, -1)])


def _watch(stream: Any) -> None:
    """Copy each text in a stream's pipe to the worker's log, then show it, until the stream closes."""
    # In place of the method that ipykernel runs in a thread for each stream.
    if stream._fid is None:
        return
    libc = ctypes.CDLL(None)
    seen, copy = os.pipe()
    try:
        # `tee` copies the text without removing it from the pipe, and waits for text without the GIL.
        while (size := libc.tee(stream._fid, copy, _SIZE, 0)) > 0 and stream._should_watch:
            data = os.read(seen, size)
            os.write(stream._original_stdstream_copy, data)  # before the text leaves the pipe: a crash may come now
            os.read(stream._fid, size)
            stream.write(data.decode(errors="replace"))
    except Exception:
        stream._exc = sys.exc_info()  # where ipykernel looks for the error of this thread
    finally:
        os.close(seen)
        os.close(copy)
