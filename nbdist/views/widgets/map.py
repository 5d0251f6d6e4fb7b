"""The live map of a swarm: follows the swarm while somebody looks; a button for each worker kills the worker.

The view has only a weak reference to the swarm: a swarm that is shown, but that no variable refers to, is collected and
frees the workers' memory. When the swarm is over (collected, closed, or its cluster is shut down), the view leaves a
picture of the swarm's last state, without buttons, which says that the swarm is over.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from nbdist.errors import UsageError
from nbdist.views.map import snapshot_of
from nbdist.views.widgets.view import View, identity, queuing, script, style, unknown_button

if TYPE_CHECKING:
    from nbdist.swarm.swarm import Swarm  # which needs transformers


class MapView(View):
    """The live map of one swarm."""

    _anywidget_id = identity("nbdist.map")
    _esm = script("amounts.js", "blocks.js", "buttons.js", "looking.js", "map.js")
    _css = style("common.css", "map.css")

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = weakref.ref(swarm, queuing(self))
        self._listener = weakref.ref(_Listener(self, swarm))
        super().__init__(snapshot=snapshot_of(swarm))

    def close(self) -> None:
        """Stop following the swarm, and remove the widget from the page; its picture stays."""
        if (listener := self._listener()) is not None:
            listener.forget()
        super().close()

    def leave(self) -> None:
        """Close the widget, because its cluster is about to end; the picture that stays says that the swarm is over."""
        self.snapshot = {**self.look(), "over": True}
        self.close()

    def look(self) -> dict[str, Any]:
        """Return the facts that this process knows about the swarm; the last ones, with ``"over"``, if it is over."""
        swarm = self._swarm()
        if swarm is None or self.snapshot["over"]:
            return {**self.snapshot, "over": True}
        return snapshot_of(swarm)

    def publish(self) -> None:
        """Send the page the known facts about the swarm. If the swarm is over, close the view; its picture stays."""
        if self.comm is None:  # late news of a view that is closed
            return
        super().publish()
        if self.snapshot["over"]:
            self.close()

    def changed(self) -> None:
        """Queue the view for publishing if somebody looks, or if the swarm is over."""
        swarm = self._swarm()
        if self.looking or swarm is None or swarm.ended:  # other news is published when somebody looks again
            super().changed()

    def press(self, message: dict[str, Any]) -> None:
        """Note that somebody looks ("looking"), or "kill" the worker that the message names."""
        what, worker = message.get("press"), message.get("worker")
        if what == "looking":
            self.looked()
            self.changed()  # publish what changed while nobody looked, and rates that fall by themselves
            return
        swarm = self._swarm()
        if swarm is None or swarm.ended:
            raise UsageError("this swarm is over: it has no workers that could be killed")
        if what != "kill":
            raise unknown_button(what)
        if not any(server["name"] == worker for server in swarm.snapshot()["servers"]):
            raise UsageError(f"there is no {worker!r}: the swarm has no server of that name; run the cell again")
        swarm.kill(str(worker))
        self.changed()


class _Listener:
    """The callback that the swarm holds; tells the view of news.

    ``forget``, which may refer to the swarm, is kept here and not in the view, so the view does not keep the swarm
    alive.
    """

    def __init__(self, view: MapView, swarm: Swarm) -> None:
        self._queue = queuing(view)
        self.forget = swarm.listen(self)

    def __call__(self) -> None:
        self._queue()
