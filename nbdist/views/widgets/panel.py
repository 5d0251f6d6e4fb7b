"""The live panel of a cluster: samples it while somebody looks, with buttons that interrupt and restart workers."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

from nbdist.errors import UsageError
from nbdist.views.widgets.view import View, identity, script, style, unknown_button
from nbdist.views.workers.panel import Panel

_SAMPLE_SECONDS = 1.0  # between two samples


class PanelView(View):
    """The live view of one `Panel`."""

    _anywidget_id = identity("nbdist.panel")
    _esm = script("amounts.js", "buttons.js", "looking.js", "sparkline.js", "panel.js")
    _css = style("common.css", "panel.css")

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._sampling = threading.Lock()
        super().__init__(snapshot=panel.snapshot())

    def look(self) -> dict[str, Any]:
        """Return the last sample of the workers, with the course of the last minute. Asks no worker."""
        return self._panel.snapshot()

    def press(self, message: dict[str, Any]) -> None:
        """Note that somebody looks, interrupt or restart a worker, or show or hide its threads ("stacks")."""
        what, worker = message.get("press"), message.get("worker")
        if what == "looking":
            self.looked()
            if self._sampling.acquire(blocking=False):  # one thread samples as long as somebody looks
                try:
                    _sample(weakref.ref(self))
                finally:
                    self._sampling.release()
            return
        cluster = self._panel.cluster
        if worker not in cluster.names:
            raise UsageError(f"there is no {worker!r}: the cluster has no worker of that name; run the cell again")
        if what == "interrupt":
            cluster.interrupt(worker)
        elif what == "restart":
            cluster.restart(worker)
        elif what == "stacks":
            self._panel.show_stacks(worker)
        else:
            raise unknown_button(what)
        self.sample()

    @property
    def looking(self) -> bool:
        """True if somebody looks, and the cluster is running."""
        return super().looking and self._panel.cluster.running

    def sample(self) -> None:
        """Ask all workers for their state now, wait for the answers, and queue the view for publishing."""
        self._panel.sample()
        self.changed()


def _sample(known: weakref.ref[PanelView]) -> None:
    """Take a sample once a second, in the calling thread, as long as the view exists and somebody looks at it."""
    while (view := known()) is not None and view.looking:
        view.sample()
        del view  # or this loop would keep the view alive
        time.sleep(_SAMPLE_SECONDS)
