"""Shows lines below the running cell: the current step of a long operation, and news that come after the cell's end.

Imports only modules that load fast.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from nbdist.cluster.output.arranger import Published
from nbdist.cluster.output.sinks import PlainSink, current_sink
from nbdist.trace import Steps

__all__ = ["line_in_place", "lines_below"]


def lines_below() -> Callable[[str], None]:
    """Return a function that prints its argument as a line below the running cell, in any thread.

    The cell may have ended by then.
    """
    sink = current_sink()

    def show(line: str) -> None:
        sink.publish(Published("stream", {"name": "stdout", "text": f"{line}\n"}))

    return show


def line_in_place() -> Steps:
    """Return a function that shows its argument as a line below the running cell, in place of the line before.

    The function shows nothing if no user can watch (nbval, nbconvert), or on a terminal, where a line cannot be
    replaced once others have written below it.
    """
    sink = current_sink()
    id, shown = uuid.uuid4().hex, False

    def show(line: str) -> None:
        nonlocal shown
        if not sink.interactive or isinstance(sink, PlainSink):
            return
        kind = "update_display_data" if shown else "display_data"
        shown = True
        content = {"data": {"text/plain": line}, "metadata": {}, "transient": {"display_id": id}}
        sink.publish(Published(kind, content))

    return show
