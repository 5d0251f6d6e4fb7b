"""Shows a view as two outputs: the live widget, and a picture that stays in the saved notebook.

If one output had both, JupyterLab and Notebook would prefer the widget, and show "model not found" once no kernel has
the widget any more. Notebooks are saved while their views are live (autosave, a closed tab, a killed kernel), so the
widget and the picture are two outputs. A style in the picture's HTML chooses the one that the page shows::

    the widget is in the page, and connected      the widget; the picture is hidden
    otherwise                                     the picture; the widget's output is hidden

A notebook that is not trusted has neither styles nor widgets, and shows the picture.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from nbdist.cluster.output.arranger import Published
from nbdist.cluster.output.sinks import Sink

Bundle = dict[str, Any]  # the content of an output, by MIME type

# The CSS class of a part of a picture that stays in the page below the live widget, which does not show it.
BESIDE = "nbdist-beside"

# Hides the picture, and the output around it, while the widget is connected; hides a disconnected widget. The last
# selector matches an output in which JupyterLab should have put a widget, and has put only a text.
_RULES = """
body:has(.{mark}:not(.jupyter-widgets-disconnected)) .{mark}-picture > :not(.{beside}),
body:has(.{mark}:not(.jupyter-widgets-disconnected)) .jp-OutputArea-child:has(> * .{mark}-picture):not(:has(.{beside})),
.{mark}.jupyter-widgets-disconnected,
.jp-OutputArea:has(.{mark}-picture) .jp-OutputArea-output.lm-Panel:not(:has(*))
{{ display: none !important; }}
"""


class Shown:
    """One place where a view is shown: two outputs below a cell."""

    def __init__(self, sink: Sink, mark: str, picture: Callable[[], Bundle]) -> None:
        """Prepare the outputs of the widget and the picture in ``sink``; `show` publishes them."""
        self._sink = sink
        # The CSS class of the view's element in the page, by which `_RULES` finds the widget.
        self._mark = mark
        self._picture = picture  # any thread may call it
        self._live_id, self._picture_id = uuid.uuid4().hex, uuid.uuid4().hex
        self._saved: Bundle = {}

    def show(self, live: Bundle, metadata: Bundle) -> None:
        """Publish both outputs, once: ``live``, the widget by its MIME type without any text, and the picture."""
        self._publish("display_data", self._live_id, live, metadata)
        self._saved = self._drawn()
        self._publish("display_data", self._picture_id, self._saved)

    def update(self) -> None:
        """Publish the picture again if it has changed since `show`, so that the notebook's file gets the new one."""
        drawn = self._drawn()
        if drawn != self._saved:
            self._saved = drawn
            self._publish("update_display_data", self._picture_id, drawn)

    def end(self) -> None:
        """Publish the picture for the last time if it has changed, and empty the live output. Call it once."""
        self.update()
        self._publish("update_display_data", self._live_id, {})

    def _drawn(self) -> Bundle:
        drawn = self._picture()
        rules = " ".join(_RULES.format(mark=self._mark, beside=BESIDE).split())
        html = f'<style>{rules}</style><div class="{self._mark}-picture">{drawn["text/html"]}</div>'
        return {**drawn, "text/html": html}

    def _publish(self, kind: str, id: str, data: Bundle, metadata: Bundle | None = None) -> None:
        content = {"data": data, "metadata": dict(metadata or {}), "transient": {"display_id": id}}
        self._sink.publish(Published(kind, content))
