"""Rows of texts, as lines and as HTML."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

from nbdist.pictures import themed

__all__ = ["Html", "as_html", "as_lines"]


_WHOLE = 12
"""Up to so many letters stay on one line, such as "4.0 KB", however narrow the page is."""


class Html(str):
    """A cell that is HTML already."""


def as_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns that stand under their names."""
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{text:<{w}}" for text, w in zip(line, widths, strict=True)).rstrip() for line in table]


def as_html(head: Sequence[str], rows: Sequence[Sequence[str]], faint: Collection[int] = ()) -> str:
    """Return rows as a table in the page's font, which scrolls in a narrow page; rows of ``faint`` numbers are faint.

    What the table looks like otherwise, its margins and stripes, is the page's business.
    """
    lines = []
    for number, row in enumerate(rows):
        style = ' style="opacity:.6"' if number in faint else ""
        lines.append(f"<tr{style}>{''.join(_cell('td', text) for text in row)}</tr>")
    names = "".join(_cell("th", name) for name in head)
    table = f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return themed(f'<div style="overflow-x:auto">{table}</div>')


def _cell(tag: str, text: str) -> str:
    whole = ";white-space:nowrap" if len(text) <= _WHOLE and not isinstance(text, Html) else ""
    return f'<{tag} style="text-align:left{whole}">{text if isinstance(text, Html) else escape(text)}</{tag}>'
