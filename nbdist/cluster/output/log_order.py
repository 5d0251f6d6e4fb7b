"""Arranges the output of several workers where nobody watches: as a log that is the same from one run to the next.

All output is held back until the workers have ended, so that the order does not depend on which worker was faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from nbdist.cluster.output import arranger
from nbdist.cluster.output.arranger import OUTPUT, Arranger, Published, grouped
from nbdist.cluster.output.line_cutting import Lines
from nbdist.cluster.output.pieces import OutputItem, display_id, merged, updated, with_own_id


class _Held:
    """The messages of one worker, held back."""

    def __init__(self) -> None:
        self.wipe()

    def wipe(self) -> None:
        """Drop the held messages: the worker has cleared its output."""
        self.messages: list[Published] = []
        self.clear = False  # True after a ``clear_output`` that waits for the next output
        self._displays: dict[str, list[int]] = {}  # the places in `messages` of those with an id

    def add(self, message: Published) -> None:
        if self.clear:  # the worker wanted that with its next output
            self.wipe()
        if (id := display_id(message)) is not None:
            self._displays.setdefault(id, []).append(len(self.messages))
        self.messages.append(message)

    def update(self, message: Published) -> bool:
        """Give the held displays that have the update's id the new content; return whether there were any."""
        places = self._displays.get(display_id(message) or "", [])
        for place in places:
            self.messages[place] = updated(self.messages[place], message)
        return bool(places)


class LogOrder(Arranger):
    """Holds all output back to the end, and shows it by worker.

    Threads that a cell has left running may print after the end. That output is shown `arranger.FOLD_AFTER` seconds
    later, grouped in the same way.
    """

    def __init__(self, workers: Sequence[str]) -> None:
        self._held = {name: _Held() for name in workers}
        self._finished = False
        self._late: float | None = None  # when output that came after the end is due; None if there is none

    def feed(self, worker: str, message: Published, now: float) -> list[Published]:
        """Hold a message back. Messages of widgets, and updates of displays that are shown already, pass."""
        message = with_own_id(worker, message)
        held = self._held.setdefault(worker, _Held())
        if message.kind == "clear_output":
            if message.content.get("wait"):
                held.clear = True
            else:
                held.wipe()
        elif message.kind == "update_display_data":
            return [] if held.update(message) else [message]
        elif message.kind not in OUTPUT:
            return [message]
        elif message.kind != "stream" or message.content["text"]:
            held.add(message)
            if self._finished and self._late is None:
                self._late = now + arranger.FOLD_AFTER
        return []

    def next_flush(self) -> float | None:
        """Return when to show output that came after the cell's end, on the clock of ``now``; None if there is none."""
        return self._late

    def flush(self, now: float) -> list[Published]:
        """Return the output that came after the end of the cell, grouped by worker; empty before it is due."""
        return self.finish(now) if self._late is not None and now >= self._late else []

    def finish(self, now: float) -> list[Published]:
        """Return all output by worker; workers with the same output share one copy of it."""
        items = {worker: _in_fixed_order(worker, held.messages) for worker, held in self._held.items()}
        alike = grouped(items, lambda worker: tuple(item.key or f"of {worker} alone" for item in items[worker]))
        published: list[Published] = []
        for workers in alike.values():
            for item in items[workers[0]]:
                item.workers = workers
                published += item.render()
        self._held = {worker: _Held() for worker in self._held}
        self._finished, self._late = True, None
        return merged(published)


def _in_fixed_order(worker: str, said: Sequence[Published]) -> list[OutputItem]:
    """Return one worker's output as items, in an order that does not depend on when its streams were flushed."""
    lines = Lines(worker)
    items = [item for message in said for item in lines.take(message, 0.0)] + lines.rest(0.0)
    ordered: list[OutputItem] = []
    for _, part in itertools.groupby(items, lambda item: item.message is None):
        # Between two displays, all text of stdout comes before all text of stderr.
        ordered += sorted(part, key=lambda item: item.stream == "stderr")
    return ordered
