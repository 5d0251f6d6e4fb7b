"""Relays comm messages between widgets of a worker and the front end, both ways.

The front end knows one kernel, the notebook's. So a comm that a worker opens is registered there under its own id,
by a stand-in that hands on what comes for it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from nbdist.cluster.kernels import KernelThread, Message

if TYPE_CHECKING:
    from nbdist.cluster.workers import Worker

__all__ = ["Comms"]


class _StandIn:
    """A worker's comm, in the notebook's register of comms."""

    def __init__(self, relay: Comms, worker: Worker, id: str, target: str) -> None:
        self._relay = relay
        self.worker = worker
        self.comm_id = id
        self.target_name = target

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

    def from_worker(self, worker: Worker, message: Message) -> None:
        """A worker opens or closes a comm; that its messages are shown to the front end is its cell's business."""
        content = message["content"]
        id, manager = content["comm_id"], _manager()
        if manager is None:
            return
        if message["msg_type"] == "comm_open":
            stand_in = self._open[id] = _StandIn(self, worker, id, content["target_name"])
            manager.comms[id] = stand_in
        elif message["msg_type"] == "comm_close":
            self._open.pop(id, None)
            manager.comms.pop(id, None)

    def to_worker(self, comm: _StandIn, kind: str, message: Message) -> None:
        """Hand a message of the front end on."""
        content, buffers = message["content"], [bytes(buffer) for buffer in message.get("buffers") or ()]

        def send() -> None:
            if comm.worker.alive and comm.worker.kernel is not None:
                comm.worker.kernel.send(
                    kind, content, metadata=message.get("metadata"), buffers=buffers, parent=message
                )

        if kind == "comm_close":
            self._open.pop(comm.comm_id, None)
        self._thread.soon(send)

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
