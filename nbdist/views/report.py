"""What is said of a backward pass when it is over, or as far as it has come: as text, and as HTML with its picture."""

from __future__ import annotations

import itertools
from html import escape

from nbdist.autograd import inherited
from nbdist.autograd.drawing import as_svg, name_of
from nbdist.autograd.seen import Key
from nbdist.pictures import as_image
from nbdist.views import tables
from nbdist.views.amounts import duration
from nbdist.views.backward import Backward

__all__ = ["as_html", "as_text", "remark_on_bad"]

_SHOWN = 12
"""So many nodes of a path are named: its ends, and those that took the longest."""


def as_text(found: Backward) -> list[str]:
    """Lines: a worker each, and what stands out."""
    lines = []
    for share in found.shares():
        line = f"  {share.worker}: {share.done} of {share.nodes} nodes"
        if share.done:
            line += f", busy {duration(share.busy)}, waited {duration(share.idle)}"
        if share.waits_for:
            line += f"; waits for {', '.join(share.waits_for)}"
        lines.append(line)
    return lines + [f"  {line}" for line in _remarks(found)]


def as_html(found: Backward, told: str) -> str:
    """The picture and the table, which stay in a saved notebook."""
    rows = [
        (
            share.worker,
            f"{share.done}/{share.nodes}",
            duration(share.busy),
            duration(share.idle),
            ", ".join(share.waits_for),
        )
        for share in found.shares()
    ]
    table = tables.as_html(("worker", "nodes", "busy", "waited", "waits for"), rows)
    remarks = "".join(f"<div>{escape(line)}</div>" for line in _remarks(found))
    return (
        f'<div style="font-family:sans-serif;font-size:13px"><div>{escape(told)}</div>'
        f'<div style="overflow:auto">{as_image(as_svg(found.plan.trace, found.plan.waits_for))}</div>'
        f"{table}{remarks}</div>"
    )


def _remarks(found: Backward) -> list[str]:
    lines = []
    path = found.critical_path()
    if path:
        slow = sorted(path[1:-1], key=lambda key: found.seconds[key])[-(_SHOWN - 2) :]
        shown = {path[0], path[-1], *slow}
        names = [_named(found, key) if key in shown else "…" for key in path]
        names = [name for name, _ in itertools.groupby(names)]
        lines.append(f"critical path, {len(path)} nodes: {' → '.join(names)}")
    slowest = found.slowest()
    if slowest is not None:
        worker, where, seconds, keys = slowest
        count = f"{len(keys)} nodes" if len(keys) > 1 else f"node {keys[0][1]}"
        lines.append(f"most time, {duration(seconds)}, went into {where} on {worker} ({count})")
    bad = remark_on_bad(found)
    if bad is not None:
        lines.append(bad[0])
    largest = found.largest()
    if largest is not None:
        lines.append(f"the largest norm, {found.norm[largest]:.4g}, was given to {_where(found, largest)}")
    if found.plan.unused:
        lines.append(f"{len(found.plan.unused)} messages take no part")
    return lines


def remark_on_bad(found: Backward) -> tuple[str, Key] | None:
    """Return a sentence about the first NaN or Inf, and the node that made it as far as that is known."""
    bad, blamed = found.bad, found.blamed()
    if bad is None or blamed is None:
        return None

    if found.inherited is None:
        return inherited.told(None, _where(found, bad), str), blamed

    def where(end: inherited.Inherited) -> str:
        node = found.nodes.get((end.worker, end.node))
        if node is None:
            return f"{end.name}@{end.worker} (node {end.node})"
        return ", ".join([f"{name_of(node)}@{end.worker} (node {end.node})", *filter(None, (node.module, node.line))])

    return inherited.told(found.inherited, f"{_named(found, bad)} (node {bad[1]})", where), blamed


def _named(found: Backward, key: Key) -> str:
    return f"{name_of(found.nodes[key])}@{key[0]}"


def _where(found: Backward, key: Key) -> str:
    node = found.nodes[key]
    made = [part for part in (node.module, node.line) if part]
    return f"{_named(found, key)} (node {key[1]})" + (f", made by {', '.join(made)}" if made else "")
