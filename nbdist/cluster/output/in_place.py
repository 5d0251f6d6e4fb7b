"""`InPlace`: a text below a cell that can be replaced where it stands, and removed without leaving an empty line."""

from __future__ import annotations

from nbdist.cluster.jupyter.jupyter_wire import new_id
from nbdist.cluster.output.arranger import Published
from nbdist.cluster.output.sinks import Sink


class InPlace:
    """One replaceable text in one place for output. It appears with the first `show`.

    The text is a Jupyter display with an id of its own: the first text makes it, later ones update it. A terminal
    cannot update displays and shows the first text only.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._id = ""
        self._shown = ""

    def show(self, text: str) -> None:
        """Show ``text`` in place of the previous one; an empty text removes it. Does nothing if it has not changed."""
        if text == self._shown:
            return
        self._shown = text
        kind = "update_display_data" if self._id else "display_data"
        self._id = self._id or new_id()
        # Empty HTML takes no room, where empty plain text takes a line.
        data = {"text/plain": text} if text else {"text/plain": "", "text/html": ""}
        content = {"data": data, "metadata": {}, "transient": {"display_id": self._id}}
        self._sink.publish(Published(kind, content))

    def move_to(self, sink: Sink) -> None:
        """Show the next text as a new one in ``sink``: another place, or the same one after its output was cleared."""
        self._sink, self._id, self._shown = sink, "", ""
