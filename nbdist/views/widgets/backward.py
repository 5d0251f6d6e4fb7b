"""The live view of a backward pass: what a `Watcher` sees, and buttons for what it can do."""

from __future__ import annotations

import time
from typing import Any

import traitlets

from nbdist.autograd.seen import Key
from nbdist.errors import UsageError
from nbdist.views.watching import Watcher
from nbdist.views.widgets.view import View, identity, script, style

__all__ = ["BackwardView"]

_MODULES = (
    "amounts.js",
    "buttons.js",
    "ranks.js",
    "graph.js",
    "layout.js",
    "routes.js",
    "walk.js",
    "colours.js",
    "sparkline.js",
    "zoom.js",
    "links.js",
    "legend.js",
    "backward.js",
)
_SLOW = 0.3
"""Seconds between two nodes in slow motion."""


class BackwardView(View):
    """One watched cell."""

    _anywidget_id = identity("nbdist.backward")
    _esm = script(*_MODULES)
    _css = style("common.css", "backward.css")
    outline = traitlets.Dict().tag(sync=True)
    """What `snapshot` tells the progress of; it is sent when it changes, which it seldom does."""
    detail = traitlets.Dict().tag(sync=True)
    """Of the node that was chosen, what is too much to be told of all."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._slow: dict[str, Any] | None = None
        """The press by which it is in slow motion."""
        self._chosen: Key | None = None
        outline, snapshot, _ = watcher.drawn()
        super().__init__(outline=outline, snapshot=snapshot)
        watcher.changed = self.changed
        self.changed()  # there may have been news before anybody listened

    def publish(self) -> None:
        """Publish what is new."""
        outline, snapshot, found = self._watcher.drawn()
        with self.hold_sync():  # in one message, for the one is nothing without the other
            self.outline = outline
            self.snapshot = snapshot
            self.detail = found.detail(self._chosen) if found is not None and self._chosen is not None else {}

    def press(self, message: dict[str, Any]) -> None:
        """Do what a button says."""
        watcher, what = self._watcher, message.get("press")
        if what == "look":
            self._chosen = _key(message["node"])
            self.changed()
            return
        self._slow = message if what == "slow" else None
        if what == "pause":
            watcher.pause()
        elif what == "run":
            watcher.run()
        elif what == "step":
            watcher.step(1, message.get("worker"))
        elif what == "until":
            until = message.get("until")
            watcher.run(_key(until) if isinstance(until, list) else until)
        elif what == "slow":
            watcher.pause()
            while self._slow is message and not watcher.ended:
                if watcher.under_way:
                    watcher.step(1)
                time.sleep(_SLOW)
        else:
            raise UsageError(f"there is no button {what!r}")
        self.changed()


def _key(node: list[Any]) -> Key:
    """A node, as a page names it."""
    worker, number = node
    return str(worker), int(number)
