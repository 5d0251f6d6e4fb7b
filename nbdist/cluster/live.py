"""Output of several workers for somebody who watches: soon, but not so soon that nothing can be said once for all.

A line waits a moment for the other workers to say the same. Where one's output is wiped or a bar moves, that of the
others stays as it is.
"""

from __future__ import annotations

import uuid
from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from nbdist.cluster import arrange
from nbdist.cluster.arrange import OUTPUT, Arranger, Published, label_of
from nbdist.cluster.items import Item, display_id, merged, updated, with_own_id
from nbdist.cluster.lines import Lines
from nbdist.cluster.screen import Screen

__all__ = ["Live"]


@dataclass
class _Worker:
    lines: Lines
    queue: deque[Item] = field(default_factory=deque)
    ended: bool = False
    clear: bool = False
    """Whether it wants its output wiped as soon as it has more."""


class Live(Arranger):
    """Output of several workers as it comes, line by line.

    What is written to the streams in ``plain`` stays: it has no progress bars, and is never wiped or shown again.
    """

    def __init__(
        self,
        workers: Sequence[str],
        plain: Container[str] = (),
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._plain = plain
        self._workers = {name: _Worker(Lines(name, plain)) for name in workers}
        self._new_id = new_id
        self._screen = Screen()
        self._bars_id: str | None = None
        self._bars: dict[str, list[str]] = {}
        self._bars_due: dict[str, float] = {}

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """Take it in; show what need not wait."""
        state = self._find(worker)
        message = with_own_id(worker, message)
        if message.kind == "clear_output":
            if message.content.get("wait"):
                state.clear = True
                return []
            self._clear(worker, state, now)
        elif message.kind not in OUTPUT:
            # It concerns what has its place already, or has a place of its own, as widgets do.
            if message.kind == "update_display_data":
                self._update(state, message)
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
        """When a line has waited long enough."""
        times = [state.queue[0].since + arrange.FOLD_AFTER for state in self._workers.values() if state.queue]
        return min([*times, *self._bars_due.values()], default=None)

    def flush(self, now: float) -> list[Published]:
        """Show what has waited long enough."""
        published = self._release(now)
        if self._bars_due and min(self._bars_due.values()) <= now:
            published += self._show_bars(now)
        return published

    def ended(self, worker: str, now: float) -> list[Published]:
        """Its last line needs no end."""
        state = self._find(worker)
        state.queue += state.lines.rest(now, bars=False)
        state.ended = True
        published = self._release(now)
        self._note_bars(worker, state, now)
        return published

    def finish(self, now: float) -> list[Published]:
        """Show all that is left."""
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
        """Show the first items of the queues, as long as there is nothing to wait for.

        In the workers' order, unless one's has come so much sooner that it would not wait for another's.
        """
        published: list[Published] = []
        queues = {name: state.queue for name, state in self._workers.items() if state.queue}
        silent = sum(not state.queue and not state.ended for state in self._workers.values())
        alike = Counter(queue[0].key for queue in queues.values())
        shown = True
        while shown and queues:
            shown = False
            latest = min(queue[0].since for queue in queues.values()) + arrange.FOLD_AFTER
            for name in list(queues):
                while name in queues and (item := queues[name][0]).since < latest:
                    if item.key and silent and not everything and now < item.since + arrange.FOLD_AFTER:
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

    def _show(self, workers: list[str], item: Item, now: float) -> list[Published]:
        if item.message is not None and item.message.kind == "clear_output":
            return self._wipe(workers, item.message, now)
        item.workers, item.key = workers, ""
        if item.message is not None or item.stream not in self._plain:
            self._screen.add(item)
        return item.render()

    # -- wiping and updating ------------------------------------------------------------------

    def _clear(self, worker: str, state: _Worker, now: float) -> None:
        """Have a worker's output wiped when it is its turn; what was not shown yet never will be."""
        message = Published("clear_output", {"wait": state.clear})
        state.clear = False
        kept = [item for item in state.queue if item.message is None and item.stream in self._plain]
        kept += state.lines.rest(now, [stream for stream in ("stdout", "stderr") if stream in self._plain])
        state.lines.wipe()
        state.queue.clear()
        state.queue += kept
        state.queue.append(Item([worker], f"clear:{message.content['wait']}", now, message=message))

    def _wipe(self, workers: Sequence[str], message: Published, now: float) -> list[Published]:
        """Some workers wipe their output; that of the others stays."""
        found = self._screen.wipe(workers)
        if not found and not any(name in self._bars for name in workers):
            return []
        self._bars_due.update(dict.fromkeys(self._bars, now))
        self._bars_id, self._bars = None, {}
        for name in workers:
            self._bars_due.pop(name, None)
            self._note_bars(name, self._workers[name], now)
        return [message, *self._screen.render(), *self._show_bars(now)]

    def _update(self, state: _Worker, message: Published) -> None:
        """A display has a new content, also where it waits to be shown, or will be shown again."""
        self._screen.update(message)
        for item in state.queue:
            if item.message is not None and display_id(item.message) == display_id(message):
                item.message = updated(item.message, message)

    # -- progress bars ------------------------------------------------------------------------

    def _note_bars(self, worker: str, state: _Worker, now: float) -> None:
        """See to it that the bars of a worker are shown as they are, in time."""
        bars, shown = state.lines.bars(), self._bars.get(worker, [])
        if bars == shown:
            self._bars_due.pop(worker, None)
        elif bars and not shown:
            self._bars_due[worker] = state.lines.bars_due()
        else:
            self._bars_due.setdefault(worker, now + arrange.FOLD_AFTER)

    def _show_bars(self, now: float, *, everything: bool = False) -> list[Published]:
        """Show them in one display, those that have been shown before and those whose time has come."""
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
