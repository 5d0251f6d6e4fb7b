"""Waits for GPUs in a thread of its own, so that nobody else has to.

What a process has asked of a GPU may still wait in its streams when the last tensor that it works on is collected.
Memory that torch does not manage must stay as it is until then: it may neither be unmapped nor be used again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

import torch

from nbdist.finalisers import this_thread

__all__ = ["start", "when_done"]

_GATHER = 0.005
"""Seconds for which requests are gathered: waiting for a GPU once is cheaper than once for each."""
_AGAIN_AFTER = 0.1
"""Seconds after which a GPU that could not be waited for is tried again."""

_waiting: queue.SimpleQueue[tuple[int, Callable[[], object]]] = queue.SimpleQueue()
"""The functions to call, each with the number of its GPU. A finaliser may call `put`, with any lock held."""
_thread: threading.Thread | None = None


def start() -> None:
    """Start the thread if it does not run. Raises RuntimeError if the system has no room for another thread."""
    global _thread
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_run, name="nbdist-gpu", daemon=True)
        _thread.start()


def when_done(index: int, then: Callable[[], object]) -> None:
    """Have the thread call ``then()`` when GPU ``index`` has done all that this process has asked of it so far.

    Returns at once. Any thread may call this at any moment, finalisers too.
    """
    _waiting.put((index, then))


def _run() -> None:
    """Call what waits, for ever."""
    this_thread.is_closed = True  # a finaliser of the user's may run here, and must not wait for a call
    while True:
        batch = [_waiting.get()]
        time.sleep(_GATHER)
        with contextlib.suppress(queue.Empty):
            while True:
                batch.append(_waiting.get_nowait())
        done = {index: _is_done(index) for index in {index for index, _ in batch}}
        for index, then in batch:
            if done[index]:
                then()
            else:
                _waiting.put((index, then))
        batch.clear()
        if not all(done.values()):
            time.sleep(_AGAIN_AFTER)


def _is_done(index: int) -> bool:
    """Wait for GPU ``index``; return False if that is not possible now, such as while a CUDA graph is captured."""
    try:
        torch.cuda.synchronize(index)
    except (RuntimeError, AssertionError):  # torch asserts that it was built for CUDA
        return False
    return True
