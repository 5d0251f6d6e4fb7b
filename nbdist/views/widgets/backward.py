"""The live view of a backward pass: draws what a `Watcher` sees, with buttons that pause, step and run the pass."""

from __future__ import annotations

import time
from typing import Any

import traitlets

from nbdist.autograd.graph.events import Key
from nbdist.views.passes import page
from nbdist.views.passes.watching import Watcher
from nbdist.views.widgets.view import View, identity, script, style, unknown_button

_LAYOUT = ("ranks.js", "graph.js", "layout.js", "routes.js", "walk.js")  # place the nodes and lines of a graph
_PARTS = ("colours.js", "sparkline.js", "zoom.js", "links.js", "legend.js")  # of the view around them
_SLOW = 0.3  # seconds between two nodes in slow motion


class BackwardView(View):
    """The live view of one `Watcher`."""

    _anywidget_id = identity("nbdist.backward")
    _esm = script("amounts.js", "buttons.js", *_LAYOUT, *_PARTS, "backward.js")
    _css = style("common.css", "backward.css")
    outline = traitlets.Dict().tag(sync=True)  # `page.outline`, sent only when the pass changes
    detail = traitlets.Dict().tag(sync=True)  # `page.detail` of the node that the user has chosen

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._slow: dict[str, Any] | None = None  # the press that began the slow motion under way
        self._chosen: Key | None = None
        outline, snapshot, _ = watcher.drawn()
        super().__init__(outline=outline, snapshot=snapshot)
        watcher.changed = self.changed
        self.changed()  # publish news that came before `watcher.changed` was set

    def publish(self) -> None:
        """Send the page the graph of the pass, its progress, and the histogram of the node that the user has chosen."""
        outline, snapshot, found = self._watcher.drawn()
        with self.hold_sync():  # in one message, because the snapshot refers to the outline's nodes
            self.outline = outline
            self.snapshot = snapshot
            self.detail = page.detail(found, self._chosen) if found is not None and self._chosen is not None else {}

    def press(self, message: dict[str, Any]) -> None:
        """Act on a button: look (choose a node), slow, pause, run, step, or run until a node or event."""
        watcher, what = self._watcher, message.get("press")
        if what == "look":
            self._chosen = _key(message["node"])
            self.changed()
            return
        self._slow = message if what == "slow" else None  # any press but "look" ends slow motion
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
            raise unknown_button(what)
        self.changed()


def _key(node: list[Any]) -> Key:
    worker, number = node
    return str(worker), int(number)
