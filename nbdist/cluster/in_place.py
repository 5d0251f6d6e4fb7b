"""A text below a cell that is written anew in its place, and leaves nothing when it is taken away."""

from __future__ import annotations

from nbdist.cluster.jupyter_wire import new_id
from nbdist.cluster.sinks import Sink

__all__ = ["InPlace"]


class InPlace:
    """One such text, in one place for output."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._id = ""
        self._shown = ""

    def show(self, text: str) -> None:
        """Replace what is shown by this text; the empty text takes it away."""
        if text == self._shown:
            return
        self._shown = text
        kind = "update_display_data" if self._id else "display_data"
        self._id = self._id or new_id()
        data = {"text/plain": text} if text else {"text/plain": "", "text/html": ""}  # plain text takes a line
        content = {"data": data, "metadata": {}, "transient": {"display_id": self._id}}
        self._sink.publish(kind, content)

    def move_to(self, sink: Sink) -> None:
        """Show the next text at another place, or anew at this one, because the page has wiped its output."""
        self._sink, self._id, self._shown = sink, "", ""
