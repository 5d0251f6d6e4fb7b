"""Measures how long work takes on a GPU, and never waits for the GPU in a thread that does the work.

::

    begin(device)    records an event in the thread's current stream      ... kernels ...      end() records another
                                                                                 |
    is_over()        asks whether the GPU has come to the second event; does not wait
    seconds          the time between the two, once it is over
    when_over(...)   waits in a thread of its own, and then calls a function

The time is that between two moments of one stream. If the GPU lags behind the processor, as it does under load, this is
the time of the kernels. If the stream has nothing to do meanwhile, its waiting counts, too.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from nbdist.finalisers import this_thread

__all__ = ["GpuSpan", "begin", "device_of", "when_over"]

CUDA_IS_BUILT = torch.backends.cuda.is_built()
"""True if this torch can use GPUs; with other builds, nothing is measured, and nothing is asked."""

_log = logging.getLogger("nbdist.gpus")


class GpuSpan:
    """The time that a GPU's stream takes from `begin` to `end`. The thread that made it ends it; any may read it."""

    __slots__ = ("_first", "_last", "_stream")

    def __init__(self, device: torch.device) -> None:
        """Record the first event in the calling thread's current stream of a GPU."""
        self._stream = torch.cuda.current_stream(device)
        self._first = torch.cuda.Event(enable_timing=True)
        self._last = torch.cuda.Event(enable_timing=True)
        self._first.record(self._stream)

    def end(self) -> GpuSpan:
        """Record the last event, in the same stream; return the span itself. Returns at once."""
        self._last.record(self._stream)
        return self

    def is_over(self) -> bool:
        """Return whether the GPU has come to the end of the span. Also True if CUDA fails: there is nothing to await.

        Call it after `end`.
        """
        try:
            return bool(self._last.query())
        except RuntimeError:
            return True

    def wait(self) -> None:
        """Wait for the end of the span. Returns at once if CUDA fails."""
        try:
            self._last.synchronize()
        except RuntimeError:
            _log.debug("a span on a GPU cannot be waited for", exc_info=True)

    @property
    def seconds(self) -> float | None:
        """The length of the span in seconds, once `is_over`; None if CUDA cannot tell."""
        try:
            return float(self._first.elapsed_time(self._last)) / 1000
        except RuntimeError:
            return None


def device_of(values: Iterable[object]) -> torch.device | None:
    """Return the GPU of the first tensor on a GPU among ``values``; None if there is none. Looks into no containers."""
    if not CUDA_IS_BUILT:
        return None
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return value.device
    return None


def begin(device: torch.device | None) -> GpuSpan | None:
    """Return a span that begins now on a GPU; None for no device, the CPU, or while a CUDA graph is recorded."""
    if not CUDA_IS_BUILT or device is None or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return GpuSpan(device)


_waiting: queue.SimpleQueue[tuple[Sequence[GpuSpan], Callable[[], object]]] = queue.SimpleQueue()
_thread: threading.Thread | None = None


def when_over(spans: Sequence[GpuSpan], then: Callable[[], object]) -> None:
    """Have a thread wait until all spans are over, and then call ``then()``. Returns at once.

    If the system has no room for another thread, ``then()`` is called now. An error that it raises is logged.
    """
    global _thread
    _waiting.put((spans, then))
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_run, name="nbdist-gpu-spans", daemon=True)
        try:
            _thread.start()
        except RuntimeError:
            _thread = None
            then()


def _run() -> None:
    """Wait for spans, for ever, in the order in which they come."""
    this_thread.is_closed = True  # a finaliser of the user's may run here, and must not wait for a call
    while True:
        spans, then = _waiting.get()
        for span in spans:
            span.wait()
        try:
            then()
        except Exception:
            _log.exception("times of a GPU could not be passed on")
        del spans, then
