"""Shows the progress of each worker while a cluster starts; also progress bars for other views."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from nbdist.cluster.kernels.workers import STEPS
from nbdist.cluster.output.sinks import Sink
from nbdist.columns import aligned
from nbdist.views.workers.line import LiveText

_WIDTH = 12  # of a worker's bar in characters


def bar(done: int, total: int, width: int) -> str:
    """Return a bar of ``width`` characters, filled in proportion to ``done`` of ``total``; unfilled if both are 0."""
    full = round(width * done / max(1, total))
    return "█" * full + "░" * (width - full)


def draw(names: Sequence[str], steps: dict[str, str]) -> str:
    """Return a line for each worker: its name, a bar, and the step that it has reached ("starting" if none)."""
    rows = []
    for name in names:
        step = steps.get(name, "starting")
        reached = len(STEPS) if step == "ready" else STEPS.index(step) + 1 if step in STEPS else 0
        rows.append((name, bar(reached, len(STEPS), _WIDTH), step))
    return "\n".join(aligned(rows))


class StartProgress:
    """Draws the progress of a cluster's start, again whenever a worker reaches a step. Any thread may call it."""

    def __init__(self, names: Sequence[str], sink: Sink) -> None:
        self._names = names
        self._steps: dict[str, str] = {}
        self._lock = threading.Lock()
        self._text = LiveText(sink)
        self._text.draw(draw(names, {}))

    def __call__(self, worker: str, step: str) -> None:
        """Note that a worker has reached a step of its start, and draw the progress of all workers again."""
        with self._lock:
            if worker in self._names and self._steps.get(worker) != step:  # others join later
                self._steps[worker] = step
                finished = all(self._steps.get(name) == "ready" for name in self._names)
                self._text.draw(draw(self._names, self._steps), last=finished)
