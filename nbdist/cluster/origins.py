"""Shows what functions print for RPCs under the cell that called them, with the worker's name before each line."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from nbdist.cluster.arrange import Arranger, Published
from nbdist.cluster.grouped import Grouped
from nbdist.cluster.kernels import KernelThread, Message
from nbdist.cluster.live import Live
from nbdist.cluster.sinks import Sink, current_sink

__all__ = ["Origin", "Origins"]

_REMEMBERED = 500


class Origin:
    """One cell of the notebook, as far as it called functions elsewhere."""

    def __init__(self, thread: KernelThread, names: Sequence[str], sink: Sink) -> None:
        self._thread = thread
        self.sink = sink
        self._arranger: Arranger = Live(names) if sink.interactive else Grouped(names)
        for name in names:
            self._arranger.ended(name, time.monotonic())  # nobody waits for others to say the same
        self._timer: Any = None

    def on_output(self, worker: str, message: Message) -> None:
        """Something was put out for a call of this cell; in the kernel thread."""
        kind = message["msg_type"]
        if kind in ("status", "execute_input", "iopub_welcome"):
            return
        published = Published(kind, message["content"], message.get("metadata") or {}, message.get("buffers") or ())
        self._publish(self._arranger.feed(worker, published, time.monotonic()))

    def finish(self) -> None:
        """The cell has ended, and what it caused has come."""
        self._publish(self._arranger.finish(time.monotonic()))

    def _publish(self, published: list[Published]) -> None:
        for message in published:
            self.sink.publish(*message)
        due = self._arranger.next_flush()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = self._thread.loop.call_later(max(0.0, due - time.monotonic()), self._flush)

    def _flush(self) -> None:
        self._timer = None
        self._publish(self._arranger.flush(time.monotonic()))


class Origins:
    """The cells of the notebook that have called functions elsewhere."""

    def __init__(self, thread: KernelThread, names: Sequence[str]) -> None:
        self._thread = thread
        self._names = names
        self._known: OrderedDict[str, Origin] = OrderedDict()
        self._lock = threading.Lock()

    def current(self) -> str:
        """The id of the cell for which the calling thread works; it travels with calls."""
        sink = current_sink()
        if sink.id not in self._known:
            with self._lock:
                self._known[sink.id] = Origin(self._thread, self._names, sink)
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        return sink.id

    def find(self, id: str) -> Origin | None:
        """The cell of that id."""
        return self._known.get(id)
