"""What a worker writes just before it dies reaches its log.

The kernel reads, in a thread, what is written below Python to standard output and error, and shows it. A process that
crashes mostly holds the GIL: then that thread has taken the text out of the pipe, and never gets to write it down.
So it is looked at first, logged, and only then taken out; and what is left in the pipe when the worker is dead, the
zygote reads.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from nbdist.cluster.zygote import leave_last_words

__all__ = ["guard_streams", "hand_over"]

_SIZE = 1 << 16


def guard_streams() -> None:
    """Before the kernel takes the standard streams: have it look before it takes."""
    from ipykernel.iostream import OutStream

    if hasattr(ctypes.CDLL(None), "tee"):  # Linux alone has it
        stream: Any = OutStream
        stream._watch_pipe_fd = _watch


def hand_over() -> None:
    """After that: let the zygote have what may be left."""
    pipe = getattr(sys.stderr, "_fid", None)
    leave_last_words([pipe] if pipe is not None else [])


def _watch(stream: Any) -> None:
    if stream._fid is None:
        return
    libc = ctypes.CDLL(None)
    seen, copy = os.pipe()
    try:
        while (size := libc.tee(stream._fid, copy, _SIZE, 0)) > 0 and stream._should_watch:
            data = os.read(seen, size)
            os.write(stream._original_stdstream_copy, data)
            os.read(stream._fid, size)
            stream.write(data.decode(errors="replace"))
    except Exception:
        stream._exc = sys.exc_info()  # where the kernel looks for it
    finally:
        os.close(seen)
        os.close(copy)
