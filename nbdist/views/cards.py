"""What is shown of a remote reference, as text and HTML: only what is known already, nothing is asked for.

Pure: facts in, text out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nbdist.rpc.peeking import Histogram, Numbers, Parameter, Peek
from nbdist.views.amounts import size
from nbdist.wire.messages import State

__all__ = ["MOST", "Facts", "card", "peek_html", "table", "text", "value"]

_STANDINGS = {
    "here": ("owned here", "#3b82c4"),
    "pending": ("on its way", "#b7791f"),
    "confirmed": ("confirmed", "#2f855a"),
    "failed": ("failed", "#c53030"),
    "dead": ("dead with its worker", "#c53030"),
    "released": ("released", "#718096"),
    "ended": ("ended", "#718096"),
}
MOST = 200
"""So many rows a table has at most."""


@dataclass(frozen=True)
class Facts:
    """What is known of a reference."""

    owner: str
    standing: str
    state: State | None = None
    forks: int | None = None
    """How many others have one to it; its owner knows."""
    why: str = ""
    """Of one that failed, or is dead."""


def text(facts: Facts) -> str:
    """A line that is the same however far the reference has come by the time it is shown."""
    return f"<RRef on {facts.owner}>"


def card(facts: Facts, *, lasting: bool = False) -> str:
    """All that is known; if it is to be looked at when all is over, without what has only not come yet."""
    state = facts.state
    rows = [("value", value(state)), *_more(state)] if state is not None or not lasting else []
    if facts.forks is not None:
        rows.append(("forks", str(facts.forks)))
    if facts.why:
        rows.append(("error", facts.why))
    cells = "".join(
        f'<tr><td style="text-align:left;opacity:.7;padding:0 12px 0 0">{escape(name)}</td>'
        f'<td style="text-align:left;padding:0">{escape(told)}</td></tr>'
        for name, told in rows
    )
    badge = _badge(facts.standing) if facts.standing != "pending" or not lasting else ""
    return (
        f'<div style="font-family:sans-serif;font-size:13px"><b>RRef</b> on <b>{escape(facts.owner)}</b> '
        f'{badge}<table style="border-collapse:collapse;margin:4px 0">{cells}</table></div>'
    )


def table(rows: Sequence[tuple[str, Facts]], count: int) -> str:
    """The first of so many references in a list or a dict, a row each."""
    names = ("", "owner", "value", "device", "bytes", "state")
    head = "".join(f'<th style="text-align:left">{name}</th>' for name in names)
    lines = []
    for key, facts in rows:
        state = facts.state
        device = (state.device if state is not None else None) or ""
        nbytes = size(state.nbytes) if state is not None and state.nbytes is not None else ""
        cells = [escape(told) for told in (key, facts.owner, value(state), device, nbytes)]
        told = "".join(f'<td style="text-align:left">{cell}</td>' for cell in [*cells, _badge(facts.standing)])
        lines.append(f"<tr>{told}</tr>")
    left = f"<div>… and {count - len(rows)} more</div>" if count > len(rows) else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>{left}"


def peek_html(peek: Peek) -> str:
    """What was seen of a value."""
    parts = []
    if peek.numbers is not None:
        parts.append(_numbers(peek.numbers))
    if peek.parameters:
        parts.append(_parameters(peek.parameters))
    if peek.text:
        length = f"{peek.length} items: " if peek.length is not None else ""
        parts.append(f'<pre style="margin:0;white-space:pre-wrap">{escape(length + peek.text)}</pre>')
    return f'<div style="font-family:sans-serif;font-size:13px">{"".join(parts)}</div>'


def value(state: State | None) -> str:
    """What a value is, shortly."""
    if state is None:
        return "not known yet"
    if state.error is not None:
        return f"{state.qualname}: {state.error}"
    return f"{state.qualname} {state.dtype}{tuple(state.shape)}" if state.shape is not None else state.qualname


def _more(state: State | None) -> list[tuple[str, str]]:
    if state is None or state.error is not None:
        return []
    rows = []
    if state.device is not None:
        rows.append(("device", state.device))
    if state.requires_grad is not None:
        rows.append(("requires_grad", str(state.requires_grad)))
    if state.grad_fn is not None:
        rows.append(("grad_fn", state.grad_fn))
    if state.nbytes is not None:
        rows.append(("bytes", size(state.nbytes)))
    return rows


def _badge(standing: str) -> str:
    told, colour = _STANDINGS.get(standing, (standing, "#718096"))
    return (
        f'<span style="color:#fff;background:{colour};border-radius:8px;padding:1px 8px;font-size:85%">'
        f"{escape(told)}</span>"
    )


def _numbers(numbers: Numbers) -> str:
    known: Mapping[str, Any] = {
        "min": numbers.min,
        "max": numbers.max,
        "mean": numbers.mean,
        "norm": numbers.norm,
    }
    told = [f"{name} <b>{value:.5g}</b>" for name, value in known.items() if value is not None]
    for count, name in ((numbers.nans, "NaN"), (numbers.infs, "infinite")):
        if count or name == "NaN":
            colour = ' style="color:#c53030"' if count else ""
            told.append(f"<span{colour}>{name} <b>{count}</b></span>")
    parts = [f"<div>{' · '.join(told)}</div>"]
    if numbers.histogram is not None:
        parts.append(_histogram(numbers.histogram))
    if numbers.first:
        parts.append(f"<div>first: {escape(', '.join(numbers.first))}, …</div>")
    return "".join(parts)


def _histogram(histogram: Histogram) -> str:
    counts = histogram.counts
    most, width, height = max(1, *counts), 8, 40
    bars = "".join(
        f'<rect x="{index * width}" y="{height - (tall := count / most * height):.1f}" width="{width - 1}" '
        f'height="{tall:.1f}" fill="#3b82c4"><title>{count}</title></rect>'
        for index, count in enumerate(counts)
    )
    return (
        f'<div>{histogram.low:.4g} <svg width="{len(counts) * width}" height="{height}" '
        f'style="vertical-align:bottom">{bars}</svg> {histogram.high:.4g}</div>'
    )


def _parameters(rows: Sequence[Parameter]) -> str:
    names = ("parameter", "shape", "device", "requires_grad", "norm", "NaN")
    head = "".join(f'<th style="text-align:left">{name}</th>' for name in names)
    lines = []
    for row in rows[:MOST]:
        shape, norm = f"{row.dtype}{tuple(row.shape)}", f"{row.norm:.4g}" if row.norm is not None else ""
        cells = (row.name, shape, row.device, str(row.requires_grad), norm, str(row.nans))
        told = "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in cells)
        lines.append(f"<tr>{told}</tr>")
    left = f"<div>… and {len(rows) - MOST} more</div>" if len(rows) > MOST else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>{left}"
