"""`CellSender`: sends cells to workers, and sees them to their end."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.cluster.collation import Collation
from nbdist.cluster.interrupting import Interrupts
from nbdist.cluster.jupyter import labels
from nbdist.cluster.jupyter.jupyter_wire import pack
from nbdist.cluster.jupyter.kernel_connection import KernelThread, Message
from nbdist.cluster.kernels.cells import Cell, CellOptions
from nbdist.cluster.kernels.routing import Router
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.lifecycle import Lifecycle
from nbdist.cluster.lookout import Lookout
from nbdist.cluster.output.sinks import current_sink
from nbdist.cluster.stops import Stops
from nbdist.cluster.team import Targets, Team
from nbdist.cluster.undoing import undone_by
from nbdist.cluster.worker.output import METADATA
from nbdist.errors import NbdistError, UsageError
from nbdist.rpc.agent import Agent

_OUTPUT_ARRIVES_WITHIN = 1.0  # seconds to wait for output that may be on the way


@dataclass(eq=False, repr=False)
class CellSender:
    """Sends cells to the workers of one cluster, interrupts them, and passes on what their user types."""

    team: Team
    thread: KernelThread
    router: Router
    lifecycle: Lifecycle
    agent: Agent
    interrupts: Interrupts
    stops: Stops

    def __post_init__(self) -> None:
        self.collation = Collation(self.team.workers, self.thread, self.agent, self.lifecycle)
        self._counter = 0  # numbers the cells where there is no notebook

    def execute(self, code: str, targets: Targets, options: CellOptions, timeout: float | None = None) -> Cell:
        """Run a cell, as `Cluster.execute` does, on workers that have started."""
        with self.lifecycle.choosing() as token:
            workers = self.team.select(targets)
            sink = options.sink or current_sink()
            self._counter += 1
            number = labels.cell_number() or self._counter
            names = [worker.name for worker in workers]
            cell = Cell(code, names, number, sink, options, self.thread, self.interrupts.stop_cell, self._answer)
            labels.note_sent(cell.source, number)  # before it is sent: a worker may fail at once
            cell.held_for = self.stops.seconds
            cell.owners_of = lambda name: [each.name for each in self.team.workers if name in each.names]
            cell.why_late = lambda: [each.text for each in self.collation.partings()]
            if not options.quiet:
                cell.before_end = self.collation.at_end_of_cell
            if options.keep:
                ids = [(part.worker, part.id) for part in cell.parts.values()]
                # A weak reference: else this object, whose router keeps the last cells, would never end.
                cell.kept = weakref.finalize(cell, _drop_values_soon, weakref.ref(self), ids)
                cell.kept.atexit = False
            usual = {"silent": False, "store_history": True, "user_expressions": {}, "stop_on_error": False}
            request = {"code": code, "allow_stdin": options.block and sink.interactive, **usual}
            origin = self.router.origins.current()
            told = {METADATA: {"number": number, "keep": options.keep, "above": options.above, "origin": origin}}
            packed = pack(request), pack(told)  # once, for all workers

            def send() -> None:
                if not self.thread.soon(self.send, token, cell, workers, *packed):
                    raise UsageError("this cluster has been shut down; make another")
                if options.progress_after > 0 and sink.interactive:
                    parts = self.lifecycle.launcher.probe, cell, self.team, self.collation, self.stops
                    self.thread.soon(Lookout(self.thread, self.agent, *parts, options.progress_after).start)

            if options.block:
                with undone_by(forget_values, cell):  # the caller gets no handle
                    cell.wait(timeout, begin=send)
                return cell
            send()
            if timeout is not None:
                self.thread.soon(self._cancel_late, cell, self.thread.loop.time() + timeout - self.stops.seconds())
            return cell

    def send(self, token: object, cell: Cell, workers: Sequence[Worker], content: bytes, metadata: bytes) -> None:
        """Send a cell to its workers; the cell fails at once on dead workers. In the kernel thread."""
        self.lifecycle.unsent.discard(token)  # no other work of this thread runs before the end of this method
        cell.at_part_end = self._on_part_end
        lost: dict[str, str] = {}
        for worker in workers:
            if worker.kernel is None or worker.lost is not None:
                lost[worker.name] = worker.say_lost()
                continue
            part = cell.parts[worker.name]
            id, part.incarnation = part.id, worker.incarnation
            self.router.expect(id, cell)
            worker.cells.append(cell)
            try:
                worker.kernel.send("execute_request", content, metadata=metadata, id=id)
            except Exception as error:  # whatever the error is, the cell must end
                advice = f"`%dist_restart {worker.name}` starts it again"
                lost[worker.name] = f"cannot be reached: {error}\n{advice}"
        for name, why in lost.items():
            cell.on_lost(name, why)

    def settle(self, patience: float | None) -> None:
        """Show the output that calls of the notebook's cell have printed on workers, as `Cluster.settle` does."""
        sink = current_sink()
        origin = self.router.origins.find(sink.key)
        if origin is None or (sink.interactive and not sink.captured and patience is None):
            return

        def ask(worker: str, token: str) -> bool:
            with contextlib.suppress(NbdistError):
                self.agent.at(worker, "output").call("fence", token, timeout=_OUTPUT_ARRIVES_WITHIN)
                return True
            return False

        within = _OUTPUT_ARRIVES_WITHIN if patience is None or not sink.interactive else patience
        self.router.settle(origin, [worker for worker in self.team.workers if worker.alive], ask, within)

    def _on_part_end(self, cell: Cell, name: str) -> None:
        """Remove a cell that has ended on a worker from the cells of that worker. In the kernel thread."""
        worker = self.team.find(name)
        if cell in worker.cells:
            worker.cells.remove(cell)
            worker.on_change()
            self.lifecycle.after_cell()  # a restart may have left the process group to be formed once all are idle

    def _cancel_late(self, cell: Cell, due: float) -> None:
        """Interrupt a cell, sent without ``block``, once its time is over. Stops take none of it."""
        if not cell.done and (left := due + self.stops.seconds() - self.thread.loop.time()) > 0:
            self.thread.loop.call_later(left, self._cancel_late, cell, due)
        elif not cell.done:
            cell.interrupted = True
            self.interrupts.stop_cell(cell)

    def _answer(self, name: str, text: str, request: Message) -> None:
        kernel = self.team.find(name).kernel
        assert kernel is not None
        self.thread.soon(lambda: kernel.send("input_reply", {"value": text}, channel="stdin", parent=request))

    def drop_values(self, ids: Sequence[tuple[str, str]]) -> None:
        """Tell workers to drop values of cells, by the ids of the requests. In any thread, without waiting."""

        def drop() -> None:
            for worker, id in ids:
                self.agent.at(worker, "output").cast("drop_value", id)

        self.thread.soon(drop)


def forget_values(cell: Cell) -> None:
    """Let the workers drop the values that they keep for `Cluster.references`, once the cell has ended."""
    if cell.kept is not None:
        cell.when_done(cell.kept)


def _drop_values_soon(sender: weakref.ref[CellSender], ids: Sequence[tuple[str, str]]) -> None:
    if (known := sender()) is not None:
        known.drop_values(ids)
