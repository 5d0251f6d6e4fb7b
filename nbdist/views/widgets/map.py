"""The live map of a swarm: follows it while somebody looks; a button for each worker that kills it.

It does not hold the swarm: a swarm that nobody refers to any more goes, though it is shown, and the workers' memory
with it. When the swarm is over (it is gone, it was closed, or its cluster is shut down) the view leaves a picture of
how the swarm was, which has no buttons, and says that it is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from nbdist.errors import UsageError
from nbdist.views.map import Mapped, snapshot_of
from nbdist.views.widgets.view import View, identity, script, style

__all__ = ["MapView"]


class MapView(View):
    """One map."""

    _anywidget_id = identity("nbdist.map")
    _esm = script("amounts.js", "blocks.js", "buttons.js", "looking.js", "map.js")
    _css = style("common.css", "map.css")

    def __init__(self, swarm: Mapped) -> None:
        self._swarm = weakref.ref(swarm, partial(_news, weakref.ref(self)))
        listener = _Listener(self)
        listener.forget = swarm.listen(listener)
        self._listener = weakref.ref(listener)
        super().__init__(snapshot=snapshot_of(swarm))

    def close(self) -> None:
        """Follow the swarm no longer."""
        if (listener := self._listener()) is not None:
            listener.forget()
        super().close()

    def leave(self) -> None:
        """Leave a picture of a swarm whose cluster is to end."""
        self.snapshot = {**self.look(), "over": True}
        self.close()

    def look(self) -> dict[str, Any]:
        """Return the swarm as it is known here; or as it was last, when it is over."""
        swarm = self._swarm()
        if swarm is None or self.snapshot["over"]:
            return {**self.snapshot, "over": True}
        return snapshot_of(swarm)

    def publish(self) -> None:
        """Show the swarm as it is now; one that is over for the last time."""
        if self.comm is None:  # its news came late
            return
        super().publish()
        if self.snapshot["over"]:
            self.close()

    def changed(self) -> None:
        """There is news: it is published when somebody looks, who may come later; the end of all is at once."""
        swarm = self._swarm()
        if self.looking or swarm is None or swarm.ended:
            super().changed()

    def press(self, message: dict[str, Any]) -> None:
        """Look on, or kill."""
        what, worker = message.get("press"), message.get("worker")
        if what == "looking":
            self.looked()
            self.changed()  # what was not published meanwhile; and a rate may have changed by itself
            return
        swarm = self._swarm()
        if swarm is None or swarm.ended:
            raise UsageError("this swarm is over: it has no workers any more")
        if what != "kill":
            raise UsageError(f"there is no button {what!r}")
        if not any(server["name"] == worker for server in swarm.snapshot()["servers"]):
            raise UsageError(f"there is no {worker!r}")
        swarm.kill(str(worker))
        self.changed()


class _Listener:
    """Tells a view of news. The swarm has it: so what ends that, which may refer to the swarm, is not the view's."""

    def __init__(self, view: MapView) -> None:
        self._view = weakref.ref(view)
        self.forget: Callable[[], None] = _nothing

    def __call__(self) -> None:
        _news(self._view)


def _nothing() -> None:
    pass


def _news(known: weakref.ref[MapView], _: object = None) -> None:
    """Called by threads of the swarm's, and by the garbage collector: it only enqueues."""
    view = known()
    if view is not None:
        view.changed()
