"""Relays comm messages between widgets on workers and the front end, both ways.

The front end knows only the notebook's kernel. So the notebook registers each comm that a worker opens, under the
comm's own id, with a `_StandIn` that passes messages on to the worker::

    front end ── comm_msg ──> _StandIn ── to_worker ──> worker's kernel
    front end <── publish ─── Relayed <── on_output ─── worker's kernel: output while it handles that message

The output that the worker sends while it handles the front end's message belongs to that message, as with one kernel.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from IPython import get_ipython

from nbdist.cluster.jupyter.kernel_connection import KernelThread, Message
from nbdist.cluster.kernels.output_widgets import own_request
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.output.arranger import Published
from nbdist.cluster.output.sinks import Sink, sink_of

# Seconds to wait for an idle worker to handle a message of the front end. Meanwhile the notebook counts as busy.
_HANDLED_WITHIN = 1.0

# So many messages of the front end are kept, to recognise the workers' output for them.
_MESSAGES_KEPT = 1000


class Relayed:
    """A message of the front end that a worker handles; publishes the worker's output for it as the message's own."""

    number = 0  # of the cell that the output belongs to: none

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.id = ""  # of the message to the worker; "" until it is sent
        self.handled = threading.Event()

    def on_output(self, worker: str, message: Message) -> None:
        """Handle a message of the worker's output channel that belongs to this one. Called in the kernel thread."""
        kind, content = message["msg_type"], message["content"]
        if kind == "status":
            if content["execution_state"] == "idle":
                self.handled.set()
        elif kind not in ("execute_input", "iopub_welcome"):
            shown = own_request(content, self.id, self._sink.id)
            self._sink.publish(Published(kind, shown, message.get("metadata") or {}, message.get("buffers") or ()))


class _StandIn:
    """Represents a worker's comm in the notebook kernel's comm manager, which calls it in the main thread."""

    def __init__(self, relay: Comms, worker: Worker, message: Message) -> None:
        self._relay = relay
        self.worker = worker
        self.life = worker.lives  # a restart closes the comms of the worker's earlier life
        self.comm_id = message["content"]["comm_id"]
        self.target_name = message["content"]["target_name"]

    def handle_msg(self, message: Message) -> None:
        self._relay.to_worker(self, "comm_msg", message)

    def handle_close(self, message: Message) -> None:
        self._relay.to_worker(self, "comm_close", message)


class Comms:
    """All comms (message channels of widgets) that one cluster's workers have open."""

    def __init__(self, thread: KernelThread) -> None:
        self._thread = thread
        self._open: dict[str, _StandIn] = {}
        self._relayed: OrderedDict[str, Relayed] = OrderedDict()

    def find(self, message: Message) -> Relayed | None:
        """Return the `Relayed` that shows a worker's message which belongs to no cell; None if there is none."""
        found = self._relayed.get(message["parent_header"].get("msg_id", ""))
        # Without a known cause, such as from a thread: shown outside of any cell.
        if found is None and message["msg_type"].startswith("comm_"):
            return Relayed(sink_of({}))
        return found

    def from_worker(self, worker: Worker, message: Message) -> None:
        """Register the comm that a worker opens, or remove the one that it closes. Does not show the message itself."""
        id, manager = message["content"]["comm_id"], _manager()
        if manager is None:  # no kernel, as in a script
            return
        if message["msg_type"] == "comm_open":
            manager.comms[id] = self._open[id] = _StandIn(self, worker, message)
        elif message["msg_type"] == "comm_close":
            self._open.pop(id, None)
            manager.comms.pop(id, None)

    def to_worker(self, comm: _StandIn, kind: str, message: Message) -> None:
        """Send a message of the front end to the worker. If the worker is idle, wait up to 1 s until it is handled."""
        if kind == "comm_close":
            self._open.pop(comm.comm_id, None)
        worker = comm.worker
        if not worker.alive or worker.lives != comm.life:
            return
        relayed = Relayed(sink_of(message))
        self._thread.soon(self._send, relayed, comm, kind, message)
        if not worker.cells:
            relayed.handled.wait(_HANDLED_WITHIN)

    def _send(self, relayed: Relayed, comm: _StandIn, kind: str, message: Message) -> None:
        """Send the front end's message to the comm's worker, in the kernel thread."""
        kernel = comm.worker.kernel
        if not comm.worker.alive or kernel is None:  # it may have died since `to_worker` looked
            return
        buffers = [bytes(buffer) for buffer in message.get("buffers") or ()]
        metadata = message.get("metadata") or {}
        relayed.id = kernel.send(kind, message["content"], metadata=metadata, buffers=buffers, parent=message)
        self._relayed[relayed.id] = relayed
        if len(self._relayed) > _MESSAGES_KEPT:
            self._relayed.popitem(last=False)

    def close(self) -> None:
        """Remove the workers' comms from the notebook's comm manager. The front end is not told."""
        if (manager := _manager()) is not None:
            for id in list(self._open):
                manager.comms.pop(id, None)
        self._open.clear()


def _manager() -> Any:
    # Not from the package ``comm``, which old versions of ipykernel do not use.
    return getattr(getattr(get_ipython(), "kernel", None), "comm_manager", None)
