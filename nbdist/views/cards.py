"""Draws remote references as text and HTML, from facts that this process knows already. Pure.

The *standing* of a reference says what this process knows of its life: `_STANDINGS` has each standing's words and
colour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Generic, TypeVar

from nbdist.amounts import size
from nbdist.rpc.references.describing import error_line
from nbdist.rpc.references.peeking import Histogram, Numbers, Parameter, Peek
from nbdist.views import tables
from nbdist.views.drawing.pictures import as_image, themed
from nbdist.wire.messages import State

T = TypeVar("T")
U = TypeVar("U")

# The words and the colour of each standing. White text is readable on each colour.
_STANDINGS = {
    "here": ("owned here", "#2b6cb0"),
    "pending": ("on its way", "#975a16"),
    "confirmed": ("confirmed", "#276749"),
    "failed": ("failed", "#c53030"),
    "dead": ("lost with its worker", "#c53030"),
    "released": ("released", "#4a5568"),
    "ended": ("its cluster has ended", "#4a5568"),
}
_SETTLED = ("here", "pending", "confirmed")  # left out of a reference's text
_ALARM = "color:var(--jp-error-color1, #d14343)"
ROWS_SHOWN = 200  # of a table
_LINE_COLUMNS = 79  # IPython's shell prints a longer list on several lines
_NEXT = ",\n "


@dataclass(frozen=True)
class Facts:
    """The facts that this process knows about a reference."""

    owner: str
    standing: str  # a key of `_STANDINGS`
    state: State | None = None  # describes the value or its error; None if not known yet
    forks: int | None = None
    """The number of references to the value that others hold; None if this process is not the owner."""
    why: str = ""
    """The error, in one line, of a reference that failed or whose owner is lost."""


@dataclass(frozen=True)
class Rows(Generic[T]):
    """The first items of a list, tuple or dict, each with its name: a number, or a key."""

    kind: type
    items: list[tuple[str, T]]
    count: int  # of all items, shown or not

    def each(self, function: Callable[[T], U]) -> Rows[U]:
        """Return new rows with the same names, and ``function(item)`` in place of each item."""
        return Rows(self.kind, [(name, function(item)) for name, item in self.items], self.count)


def text(facts: Facts) -> str:
    """Return a reference as one line of text, such as ``<RRef on worker1>``, with the error if it has one."""
    # "pending" is not told: a notebook's saved output must not depend on when the owner confirms the reference.
    if facts.standing in _SETTLED:
        return f"<RRef on {facts.owner}>"
    told = _STANDINGS.get(facts.standing, (facts.standing, ""))[0]
    return f"<RRef on {facts.owner}, {told}{f': {facts.why}' if facts.why else ''}>"


def text_of_many(rows: Rows[Facts]) -> str:
    """Return a list, tuple or dict of references as text, as IPython prints one."""
    told = [f"{name}: {text(facts)}" if rows.kind is dict else text(facts) for name, facts in rows.items]
    if rows.count > len(told):
        told.append("...")
    begin, end = "{}" if rows.kind is dict else "()" if rows.kind is tuple else "[]"
    if rows.kind is tuple and len(told) == 1:
        end = ",)"
    line = f"{begin}{', '.join(told)}{end}"
    return line if len(line) <= _LINE_COLUMNS else f"{begin}{_NEXT.join(told)}{end}"


def card(facts: Facts, *, lasting: bool = False) -> str:
    """Return all facts of a reference as HTML: its owner, its standing, its value, forks and error."""
    # With ``lasting``, for a picture in a saved notebook, "on its way" and "not known yet" are left out.
    state = facts.state
    rows: dict[str, Any] = {}
    if state is None and not lasting:  # "not known yet" depends on timing, as does "on its way" in the badge below
        rows = {"value": value(state)}
    elif state is not None and state.error is None:  # an error has a row of its own
        rows = {"value": value(state), "device": state.device, "requires_grad": state.requires_grad}
        rows |= {"grad_fn": state.grad_fn, "bytes": size(state.nbytes) if state.nbytes is not None else None}
    rows |= {"forks": facts.forks, "error": facts.why or None}
    cells = "".join(
        f'<tr><td style="text-align:left;opacity:.7;padding:0 12px 0 0">{escape(name)}</td>'
        f'<td style="text-align:left;padding:0;overflow-wrap:anywhere">{escape(str(told))}</td></tr>'
        for name, told in rows.items()
        if told is not None
    )
    badge = _badge(facts.standing) if facts.standing != "pending" or not lasting else ""
    return themed(
        f"<b>RRef</b> on <b>{escape(facts.owner)}</b> {badge}",
        f'<table style="border-collapse:collapse;margin:4px 0">{cells}</table>',
    )


def table(rows: Rows[Facts]) -> str:
    """Return references as an HTML table, and a line that counts the references that ``rows`` lacks."""
    lines = []
    for name, facts in rows.items:
        state = facts.state
        device = (state.device if state is not None else None) or ""
        nbytes = size(state.nbytes) if state is not None and state.nbytes is not None else ""
        told = facts.why or value(state)
        lines.append((name, facts.owner, told, device, nbytes, tables.Html(_badge(facts.standing))))
    left = f"<div>… and {rows.count - len(lines)} more</div>" if rows.count > len(lines) else ""
    return tables.as_html(("", "owner", "value", "device", "bytes", "state"), lines) + themed(left)


def peek_html(peek: Peek) -> str:
    """Return the result of `RRef.peek` as HTML: statistics, parameters, or the beginning of the text."""
    parts = []
    if peek.numbers is not None:
        parts.append(_statistics_html(peek.numbers))
    if peek.parameters:
        parts.append(_parameters(peek.parameters))
    if peek.text:
        length = f"{peek.length} items: " if peek.length is not None else ""
        parts.append(f'<pre style="margin:0;white-space:pre-wrap">{escape(length + peek.text)}</pre>')
    return themed(*parts)


def value(state: State | None) -> str:
    """Return a value's type, and dtype and shape if it has them, or its error, in a few words; not escaped for HTML."""
    if state is None:
        return "not known yet"
    if state.error is not None:
        return error_line(state.qualname, state.error)
    return f"{state.qualname} {state.dtype}{tuple(state.shape)}" if state.shape is not None else state.qualname


