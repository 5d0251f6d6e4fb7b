"""Shows the prints of functions that run for RPCs, under the cell that called them, labelled with the worker's name."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from nbdist.cluster.jupyter import labels
from nbdist.cluster.jupyter.kernel_connection import KernelThread, Message
from nbdist.cluster.jupyter.versions import send_text
from nbdist.cluster.output.arranger import Published
from nbdist.cluster.output.outlet import Outlet, make_arranger
from nbdist.cluster.output.sinks import Sink, current_sink

_CELLS_KEPT = 500  # late output of calls of older cells is not shown


class Origin:
    """A cell of the notebook that called functions on workers. Shows the output of these calls."""

    def __init__(self, thread: KernelThread, names: Sequence[str], sink: Sink) -> None:
        self.sink = sink
        self.number = labels.cell_number() or 0
        self._outlet = Outlet(thread, make_arranger(names, sink, labels=True), sink, self.number)
        for name in names:
            # Other workers may not have been called: no line waits for them to print the same.
            thread.soon(self._outlet.ended, name)

    def on_output(self, worker: str, message: Message) -> None:
        """Show output that a worker sent for a call of this cell, perhaps after its end. In the kernel thread."""
        kind = message["msg_type"]
        if kind not in ("status", "execute_input", "iopub_welcome"):
            metadata, buffers = message.get("metadata") or {}, message.get("buffers") or ()
            self._outlet.feed(worker, Published(kind, message["content"], metadata, buffers))

    async def finish(self) -> None:
        """Show the output that is held back. `settle` runs this, once the calls' output has arrived or is late."""
        self._outlet.finish()


class Origins:
    """The cells of the notebook that have called functions on workers."""

    def __init__(self, thread: KernelThread, names: Callable[[], Sequence[str]]) -> None:
        """Know no cell yet; ``names()`` returns the names of the workers, of which there may be more later."""
        self._thread = thread
        self._names = names
        self._known: OrderedDict[str, Origin] = OrderedDict()
        self._lock = threading.Lock()

    def current(self) -> str:
        """Return the key (`Sink.key`) of the place where the calling thread's output is shown, such as a cell."""
        send_text()  # what was printed here before the call comes first
        sink = current_sink()
        # It travels with the calls that the thread makes; workers send it back with what these calls print.
        key = sink.key
        if key not in self._known:
            with self._lock:
                if key in self._known:  # another thread of the cell was first; output would come to two places
                    return key
                self._known[key] = Origin(self._thread, self._names(), sink)
                if len(self._known) > _CELLS_KEPT:
                    self._known.popitem(last=False)
        return key

    def find(self, key: str) -> Origin | None:
        """Return the cell with this key; None if it is none of the newest `_CELLS_KEPT` ones."""
        return self._known.get(key)
