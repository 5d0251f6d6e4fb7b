"""Drawings of what happened when, as HTML that needs no script: it reads on a page, and in a saved notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from nbdist.pictures import as_image

__all__ = ["Bar", "gantt"]

_WIDTH = 760
_LABEL = 80
_ROW = 24
_LETTER = 6.5


class Bar(NamedTuple):
    """Something that took time."""

    start: float
    end: float
    text: str
    colour: str
    tip: str


def gantt(title: str, rows: Sequence[tuple[str, Sequence[Bar]]], seconds: float) -> str:
    """A line for each row, on one axis of time that is ``seconds`` long."""
    scale = (_WIDTH - _LABEL) / seconds if seconds else 0.0
    height = 20 + _ROW * len(rows) + 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="0" y="13" font-weight="bold">{escape(title)}</text>',
    ]
    for number, (label, bars) in enumerate(rows):
        top = 20 + number * _ROW
        parts.append(f'<text x="0" y="{top + 15}">{escape(label)}</text>')
        parts.append(
            f'<rect x="{_LABEL}" y="{top}" width="{_WIDTH - _LABEL}" height="{_ROW - 4}" fill-opacity="0.06"/>'
        )
        for bar in bars:
            left, width = _LABEL + bar.start * scale, max((bar.end - bar.start) * scale, 0.5)
            parts.append(
                f'<g><title>{escape(bar.tip)}</title><rect x="{left:.1f}" y="{top}" width="{width:.1f}" '
                f'height="{_ROW - 4}" fill="{bar.colour}" stroke="#222" stroke-width="0.4"/>'
            )
            if width > _LETTER * len(bar.text) + 2:
                parts.append(
                    f'<text x="{left + width / 2:.1f}" y="{top + 14}" text-anchor="middle" fill="#111">'
                    f"{escape(bar.text)}</text>"
                )
            parts.append("</g>")
    axis = 20 + _ROW * len(rows) + 10
    for at in range(5):
        anchor = ("start", "middle", "middle", "middle", "end")[at]
        x = _LABEL + (_WIDTH - _LABEL) * at / 4
        parts.append(
            f'<text x="{x:.0f}" y="{axis}" text-anchor="{anchor}" fill-opacity="0.7">{seconds * at / 4 * 1e3:.1f} ms'
            "</text>"
        )
    return as_image("".join([*parts, "</svg>"]))
