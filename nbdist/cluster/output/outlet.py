"""Shows an arranger's messages at the right time: for a cell, or for a cell's calls. For the kernel thread only.

The first lines of a worker go straight to the arranger. Once there are too many for the page, the last few of them are
shown in one place and replaced every half second, until the worker ends the cell::

    message ── OutputCutter ──> Arranger ──> Sink
                  └─ held lines ─────> InPlace
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from nbdist.amounts import counted
from nbdist.cluster.jupyter.kernel_connection import KernelThread
from nbdist.cluster.output.arranger import Arranger, Published, Straight, label_of
from nbdist.cluster.output.in_place import InPlace
from nbdist.cluster.output.live_order import Live
from nbdist.cluster.output.log_order import LogOrder
from nbdist.cluster.output.output_cutter import OutputCutter
from nbdist.cluster.output.sinks import Sink

_LAST_LINES = 10  # lines of each worker that are shown while more are printed than the page can show
_UPDATE_EVERY = 0.5  # seconds between two updates of these lines
_QUIET_AFTER = 1.0  # seconds without output after which held text from a thread that outlives its cell is shown


def make_arranger(names: Sequence[str], sink: Sink, *, grouped: bool = False, labels: bool = False) -> Arranger:
    """Return the arranger for the output of these workers in that place; with ``labels``, one worker has one, too."""
    if len(names) == 1 and not labels:
        return Straight()
    return LogOrder(names) if grouped or not sink.interactive else Live(names, sink.captured)


class Outlet:
    """Connects an arranger, which is pure, with a clock and with the place for its messages."""

    def __init__(self, thread: KernelThread, arranger: Arranger, sink: Sink, number: int) -> None:
        """Show the output of cell ``number``; the line that says how many lines are left out names this cell."""
        self._thread = thread
        self._arranger = arranger
        self._sink = sink
        self._number = number
        self._timer: asyncio.TimerHandle | None = None  # the next call of the arranger's `flush`
        self._cutters: dict[str, OutputCutter] = {}
        self._ended: set[str] = set()
        self._last = InPlace(sink.page)
        self._last_due: asyncio.TimerHandle | None = None
        self._quiet_due: asyncio.TimerHandle | None = None

    def feed(self, worker: str, message: Published) -> list[Published]:
        """Take a message of a worker, and show the output that is due; return the messages to keep as outputs."""
        if (cutter := self._cutters.get(worker)) is None:
            cutter = self._cutters[worker] = OutputCutter(self._number, self._sink.cut)
        let_through = cutter.take(message)
        self._arrange(worker, let_through)
        if cutter.holds:
            self._show_last_soon()
            if worker in self._ended:
                self._release_when_quiet()
        # This one, others that were held back before, or none while its text is held back (`OutputCutter`).
        return let_through

    def ended(self, worker: str) -> list[Published]:
        """Note that a worker has ended the cell, so that no line waits for it; show its held lines and return them."""
        self._ended.add(worker)  # its threads may still print; their lines are shown when they pause
        last = self.release(worker)
        self._show(self._arranger.ended(worker, time.monotonic()))
        return last

    def finish(self) -> None:
        """Show everything that is held back: all workers have ended the cell."""
        for worker in self._cutters:
            self.release(worker)
        self._show(self._arranger.finish(time.monotonic()))

    def move_to(self, sink: Sink) -> None:
        """Show further output at another place."""
        self._sink = sink
        self._last.move_to(sink.page)

    def _arrange(self, worker: str, messages: Iterable[Published]) -> None:
        now = time.monotonic()
        self._show([shown for message in messages for shown in self._arranger.feed(worker, message, now)])

    def _flush(self) -> None:
        self._timer = None
        self._show(self._arranger.flush(time.monotonic()))

    def _show(self, published: Sequence[Published]) -> None:
        """Publish messages, and set the timer for the arranger's next `flush`."""
        for message in published:
            self._sink.publish(message)
            if message.kind == "clear_output":  # which also removes the replaceable text
                self._last.move_to(self._sink.page)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due := self._arranger.next_flush()) is not None:
            self._timer = self._thread.loop.call_later(max(0.0, due - time.monotonic()), self._flush)

    # -- lines that are held back -------------------------------------------------------------

    def release(self, worker: str) -> list[Published]:
        """Show the lines of a worker that its `OutputCutter` holds back, and return them."""
        cutter = self._cutters.get(worker)
        last = cutter.release() if cutter is not None else []
        if last:
            self._show_last()
        self._arrange(worker, last)
        return last

    def _release_when_quiet(self) -> None:
        """Plan to show the held lines of ended workers in a second; each further call puts this off again."""
        if self._quiet_due is not None:
            self._quiet_due.cancel()
        self._quiet_due = self._thread.loop.call_later(_QUIET_AFTER, self._release_ended)

    def _release_ended(self) -> None:
        for worker in self._ended:
            self.release(worker)

    def _show_last_soon(self) -> None:
        """Plan to show the last held lines in half a second, unless that is planned or no user watches."""
        if self._last_due is None and self._sink.interactive:
            self._last_due = self._thread.loop.call_later(_UPDATE_EVERY, self._show_last)

    def _show_last(self) -> None:
        """Show the last held lines of each worker in one replaceable text, which goes once none are held."""
        if self._last_due is not None:
            self._last_due.cancel()
            self._last_due = None
        said = []
        for worker, cutter in self._cutters.items():
            if cutter.holds:
                label = f"{label_of((worker,))} " if self._arranger.labels else ""
                said += [
                    f"{label}{counted(cutter.left_out, 'line')} left out so far ...",
                    *(label + each for each in cutter.last(_LAST_LINES)),
                ]
        self._last.show("\n".join(said))
