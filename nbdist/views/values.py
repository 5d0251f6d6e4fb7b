"""Draws the values of lower layers that show themselves. They call these functions by `nbdist.registry`.

They work in a plain script, too: nothing here needs a Jupyter package.
"""

from __future__ import annotations

from nbdist.autograd.graph.traces import Plan, Trace
from nbdist.cluster.examination.examination import Examination
from nbdist.nn.timeline import PipelineTimeline
from nbdist.views.drawing import pipelines
from nbdist.views.drawing.graph import as_svg, as_text, plan_as_svg, plan_as_text
from nbdist.views.drawing.pictures import as_image
from nbdist.views.workers import examination


def text_of(value: Trace | Plan | Examination) -> str:
    """Return a trace, a plan or an examination as lines of text."""
    if isinstance(value, Examination):
        return examination.as_text(value)
    return plan_as_text(value) if isinstance(value, Plan) else as_text(value)


def pictures_of(value: Trace | Plan | PipelineTimeline | Examination) -> dict[str, str]:
    """Return a value as a notebook shows it, by MIME type: text, HTML, and for a graph also SVG."""
    if isinstance(value, Examination):
        return {"text/plain": repr(value), "text/html": examination.as_html(value)}
    if isinstance(value, PipelineTimeline):
        return {"text/plain": repr(value), "text/html": pipelines.as_html(value)}
    picture = plan_as_svg(value) if isinstance(value, Plan) else as_svg(value)
    return {"text/plain": text_of(value), "text/html": as_image(picture), "image/svg+xml": picture}
