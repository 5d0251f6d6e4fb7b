"""Shows what functions print for RPCs under the cell that called them, with the worker's name before each line."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from nbdist.cluster import labels
from nbdist.cluster.arrange import Published
from nbdist.cluster.kernels import KernelThread, Message
from nbdist.cluster.outlet import Outlet, make_arranger
from nbdist.cluster.sinks import Sink, current_sink

__all__ = ["Origin", "Origins"]

_REMEMBERED = 500


class Origin:
    """One cell of the notebook, as far as it called functions elsewhere."""

    def __init__(self, thread: KernelThread, names: Sequence[str], sink: Sink) -> None:
        self.sink = sink
        self.number = labels.cell_number() or 0
        self._outlet = Outlet(thread, make_arranger(names, sink, labels=True), sink, self.number)
        for name in names:
            thread.soon(self._outlet.ended, name)  # nobody waits for others to say the same

    def on_output(self, worker: str, message: Message) -> None:
        """Something was put out for a call of this cell; in the kernel thread."""
        kind = message["msg_type"]
        if kind in ("status", "execute_input", "iopub_welcome"):
            return
        self._outlet.feed(
            worker, Published(kind, message["content"], message.get("metadata") or {}, message.get("buffers") or ())
        )

    def finish(self) -> None:
        """The cell has ended, and what it caused has come."""
        self._outlet.finish()


class Origins:
    """The cells of the notebook that have called functions elsewhere."""

    def __init__(self, thread: KernelThread, names: Sequence[str]) -> None:
        self._thread = thread
        self._names = names
        self._known: OrderedDict[str, Origin] = OrderedDict()
        self._lock = threading.Lock()

    def current(self) -> str:
        """Return the key of the place where output of the calling thread belongs; it travels with calls."""
        sink = current_sink()
        key = sink.key
        if key not in self._known:
            with self._lock:
                self._known[key] = Origin(self._thread, self._names, sink)
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        return key

    def find(self, key: str) -> Origin | None:
        """Return the cell whose place for output has that key."""
        return self._known.get(key)
