"""Reports on a backward pass, finished or not, as text, and as HTML with a picture of its graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from nbdist.amounts import duration
from nbdist.views import tables
from nbdist.views.drawing.graph import Marks, as_svg, marks_of_plan
from nbdist.views.drawing.pictures import as_image, themed
from nbdist.views.passes.backward import Backward
from nbdist.views.passes.remarks import remarks, text_of
from nbdist.views.shown import BESIDE


def as_text(found: Backward) -> list[str]:
    """Return a report on a pass as lines: one for each worker, then the remarks on what stands out."""
    lines = []
    for share in found.shares():
        line = f"  {share.worker}: {share.done} of {share.nodes} nodes"
        if share.done:
            line += f", busy {duration(share.busy)}, waited {duration(share.idle)}"
        if share.on_gpu is not None:
            line += f", GPU {duration(share.on_gpu)}"
        if share.waits_for:
            line += f"; waits for {', '.join(share.waits_for)}"
        lines.append(line)
    return lines + [f"  {text_of(remark)}" for remark in remarks(found)]


def as_html(found: Backward, told: str, others: Sequence[tuple[str, Backward]] = ()) -> str:
    """Return picture, table and remarks as HTML without scripts, and below them folded those of ``others``."""
    # ``told`` and the texts in ``others`` are the lines above the pictures, and are escaped here.
    on_gpus = ("GPU",) if found.on_gpu else ()
    rows = []
    for share in found.shares():
        times = [duration(share.busy), duration(share.idle)]
        if on_gpus:
            times.append(duration(share.on_gpu) if share.on_gpu is not None else "")
        rows.append([share.worker, f"{share.done}/{share.nodes}", *times, ", ".join(share.waits_for)])
    table = tables.as_html(("worker", "nodes", "busy", "waited", *on_gpus, "waits for"), rows)
    told_of = "".join(f"<div>{escape(text_of(remark))}</div>" for remark in remarks(found))
    drawing = as_image(as_svg(found.plan.trace, marks_of(found)))
    folded = (f"<details><summary>{escape(line)}</summary>{as_html(one, '')}</details>" for line, one in others)
    below = f'<div class="{BESIDE}">{"".join(folded)}</div>' if others else ""
    return themed(f"<div>{escape(told)}</div>", drawing, table, told_of) + below


def marks_of(found: Backward) -> Marks:
    """Return the marks that the picture adds to the graph: counts of gradients, states, the critical path, a NaN."""
    states = {key: found.state_of(key) for key in found.plan.waits_for}
    got = None if all(state == "done" for state in states.values()) else found.got
    marks = marks_of_plan(found.plan)
    return replace(marks, got=got, states=states, bad=found.blamed(), failed=found.failed, path=found.critical_path())
