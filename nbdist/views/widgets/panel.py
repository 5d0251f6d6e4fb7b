"""The live panel of a cluster: samples while somebody looks; buttons that interrupt and restart."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

from nbdist.errors import UsageError
from nbdist.views.panel import Panel
from nbdist.views.widgets.view import View, identity, script, style

__all__ = ["PanelView"]

_EVERY = 1.0


class PanelView(View):
    """One panel."""

    _anywidget_id = identity("nbdist.panel")
    _esm = script("amounts.js", "buttons.js", "looking.js", "sparkline.js", "panel.js")
    _css = style("common.css", "panel.css")

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._sampling = threading.Lock()
        super().__init__(snapshot=panel.snapshot())

    def look(self) -> dict[str, Any]:
        """The cluster as it was sampled last."""
        return self._panel.snapshot()

    def press(self, message: dict[str, Any]) -> None:
        """Look on, interrupt, or restart."""
        what, worker = message.get("press"), message.get("worker")
        if what == "looking":
            self.looked()
            if self._sampling.acquire(blocking=False):
                try:
                    _sample(weakref.ref(self))
                finally:
                    self._sampling.release()
            return
        cluster = self._panel.cluster
        if worker not in cluster.names:
            raise UsageError(f"there is no {worker!r}")
        if what == "interrupt":
            cluster.interrupt(worker)
        elif what == "restart":
            cluster.restart(worker)
        else:
            raise UsageError(f"there is no button {what!r}")
        self._panel.sample()
        self.changed()

    @property
    def looking(self) -> bool:
        """Whether somebody looks, and there is something to see."""
        return super().looking and self._panel.cluster.running

    def sample(self) -> None:
        """Look once."""
        self._panel.sample()
        self.changed()


def _sample(known: weakref.ref[PanelView]) -> None:
    while (view := known()) is not None and view.looking:
        view.sample()
        del view
        time.sleep(_EVERY)
