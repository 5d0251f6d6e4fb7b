"""Shows texts below the running cell: the current step of a long operation, and news that come after the cell's end.

Imports only modules that load fast.
"""

from __future__ import annotations

from collections.abc import Callable

from nbdist.cluster.output.arranger import stream_text
from nbdist.cluster.output.in_place import InPlace
from nbdist.cluster.output.sinks import PlainSink, Sink, current_sink
from nbdist.trace import Steps


def lines_below() -> Callable[[str], None]:
    """Return a function that prints its argument below the running cell, in any thread, even after the cell's end."""
    sink = current_sink()
    return lambda line: sink.publish(stream_text("stdout", f"{line}\n"))


class LiveText:
    """Shows a text below a cell, and replaces it by later texts.

    If no user can be watching, or on a terminal, which cannot replace its text, only the last text is shown.
    """

    def __init__(self, sink: Sink) -> None:
        self._text = InPlace(sink)
        # A terminal cannot replace a text once others have written below it.
        self._live = sink.interactive and not isinstance(sink, PlainSink)

    def draw(self, text: str, *, last: bool = False) -> None:
        """Show a text in place of the one before. ``last`` says that no other text follows."""
        if self._live or last:
            self._text.show(text)


def line_in_place() -> Steps:
    """Return a function that shows its argument as a line below the running cell, in place of the line before."""
    return LiveText(current_sink()).draw
