"""Relays comm messages between widgets of a worker and the front end, both ways.

The front end knows one kernel, the notebook's. So a comm that a worker opens is registered there under its own id,
by a stand-in that hands on what comes for it. What the worker says while it handles that belongs to the front end's
message, as it would here.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbdist.cluster.kernels import KernelThread, Message
from nbdist.cluster.sinks import Sink, sink_of

if TYPE_CHECKING:
    from nbdist.cluster.workers import Worker

__all__ = ["Comms", "own_request"]

_PATIENCE = 1.0
"""Seconds for which the front end's message counts as being handled while the worker handles it."""

_REMEMBERED = 1000


def own_request(content: Mapping[str, Any], theirs: str, ours: str) -> Mapping[str, Any]:
    """A comm message in which a request to a worker is called by the notebook's request that it stands for.

    The front end captures output for an ``Output`` widget by the id of the request to which it belongs.
    """
    data = content.get("data")
    state = data.get("state") if isinstance(data, Mapping) else None
    if not theirs or not isinstance(state, Mapping) or state.get("msg_id") != theirs:
        return content
    return {**content, "data": {**data, "state": {**state, "msg_id": ours}}}  # type: ignore[dict-item]


class Relayed:
    """A message of the front end that a worker handles: whatever comes of it is shown as its own."""

    number = 0
    """It belongs to no cell."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.id = ""
        """As it was handed on."""
        self.handled = threading.Event()

    def on_output(self, worker: str, message: Message) -> None:
        """A message on the output channel of the worker whose parent is this one; in the kernel thread."""
        kind, content = message["msg_type"], message["content"]
        if kind == "status":
            if content["execution_state"] == "idle":
                self.handled.set()
        elif kind not in ("execute_input", "iopub_welcome"):
            shown = own_request(content, self.id, self._sink.id)
            self._sink.publish(kind, shown, message.get("metadata"), message.get("buffers"))


class _StandIn:
    """A worker's comm, in the notebook's register of comms."""

    def __init__(self, relay: Comms, worker: Worker, message: Message) -> None:
        self._relay = relay
        self.worker = worker
        self.life = worker.lives
        self.comm_id = message["content"]["comm_id"]
        self.target_name = message["content"]["target_name"]

    def handle_msg(self, message: Message) -> None:
        """The front end says something to the worker's comm."""
        self._relay.to_worker(self, "comm_msg", message)

    def handle_close(self, message: Message) -> None:
        """The front end closes it."""
        self._relay.to_worker(self, "comm_close", message)


class Comms:
    """The comms of one cluster's workers."""

    def __init__(self, thread: KernelThread) -> None:
        self._thread = thread
        self._open: dict[str, _StandIn] = {}
        self._relayed: OrderedDict[str, Relayed] = OrderedDict()

    def find(self, message: Message) -> Relayed | None:
        """What a worker's message belongs to if not to a cell: to one of the front end that was handed on.

        What is said on a comm reaches the front end even if nothing is known to have caused it.
        """
        found = self._relayed.get(message["parent_header"].get("msg_id", ""))
        if found is None and message["msg_type"].startswith("comm_"):
            return Relayed(sink_of({}))
        return found

    def from_worker(self, worker: Worker, message: Message) -> None:
        """A worker opens or closes a comm; that its messages are shown to the front end is its cell's business."""
        id, manager = message["content"]["comm_id"], _manager()
        if manager is None:
            return
        if message["msg_type"] == "comm_open":
            manager.comms[id] = self._open[id] = _StandIn(self, worker, message)
        elif message["msg_type"] == "comm_close":
            self._open.pop(id, None)
            manager.comms.pop(id, None)

    def to_worker(self, comm: _StandIn, kind: str, message: Message) -> None:
        """Hand a message of the front end on; where the worker has nothing else to do, wait until it is handled."""
        if kind == "comm_close":
            self._open.pop(comm.comm_id, None)
        worker = comm.worker
        if not worker.alive or worker.lives != comm.life:
            return
        relayed = Relayed(sink_of(message))
        self._thread.soon(self._send, relayed, comm, kind, message)
        if not worker.cells:
            relayed.handled.wait(_PATIENCE)

    def _send(self, relayed: Relayed, comm: _StandIn, kind: str, message: Message) -> None:
        kernel = comm.worker.kernel
        if not comm.worker.alive or kernel is None:
            return
        buffers = [bytes(buffer) for buffer in message.get("buffers") or ()]
        metadata = message.get("metadata") or {}
        relayed.id = kernel.send(kind, message["content"], metadata=metadata, buffers=buffers, parent=message)
        self._relayed[relayed.id] = relayed
        if len(self._relayed) > _REMEMBERED:
            self._relayed.popitem(last=False)

    def close(self) -> None:
        """Forget all."""
        manager = _manager()
        for id in list(self._open):
            if manager is not None:
                manager.comms.pop(id, None)
        self._open.clear()


def _manager() -> Any:
    """The register of comms of this process's kernel, if it is one."""
    with contextlib.suppress(Exception):
        from comm import get_comm_manager

        return get_comm_manager()
    return None
