"""`PageDebugger`: JupyterLab's debugger, turned to one worker instead of the notebook's kernel.

::

    page ── debug_request ──► notebook's kernel ──► the worker's kernel, in which debugpy stops code
    page ◄── debug_event ──── notebook's kernel ◄── the worker's kernel

A page sets breakpoints in files that it names after the texts of its cells. `nbdist.cluster.worker.debugged_page` gives
the worker's cells these names.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from nbdist.autograd.api import recorder
from nbdist.cluster.jupyter.kernel_connection import KernelThread
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.stops import Stops
from nbdist.errors import NbdistError
from nbdist.rpc.agent import Agent
from nbdist.wire.messages import Record

_ANSWERS_WITHIN = 5.0  # seconds; the agent of a worker answers, too, while its main thread stands still


class PageDebugger:
    """Lets a page debug a worker in place of the notebook's kernel, until `close`. Made in the main thread."""

    def __init__(self, shell: Any, worker: Worker, thread: KernelThread, agent: Agent, stops: Stops) -> None:
        self.worker = worker
        self._stops = stops
        self._shell = shell
        self._thread = thread
        self._page = agent.at(worker.name, "page")
        self._page.ask("follow", "", timeout=_ANSWERS_WITHIN)
        shell.kernel.do_debug_request = self._forward  # hides the class's own method
        shell.events.register("pre_run_cell", self._begin)
        worker.on_debug_event = self._on_event
        self._forget = agent.on_lost(self._on_lost)

    def close(self) -> None:
        """Let the page debug the notebook's kernel again. A second call does nothing."""
        if self.worker.on_debug_event is None:
            return
        self.worker.on_debug_event = None
        self._forget()
        self._shell.events.unregister("pre_run_cell", self._begin)
        del self._shell.kernel.do_debug_request
        self._hold(False)
        with contextlib.suppress(NbdistError):  # the worker is gone, or the whole cluster
            self._page.ask("leave", timeout=_ANSWERS_WITHIN)

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] in ("stopped", "continued", "terminated"):
            self._hold(event["event"] == "stopped")
        kernel = self._shell.kernel
        kernel.session.send(kernel.iopub_socket, "debug_event", event, parent=kernel.get_parent("control"))

    def _on_lost(self, record: Record, _: str) -> None:
        if record.name == self.worker.name:
            self._hold(False)

    def _hold(self, stands: bool) -> None:
        """Stop the clocks of all members while the worker stands, as a debugger of ours does; or let them run on."""
        if stands:
            self._stops.hold(self.worker.name, "a line that JupyterLab shows")
        else:
            self._stops.left(self.worker.name)
        with contextlib.suppress(NbdistError):  # RPC has ended in this process
            recorder().freeze(self, stands)

    def _begin(self, info: Any) -> None:
        with contextlib.suppress(NbdistError):  # the cell says what is wrong with the worker
            self._page.ask("follow", info.raw_cell, timeout=_ANSWERS_WITHIN)

    async def _forward(self, request: dict[str, Any]) -> dict[str, Any]:
        # In the thread of the notebook's control channel, also while a cell runs.
        try:
            reply = await asyncio.wrap_future(self._thread.run(self._ask(request)))
        except (NbdistError, RuntimeError) as error:
            answer = {"type": "response", "request_seq": request["seq"], "command": request["command"]}
            return {**answer, "success": False, "message": str(error)}
        return dict(reply["content"])

    async def _ask(self, request: dict[str, Any]) -> Any:
        if self.worker.kernel is None or not self.worker.alive:
            raise NbdistError(f"{self.worker.name} {self.worker.say_lost()}")
        return await self.worker.kernel.ask("debug_request", request, channel="control")
