"""Brings what workers' kernels say to the cell that caused it, also after that cell has ended."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from nbdist.cluster.cells import Cell
from nbdist.cluster.comms import Comms
from nbdist.cluster.kernels import KernelThread, Message
from nbdist.cluster.origins import Origin, Origins
from nbdist.cluster.worker_output import FENCE, NAMES
from nbdist.cluster.workers import Worker

__all__ = ["Router"]

_REMEMBERED = 2000
"""How many cells are remembered for what still comes from them."""


class Router:
    """Knows to which cell a message belongs. Of the kernel thread, but for `settle`."""

    def __init__(self, thread: KernelThread, names: Sequence[str]) -> None:
        self.origins = Origins(thread, names)
        self.comms = Comms(thread)
        self._thread = thread
        self._cells: OrderedDict[str, Cell] = OrderedDict()
        self._fences: dict[str, _Fence] = {}

    def expect(self, id: str, cell: Cell) -> None:
        """What comes for a request of that id belongs to this cell."""
        self._cells[id] = cell
        if len(self._cells) > _REMEMBERED:
            done = next((old for old, known in self._cells.items() if known.done), None)
            if done is not None:
                del self._cells[done]

    def on_message(self, worker: Worker, channel: str, message: Message) -> None:
        """A kernel says something that is no awaited reply."""
        if channel == "iopub":
            self._on_output(worker, message)
            return
        cell = self._cells.get(message["parent_header"].get("msg_id", ""))
        if cell is not None and channel == "shell":
            cell.on_reply(worker.name, message["content"])
        elif cell is not None and channel == "stdin":
            cell.on_input(worker.name, message)

    def _on_output(self, worker: Worker, message: Message) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == FENCE:
            if (fence := self._fences.get(content["token"])) is not None:
                fence.pass_one()
            return
        if kind == NAMES:
            worker.names = content["names"]
            return
        if kind == "execute_input":  # what an earlier cell has written says nothing of how this one ends
            worker.stderr.clear()
        if kind.startswith("comm_"):
            self.comms.from_worker(worker, message)
        id = message["parent_header"].get("msg_id", "")
        found = self._cells.get(id) or self.origins.find(id) or self.comms.find(message)
        if kind == "stream":
            worker.remember(content["name"], content["text"], found.number if found is not None else 0)
        if found is not None:
            found.on_output(worker.name, message)

    # -- at the end of a cell -----------------------------------------------------------------

    def settle(self, origin: Origin, workers: Sequence[Worker], ask: Callable[[str, str], bool], within: float) -> None:
        """Show what a cell's calls have put out, once all of it has come, or ``within`` seconds have passed.

        ``ask(worker, token)`` has a worker send a mark behind its output so far, and returns whether the worker could
        be asked.
        """
        token = os.urandom(8).hex()
        self._fences[token] = fence = _Fence(len(workers))
        for worker in workers:
            if not ask(worker.name, token):
                fence.pass_one()
        fence.all_passed.wait(within)
        del self._fences[token]

        async def finish() -> None:
            origin.finish()

        self._thread.run(finish()).result()


class _Fence:
    """Opens when so many have passed it."""

    def __init__(self, awaited: int) -> None:
        self.all_passed = threading.Event()
        self._awaited = awaited
        self._lock = threading.Lock()

    def pass_one(self) -> None:
        with self._lock:
            self._awaited -= 1
            if self._awaited <= 0:
                self.all_passed.set()
