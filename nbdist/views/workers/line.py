"""Shows the current step of a long operation in a line below the running cell. Imports only modules that load fast."""

from __future__ import annotations

import uuid

from nbdist.cluster.output.sinks import PlainSink, current_sink
from nbdist.trace import Steps

__all__ = ["line_in_place"]


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
        sink.publish(kind, content)

    return show
