"""Measures how long work takes on a GPU, and never waits for the GPU in a thread that does the work.

::

    begin(device)    records an event in the thread's current stream      ... kernels ...      end() records another
                                                                                 |
    is_over()        asks whether the GPU has come to the second event; does not wait
    seconds          the time between the two, once it is over
    when_over(...)   looks in a thread of its own until it is over, and then calls a function

The time is that between two moments of one stream. If the GPU lags behind the processor, as it does under load, this is
the time of the kernels. If the stream has nothing to do meanwhile, its waiting counts, too.

If CUDA fails, nothing here raises an error: the work itself must report the failure, and the span has no time.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from nbdist.finalisers import this_thread

CUDA_IS_BUILT = torch.backends.cuda.is_built()
"""True if this torch can use GPUs. Code for GPUs checks it first, so that other builds of torch pay for no call."""

# Seconds between two looks at a span. To wait for a CUDA event, a thread would use a whole core, or hold up others.
_LOOK_EVERY = 0.005
_LONGEST_WAIT = 60.0  # seconds after which `when_over` goes on without the times of a GPU that hangs

_log = logging.getLogger("nbdist.gpus")


class GpuSpan:
    """The time that a GPU's stream takes from `begin` to `end`. The thread that made it ends it; any may read it."""

    __slots__ = ("_first", "_has_failed", "_last", "_stream")

    def __init__(self, device: torch.device) -> None:
        """Record the first event in the calling thread's current stream of a GPU. Raises RuntimeError if CUDA fails."""
        self._has_failed = False
        self._stream = torch.cuda.current_stream(device)
        self._first = torch.cuda.Event(enable_timing=True)
        self._last = torch.cuda.Event(enable_timing=True)
        self._first.record(self._stream)

    def end(self) -> GpuSpan:
        """Record the last event, in the same stream; return the span itself."""
        try:
            self._last.record(self._stream)  # not the current stream, which may be another one by now
        except RuntimeError:
            self._has_failed = True
        return self

    def is_over(self) -> bool:
        """Return whether the GPU has come to the end of the span; also True if CUDA fails. Call it after `end`."""
        try:
            return self._has_failed or bool(self._last.query())
        except RuntimeError:
            return True

    @property
    def seconds(self) -> float | None:
        """The length of the span in seconds, once `is_over`; None if CUDA cannot tell."""
        if self._has_failed:
            return None
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
    """Return a span that begins now on a GPU; None for the CPU, while a CUDA graph is recorded, or if CUDA fails."""
    if not CUDA_IS_BUILT or device is None or device.type != "cuda":
        return None
    try:
        return None if torch.cuda.is_current_stream_capturing() else GpuSpan(device)
    except RuntimeError:
        return None


_waiting: queue.SimpleQueue[tuple[Sequence[GpuSpan], Callable[[], object]]] = queue.SimpleQueue()
_thread: threading.Thread | None = None
# Held while `_thread` is started: several workers of one process may report at the same moment.
_starting = threading.Lock()


def when_over(spans: Sequence[GpuSpan], then: Callable[[], object]) -> None:
    """Have a thread wait until all spans are over, 60 s at most, and then call ``then()``. Returns at once.

    If the system has no room for another thread, ``then()`` is called now. An error that it raises is logged.
    """
    global _thread
    try:
        with _starting:
            # In a forked process, the parent's thread is not alive; nor is one that could not start.
            if _thread is None or not _thread.is_alive():
                _thread = threading.Thread(target=_run, name="nbdist-gpu-spans", daemon=True)
                _thread.start()
    except RuntimeError:
        then()
    else:
        _waiting.put((spans, then))


def _run() -> None:
    this_thread.is_closed = True  # a finaliser of the user's may run here, and must not wait for a call
    while True:
        spans, then = _waiting.get()
        _wait_for(spans)
        try:
            then()
        except Exception:  # the caller's function: its error must not end the one thread for all spans
            _log.exception("times of a GPU could not be passed on")
        del spans, then  # they would otherwise live until the next spans arrive


def _wait_for(spans: Sequence[GpuSpan]) -> None:
    deadline = time.monotonic() + _LONGEST_WAIT  # one for all spans: those of a GPU that hangs do not add up
    for span in spans:
        while not span.is_over() and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
