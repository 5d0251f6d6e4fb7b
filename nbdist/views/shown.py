"""Shows a view twice: live, and as a picture, which a saved notebook keeps.

JupyterLab and Notebook prefer the widget of an output to everything else in it, and say "model not found" where no
kernel has the widget any more. A notebook is saved while its views live (autosave, a closed tab, a killed kernel), so
the two are outputs of their own. A style in the picture's HTML chooses which of them the page shows::

    the live view is there, and connected      the live view
    else                                       the picture; the other output is hidden, with what stands in it

A notebook that is not trusted has neither styles nor widgets: there the picture is all.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from nbdist.cluster.sinks import Sink

__all__ = ["Bundle", "Shown"]

Bundle = dict[str, Any]
"""What is shown, by its MIME type."""

_RULES = """
body:has(.{mark}:not(.jupyter-widgets-disconnected)) .{mark}-picture,
body:has(.{mark}:not(.jupyter-widgets-disconnected)) .jp-OutputArea-child:has(> * .{mark}-picture),
.{mark}.jupyter-widgets-disconnected,
.jp-OutputArea:has(.{mark}-picture) .jp-OutputArea-output.lm-Panel:not(:has(*))
{{ display: none !important; }}
"""
"""The last of the four is an output in which JupyterLab was to put a widget, and has put only a text."""


class Shown:
    """One place where a view is shown."""

    def __init__(self, sink: Sink, mark: str, picture: Callable[[], Bundle]) -> None:
        """Make it for a cell, and a view whose element in the page has the class ``mark``.

        ``picture()`` returns the view as it is now, as text and HTML; any thread calls it.
        """
        self._sink = sink
        self._mark = mark
        self._picture = picture
        self._live_id, self._picture_id = uuid.uuid4().hex, uuid.uuid4().hex
        self._saved: Bundle = {}

    def show(self, live: Bundle) -> None:
        """Show the live view, whose bundle has nothing but the widget, and behind it the picture."""
        self._publish("display_data", self._live_id, live)
        self._saved = self._drawn()
        self._publish("display_data", self._picture_id, self._saved)

    def update(self) -> None:
        """Have the page, and so the notebook's file, hold the picture as it is now."""
        drawn = self._drawn()
        if drawn != self._saved:
            self._saved = drawn
            self._publish("update_display_data", self._picture_id, drawn)

    def end(self) -> None:
        """Leave the picture only."""
        self.update()
        self._publish("update_display_data", self._live_id, {})

    def _drawn(self) -> Bundle:
        drawn = self._picture()
        rules = " ".join(_RULES.format(mark=self._mark).split())
        html = f'<style>{rules}</style><div class="{self._mark}-picture">{drawn["text/html"]}</div>'
        return {**drawn, "text/html": html}

    def _publish(self, kind: str, id: str, data: Bundle) -> None:
        self._sink.publish(kind, {"data": data, "metadata": {}, "transient": {"display_id": id}})