def _badge(standing: str) -> str:
    told, colour = _STANDINGS.get(standing, (standing, "#718096"))
    return (
        f'<span style="color:#fff;background:{colour};border-radius:8px;padding:1px 8px;white-space:nowrap">'
        f"{escape(told)}</span>"
    )


def _statistics_html(numbers: Numbers) -> str:
    known: Mapping[str, Any] = {"min": numbers.min, "max": numbers.max, "mean": numbers.mean, "norm": numbers.norm}
    told = [f"{name} <b>{value:.5g}</b>" for name, value in known.items() if value is not None]
    for count, name in ((numbers.nans, "NaN"), (numbers.infs, "infinite")):
        if count or name == "NaN":  # "NaN 0" is news, too
            colour = f' style="{_ALARM}"' if count else ""
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
        f'<g><title>{count}</title><rect x="{index * width}" y="{height - (tall := count / most * height):.1f}" '
        f'width="{width - 1}" height="{tall:.1f}" fill="#4c8dd6"/></g>'
        for index, count in enumerate(counts)
    )
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="{len(counts) * width}" height="{height}">{bars}</svg>'
    return f"<div>from {histogram.low:.4g} to {histogram.high:.4g}</div>{as_image(svg)}"


def _parameters(rows: Sequence[Parameter]) -> str:
    lines = []
    for row in rows[:ROWS_SHOWN]:
        shape, norm = f"{row.dtype}{tuple(row.shape)}", f"{row.norm:.4g}" if row.norm is not None else ""
        lines.append((row.name, shape, row.device, str(row.requires_grad), norm, str(row.nans)))
    left = f"<div>… and {len(rows) - ROWS_SHOWN} more</div>" if len(rows) > ROWS_SHOWN else ""
    return tables.as_html(("parameter", "shape", "device", "requires_grad", "norm", "NaN"), lines) + left
