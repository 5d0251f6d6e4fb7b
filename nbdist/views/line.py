"""A line below the running cell that says what a long operation does; imports nothing that takes time."""

from __future__ import annotations

import uuid

from nbdist.cluster.sinks import PlainSink, current_sink
from nbdist.trace import Steps

__all__ = ["line_in_place"]


def line_in_place() -> Steps:
    """Return a function that shows a line below the running cell, in place of the line before.

    It shows nothing where nobody watches, nor on a terminal, which cannot replace a line that others wrote behind.
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
