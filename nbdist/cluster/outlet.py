"""Shows what an arranger arranges, in time: for a cell, and for the calls of one. Of the kernel thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from nbdist.cluster.arrange import Arranger, Published
from nbdist.cluster.kernels import KernelThread
from nbdist.cluster.sinks import Sink

__all__ = ["Outlet"]


class Outlet:
    """Joins an arranger, which is pure, with a clock and the place for its messages."""

    def __init__(self, thread: KernelThread, arranger: Arranger, sink: Sink) -> None:
        self._thread = thread
        self._arranger = arranger
        self._sink = sink
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, worker: str, message: Published) -> None:
        """A message of a worker has come."""
        self._show(self._arranger.feed(worker, message, time.monotonic()))

    def ended(self, worker: str) -> None:
        """A worker will say no more, or nothing that others should wait for."""
        self._show(self._arranger.ended(worker, time.monotonic()))

    def move_to(self, sink: Sink) -> None:
        """Show what comes from now on at another place."""
        self._sink = sink

    def finish(self) -> None:
        """All have ended."""
        self._show(self._arranger.finish(time.monotonic()))

    def _flush(self) -> None:
        self._timer = None
        self._show(self._arranger.flush(time.monotonic()))

    def _show(self, published: Sequence[Published]) -> None:
        for message in published:
            self._sink.publish(*message)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._arranger.next_flush()
        if due is not None:
            self._timer = self._thread.loop.call_later(max(0.0, due - time.monotonic()), self._flush)
