"""Formats tables, each with a head and rows, as lines of text and as HTML."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

from nbdist.columns import aligned
from nbdist.views.drawing.pictures import themed

_UNBROKEN_LETTERS = 12  # a cell up to this long, such as "4.0 KB", is not broken into lines in a narrow page


class Html(str):
    """The content of a cell that is HTML already, and is not escaped."""


def as_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines of text, the columns aligned under their names."""
    return aligned([head, *rows])


def as_html(head: Sequence[str], rows: Sequence[Sequence[str]], faint: Collection[int] = ()) -> str:
    """Return a table as HTML, its cells escaped except `Html`, and the rows with numbers in ``faint`` drawn faintly."""
    lines = []
    for number, row in enumerate(rows):
        style = ' style="opacity:.6"' if number in faint else ""
        lines.append(f"<tr{style}>{''.join(_cell('td', text) for text in row)}</tr>")
    names = "".join(_cell("th", name) for name in head)
    table = f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    # Without margins and stripes: the page's own styles have them.
    return themed(f'<div style="overflow-x:auto">{table}</div>')


def _cell(tag: str, text: str) -> str:
    whole = ";white-space:nowrap" if len(text) <= _UNBROKEN_LETTERS and not isinstance(text, Html) else ""
    return f'<{tag} style="text-align:left{whole}">{text if isinstance(text, Html) else escape(text)}</{tag}>'
