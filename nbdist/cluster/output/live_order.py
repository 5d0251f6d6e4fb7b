"""Arranges the output of several workers for a user who watches: soon, but with identical lines shown once.

A line waits up to `arranger.FOLD_AFTER` seconds for the other workers to print the same::

    message ── Lines ──> items ── _Worker.queue ── _release: same key, or waited long enough ──> Screen, page
                     └─> bars ──── _bars_due ────── _show_bars: one display for all workers ───> page

When one worker clears its output, or its progress bar moves, the output of the others stays as it is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from nbdist.cluster.jupyter.jupyter_wire import new_id
from nbdist.cluster.output import arranger
from nbdist.cluster.output.arranger import OUTPUT, Arranger, Published, label_of
from nbdist.cluster.output.line_cutting import Lines
from nbdist.cluster.output.pieces import OutputItem, display_id, merged, updated, with_own_id
from nbdist.cluster.output.screen import Screen


@dataclass
class _Worker:
    """The arranger's state of one worker."""

    lines: Lines
    queue: deque[OutputItem] = field(default_factory=deque)  # items that have not been shown
    ended: bool = False
    clear: bool = False  # True if the worker wants its output cleared by its next output


class Live(Arranger):
    """Shows the output of several workers as it comes, line by line.

    Output to the streams ``plain`` has no progress bars, is never cleared, and is never shown a second time. ``new_id``
    makes the ids of displays.
    """

    def __init__(self, workers: Sequence[str], plain: Container[str] = (), new_id: Callable[[], str] = new_id) -> None:
        self._plain = plain
        self._workers = {name: _Worker(Lines(name, plain)) for name in workers}
        self._new_id = new_id
        self._screen = Screen()  # the items that have been shown
        self._bars_id: str | None = None  # of the display that shows all progress bars
        self._bars: dict[str, list[str]] = {}  # those that are shown, by worker
        self._bars_due: dict[str, float] = {}  # when to show the changed ones, by worker

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """Take a message; return what can be shown without waiting."""
        state = self._find(worker)
        message = with_own_id(worker, message)
        if message.kind == "clear_output":
            if message.content.get("wait"):
                state.clear = True
                return []
            self._clear(worker, state, now)
        elif message.kind not in OUTPUT:
            # The message changes output that has its place already, or a widget, which has its own.
            if message.kind == "update_display_data":
                self._update(state, message)
            # A line that waits may be the widget's display, which must be shown before the widget closes.
            shown = self._release(now, everything=True) if message.kind == "comm_close" else []
            return [*shown, message]
        elif message.kind != "stream" or message.content["text"]:
            if state.clear:
                self._clear(worker, state, now)
            state.queue += state.lines.take(message, now)
        published = self._release(now)
        self._note_bars(worker, state, now)
        return published

    def next_flush(self) -> float | None:
        """Return when the next line or bar has waited long enough; None if nothing waits."""
        times = [state.queue[0].since + arranger.FOLD_AFTER for state in self._workers.values() if state.queue]
        return min([*times, *self._bars_due.values()], default=None)

    def flush(self, now: float) -> list[Published]:
        """Return the lines and bars that have waited long enough."""
        published = self._release(now)
        if self._bars_due and min(self._bars_due.values()) <= now:
            published += self._show_bars(now)
        return published

    def ended(self, worker: str, now: float) -> list[Published]:
        """Note that a worker has ended the cell: its last line is complete, and no line waits for it."""
        state = self._find(worker)
        state.queue += state.lines.rest(now, bars=False)  # a bar keeps its place until the cell's end
        state.ended = True
        published = self._release(now)
        self._note_bars(worker, state, now)
        return published

    def finish(self, now: float) -> list[Published]:
        """Return all that is left; bars are shown in their last state."""
        for state in self._workers.values():
            state.queue += state.lines.rest(now, bars=False)
            state.ended = True
        return [*self._release(now), *self._show_bars(now, everything=True)]

    def _find(self, worker: str) -> _Worker:
        if worker not in self._workers:
            self._workers[worker] = _Worker(Lines(worker, self._plain))
        return self._workers[worker]

    # -- folding ------------------------------------------------------------------------------

    def _release(self, now: float, *, everything: bool = False) -> list[Published]:
        """Return the first items of the queues, as long as none has to wait; equal items at their heads become one."""
        published: list[Published] = []
        queues = {name: state.queue for name, state in self._workers.items() if state.queue}
        silent = sum(not state.queue and not state.ended for state in self._workers.values())
        alike = Counter(queue[0].key for queue in queues.values())
        shown = True
        while shown and queues:
            shown = False
            latest = min(queue[0].since for queue in queues.values()) + arranger.FOLD_AFTER
            # In the workers' order, except that an item goes first if it is older than another by more than FOLD_AFTER.
            for name in list(queues):
                while name in queues and (item := queues[name][0]).since < latest:
                    if item.key and silent and not everything and now < item.since + arranger.FOLD_AFTER:
                        # A silent worker may still print the same.
                        break
                    shown = True
                    same = [name]
                    if item.key and alike[item.key] > 1:
                        same = [other for other, queue in queues.items() if queue[0].key == item.key]
                    del alike[item.key]
                    for each in same:
                        queue = queues[each]
                        queue.popleft()
                        if queue:
                            alike[queue[0].key] += 1
                        else:
                            del queues[each]
                            silent += not self._workers[each].ended
                    published += self._show(same, item, now)
        return merged(published)

    def _show(self, workers: list[str], item: OutputItem, now: float) -> list[Published]:
        if item.message is not None and item.message.kind == "clear_output":
            return self._wipe(workers, item.message, now)
        item.workers, item.key = workers, ""
        if item.message is not None or item.stream not in self._plain:
            self._screen.add(item)
        return item.render()

    # -- wiping and updating ------------------------------------------------------------------

    def _clear(self, worker: str, state: _Worker, now: float) -> None:
        """Queue a request to clear a worker's output, and drop its items that have not been shown."""
        message = Published("clear_output", {"wait": state.clear})
        state.clear = False
        # Text of the plain streams is never cleared.
        kept = [item for item in state.queue if item.message is None and item.stream in self._plain]
        kept += state.lines.rest(now, [stream for stream in ("stdout", "stderr") if stream in self._plain])
        state.lines.wipe()
        state.queue.clear()
        state.queue += kept
        state.queue.append(OutputItem([worker], f"clear:{message.content['wait']}", now, message=message))

    def _wipe(self, workers: Sequence[str], message: Published, now: float) -> list[Published]:
        """Clear the output of some workers in the record of shown output; return the messages that clear the page."""
        found = self._screen.wipe(workers)
        if not found and not any(name in self._bars for name in workers):  # nothing of them is shown
            return []
        self._bars_due.update(dict.fromkeys(self._bars, now))
        self._bars_id, self._bars = None, {}
        for name in workers:
            self._bars_due.pop(name, None)
            self._note_bars(name, self._workers[name], now)
        # The message clears all output of the cell, so that of the other workers is shown again.
        return [message, *self._screen.render(), *self._show_bars(now)]

    def _update(self, state: _Worker, message: Published) -> None:
        """Change a display on the screen and in the queue, where it may still be shown for the first time or again."""
        self._screen.update(message)
        for item in state.queue:
            if item.message is not None and display_id(item.message) == display_id(message):
                item.message = updated(item.message, message)

    # -- progress bars ------------------------------------------------------------------------

    def _note_bars(self, worker: str, state: _Worker, now: float) -> None:
        """Plan when to show a worker's bars, if they differ from the bars on the page."""
        bars, shown = state.lines.bars(), self._bars.get(worker, [])
        if bars == shown:
            self._bars_due.pop(worker, None)
        elif bars and not shown:
            self._bars_due[worker] = state.lines.bars_due()  # a new bar may wait for its line to end
        else:
            self._bars_due.setdefault(worker, now + arranger.FOLD_AFTER)

    def _show_bars(self, now: float, *, everything: bool = False) -> list[Published]:
        """Return the one display of all bars that are shown or due, or of all; nothing if it is up to date."""
        shown: dict[str, list[str]] = {}
        for name, state in self._workers.items():
            if everything or name in self._bars or self._bars_due.get(name, now) <= now:
                self._bars_due.pop(name, None)
                if bars := state.lines.bars():
                    shown[name] = bars
        if shown == self._bars:
            return []
        kind = "update_display_data"
        if self._bars_id is None:
            self._bars_id, kind = self._new_id(), "display_data"
        self._bars = shown
        text = "\n".join(f"{label_of((name,))} {bar}" for name, bars in shown.items() for bar in bars)
        content = {"data": {"text/plain": text}, "metadata": {}, "transient": {"display_id": self._bars_id}}
        return [Published(kind, content)]
