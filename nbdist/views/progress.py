"""How far each worker is while a cluster starts."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence

from nbdist.cluster.sinks import PlainSink, Sink
from nbdist.cluster.workers import STEPS

__all__ = ["StartProgress", "draw"]

_WIDTH = 12


def draw(names: Sequence[str], steps: dict[str, str]) -> str:
    """A bar for each worker."""
    longest = max(map(len, names), default=0)
    lines = []
    for name in names:
        step = steps.get(name, "starting")
        reached = len(STEPS) if step == "ready" else STEPS.index(step) + 1 if step in STEPS else 0
        full = round(_WIDTH * reached / len(STEPS))
        lines.append(f"{name:<{longest}}  {'█' * full}{'░' * (_WIDTH - full)}  {step}")
    return "\n".join(lines)


class StartProgress:
    """Draws it, and draws it anew with each step; called in any thread.

    Where nobody watches, only the end is drawn, which is the same every time.
    """

    def __init__(self, names: Sequence[str], sink: Sink) -> None:
        self._names = names
        self._sink = sink
        self._steps: dict[str, str] = {}
        self._lock = threading.Lock()
        self._id = uuid.uuid4().hex
        self._shown = False
        self._live = sink.interactive and not isinstance(sink, PlainSink)
        if self._live:
            self._show()

    def __call__(self, worker: str, step: str) -> None:
        """A worker has reached a step."""
        with self._lock:
            if self._steps.get(worker) == step:
                return
            self._steps[worker] = step
            finished = all(self._steps.get(name) == "ready" for name in self._names)
            if self._live or finished:
                self._show()

    def _show(self) -> None:
        text = draw(self._names, self._steps)
        kind = "update_display_data" if self._shown else "display_data"
        self._shown = True
        content = {"data": {"text/plain": text}, "metadata": {}, "transient": {"display_id": self._id}}
        self._sink.publish(kind, content)
