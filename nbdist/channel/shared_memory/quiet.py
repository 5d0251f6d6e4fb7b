"""Waits for GPUs in a thread of its own, so that no other thread has to.

When the last tensor in some memory is collected, work of the GPU on this memory may still wait in the GPU's streams. If
torch does not manage the memory, it must neither be unmapped nor used again until that work is done.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

import torch

from nbdist.finalisers import this_thread

_GATHER = 0.005  # seconds for which requests are collected: one wait for a GPU is cheaper than one for each request
_AGAIN_AFTER = 0.1  # seconds after which a wait for a GPU that was impossible is tried again

# The functions to call, each with the number of its GPU. A SimpleQueue: finalisers put into it, with any lock held.
_waiting: queue.SimpleQueue[tuple[int, Callable[[], object]]] = queue.SimpleQueue()
_thread: threading.Thread | None = None


def start() -> None:
    """Start the thread if it does not run. Raises RuntimeError if the system cannot start another thread."""
    global _thread
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_run, name="nbdist-gpu", daemon=True)
        _thread.start()


def when_done(index: int, then: Callable[[], object]) -> None:
    """Let the thread call ``then()`` when GPU ``index`` has finished all work that this process has given it so far.

    Any thread may call this at any moment, even a finaliser.
    """
    _waiting.put((index, then))


def _run() -> None:
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
    """Wait for GPU ``index``; return False if that is impossible now, as while a CUDA graph is captured."""
    try:
        torch.cuda.synchronize(index)
    except (RuntimeError, AssertionError):  # torch asserts that it was built for CUDA
        return False
    return True
