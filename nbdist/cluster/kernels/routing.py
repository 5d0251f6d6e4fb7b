"""Routes the messages of workers' kernels to the cells that caused them, even after these cells have ended.

::

    iopub   a fence     the `settle` that waits for it
            names       `Worker.names`, for completion
            collectives `Worker.histories`
            a debugger's `Worker.on_debug_event`
            a cell's    `Cell.on_output`
            a call's    `Origin.on_output`
            a widget's  `Relayed.on_output`
    shell               `Cell.on_reply`
    stdin               `Cell.on_input`
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from nbdist.cluster.group_history import GroupHistory
from nbdist.cluster.jupyter.jupyter_wire import COLLECTIVES, FENCE, NAMES
from nbdist.cluster.jupyter.kernel_connection import KernelThread, Message
from nbdist.cluster.kernels.cells import Cell
from nbdist.cluster.kernels.comms import Comms
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.output.origins import Origin, Origins

# The number of execute requests, one for each worker of a cell, whose cells are kept for late output.
_CELLS_KEPT = 2000


class Router:
    """Knows to which cell a message belongs. All methods but `settle` are for the kernel thread.

    ``names()`` returns the names of the workers, of which there may be more later.
    """

    def __init__(self, thread: KernelThread, names: Callable[[], Sequence[str]]) -> None:
        self.origins = Origins(thread, names)
        self.comms = Comms(thread)
        self._thread = thread
        self._cells: OrderedDict[str, Cell] = OrderedDict()
        self._fences: dict[str, threading.Semaphore] = {}  # by token; each worker that has passed one releases it once

    def expect(self, id: str, cell: Cell) -> None:
        """Register a cell for the messages that belong to the request ``id``. Called before the request is sent."""
        self._cells[id] = cell
        if len(self._cells) > _CELLS_KEPT:
            # The oldest request whose cell has ended: a cell that runs keeps its place, however many there are.
            done = next((old for old, known in self._cells.items() if known.done), None)
            if done is not None:
                del self._cells[done]

    def on_message(self, worker: Worker, channel: str, message: Message) -> None:
        """Handle a message of a kernel that is not a reply to `KernelConnection.ask`."""
        if channel == "iopub":
            self._on_output(worker, message)
            return
        cell = self._cells.get(message["parent_header"].get("msg_id", ""))
        if cell is not None and channel == "shell":
            cell.on_reply(worker.name, message["content"])
        elif cell is not None and channel == "stdin":
            cell.on_input(worker.name, message)

    def _on_output(self, worker: Worker, message: Message) -> None:
        """Find the cell, call or widget message to which output belongs, and pass the output on."""
        kind, content = message["msg_type"], message["content"]
        if kind == FENCE:
            if (fence := self._fences.get(content["token"])) is not None:  # else `settle` waits for it no more
                fence.release()
            return
        if kind == NAMES:
            worker.names, worker.code = content["names"], content["code"]
            return
        if kind == COLLECTIVES:
            worker.histories = msgspec.convert(content["groups"], list[GroupHistory])
            return
        if kind == "debug_event":
            if worker.on_debug_event is not None:
                worker.on_debug_event(content)
            return
        id = message["parent_header"].get("msg_id", "")
        ends = content.get("execution_state") == "idle" and id in self._cells
        if kind == "execute_input" or ends:  # a cell's errors explain no death after the cell, nor in the next one
            worker.stderr.clear()
        if kind.startswith("comm_"):
            self.comms.from_worker(worker, message)
        found = self._cells.get(id) or self.origins.find(id) or self.comms.find(message)
        if kind == "stream":
            # Also text without a known cause, which no cell shows: `%dist_log` has it.
            worker.remember(content["name"], content["text"], found.number if found is not None else 0)
        if found is not None:
            found.on_output(worker.name, message)

    # -- at the end of a cell -----------------------------------------------------------------

    def settle(self, origin: Origin, workers: Sequence[Worker], ask: Callable[[str, str], bool], within: float) -> None:
        """Show the output of a cell's calls (RPCs), once all of it has arrived, or after ``within`` seconds."""
        # ``ask(worker, token)`` makes a worker send a message with the token after its output so far, and returns
        # whether it could be asked. Not in the kernel thread, which gets that message.
        token = os.urandom(8).hex()
        # Before the first worker is asked, whose message may come at once.
        self._fences[token] = fence = threading.Semaphore(0)
        for worker in workers:
            if not ask(worker.name, token):
                fence.release()
        deadline = time.monotonic() + within
        for _ in workers:
            fence.acquire(timeout=max(0.0, deadline - time.monotonic()))
        del self._fences[token]
        self._thread.run(origin.finish()).result()
