"""Draws the timeline of a pipeline's step: when its operations ran, and when they would if sending took no time."""

from __future__ import annotations

from nbdist.amounts import duration
from nbdist.nn.schedules import KINDS, OpTimes
from nbdist.nn.timeline import PipelineTimeline
from nbdist.views.drawing.gantt import Bar, gantt, micro_batch_name, with_legend


def as_html(timeline: PipelineTimeline) -> str:
    """Return a step of a pipeline as HTML: its timeline as it ran, and below the ideal one, with a common scale."""
    seconds = max(timeline.seconds, timeline.ideal_seconds)
    both = (
        ("as it ran", timeline.rows, timeline.seconds, timeline.bubble),
        ("ideal", timeline.ideal, timeline.ideal_seconds, timeline.ideal_bubble),
    )
    drawings = []
    for title, rows, length, bubble in both:
        bars = [[_bar(timeline, span) for span in row] for row in rows]
        named = list(zip(timeline.workers, bars, strict=True))
        drawings.append(gantt(f"{title}: {duration(length)}, bubbles {bubble:.0%}", named, seconds))
    return with_legend(drawings, {KINDS[span.op.kind].name for row in timeline.rows for span in row})


def _bar(timeline: PipelineTimeline, span: OpTimes) -> Bar:
    kind, stage, micro_batch = span.op
    # The micro-batch, ``3``; with the stage, ``1.3``, where workers have several stages.
    text = f"{micro_batch}" if timeline.stages == len(timeline.workers) else f"{stage}.{micro_batch}"
    name = KINDS[kind].name
    tip = f"{micro_batch_name(name, stage, micro_batch)}: {duration(span.end - span.start)}"
    return Bar(span.start, span.end, text, name, tip)
