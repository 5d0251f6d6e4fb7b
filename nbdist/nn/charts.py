"""Drawings of what happened when, as HTML that needs no script: it reads on a page, and in a saved notebook.

All timelines take the colours and the words of one table, `KINDS`::

    kind        colour            what took the time
    call        grey              a function that somebody called
    forward     blue              a micro-batch in the forward pass of a pipeline's stage
    backward    orange            a micro-batch in the backward pass of a pipeline's stage
    segment     red               a part of a distributed backward pass, on one worker
    step        green             an optimizer's update
    own         light grey        nbdist's own work: a step's order, a state dict, a message on its way

Blue, orange, red and green are those of Okabe and Ito, which colour-blind people can tell apart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from typing import NamedTuple

from nbdist.pictures import SVG_FONT, SVG_STYLE, as_image, themed

__all__ = ["KINDS", "Bar", "Kind", "counted", "gantt", "micro_batch_name", "with_legend"]

_WIDTH = 590
"""Pixels: what JupyterLab has for outputs beside its file browser in a window of 1,050."""
_ROW = 24
_LETTER = 6.5
_LONGEST = 24
"""So many letters of a row's label are drawn."""


class Kind(NamedTuple):
    """How one kind of work is drawn, and what a user calls it."""

    colour: str
    words: str
    one: str
    """As it is counted: 1 call,"""
    many: str
    """3 calls."""


KINDS: dict[str, Kind] = {
    "call": Kind("#b0b0b0", "call of a function", "call", "calls"),
    "forward": Kind("#56b4e9", "forward of a micro-batch (its number)", "micro-batch forward", "micro-batches forward"),
    "backward": Kind(
        "#e69f00", "backward of a micro-batch (its number)", "micro-batch backward", "micro-batches backward"
    ),
    "segment": Kind("#d55e00", "segment of a backward pass", "backward segment", "backward segments"),
    "step": Kind("#009e73", "optimizer step", "optimizer step", "optimizer steps"),
    "own": Kind("#dcdcdc", "nbdist's own work", "task of nbdist's own", "tasks of nbdist's own"),
}


class Bar(NamedTuple):
    """Something that took time."""

    start: float
    end: float
    text: str
    kind: str
    """One of `KINDS`."""
    tip: str


def micro_batch_name(kind: str, stage: int, micro_batch: int) -> str:
    """Return how both timelines name an operation of a pipeline; ``kind`` is "forward" or "backward"."""
    return f"{kind} of micro-batch {micro_batch}, stage {stage}"


def counted(kind: str, count: int) -> str:
    """Return so many things of a kind in words: "2 optimizer steps"."""
    return f"{count} {KINDS[kind].one if count == 1 else KINDS[kind].many}"


def with_legend(drawings: Sequence[str], kinds: Collection[str]) -> str:
    """Return drawings as HTML in the page's font, with the legend of the ``kinds`` that are in them."""
    entries = "".join(
        f'<span style="margin-right:12px;white-space:nowrap"><span style="color:{kind.colour}">■</span> '
        f"{escape(kind.words)}</span> "
        for name, kind in KINDS.items()
        if name in kinds
    )
    return themed(*drawings, f"<div>{entries}</div>")


def gantt(title: str, rows: Sequence[tuple[str, Sequence[Bar]]], seconds: float) -> str:
    """Return a line for each row, on one axis of time that is ``seconds`` long."""
    labels = [label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…" for label, _ in rows]
    left_end = 16 + int(_LETTER * max(map(len, labels), default=0))
    scale = (_WIDTH - left_end - 8) / seconds if seconds else 0.0
    height = 20 + _ROW * len(rows) + 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="{SVG_FONT}" font-size="11">',
        f"<title>{escape(title)}</title>{SVG_STYLE}",
        '<rect width="100%" height="100%" class="paper"/>',
        f'<text x="4" y="13" font-weight="bold" class="ink">{escape(title)}</text>',
    ]
    for number, (label, (_, bars)) in enumerate(zip(labels, rows, strict=True)):
        top = 20 + number * _ROW
        parts.append(f'<text x="4" y="{top + 15}" class="ink">{escape(label)}</text>')
        parts.append(
            f'<rect x="{left_end}" y="{top}" width="{_WIDTH - left_end - 8}" height="{_ROW - 4}" class="track"/>'
        )
        for bar in bars:
            left, width = left_end + bar.start * scale, max((bar.end - bar.start) * scale, 0.5)
            parts.append(
                f'<g><title>{escape(bar.tip)}</title><rect x="{left:.1f}" y="{top}" width="{width:.1f}" '
                f'height="{_ROW - 4}" fill="{KINDS[bar.kind].colour}" class="line" stroke-width="0.4"/>'
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
        x = left_end + (_WIDTH - left_end - 8) * at / 4
        parts.append(
            f'<text x="{x:.0f}" y="{axis}" text-anchor="{anchor}" class="ink">{seconds * at / 4 * 1e3:.1f} ms</text>'
        )
    return as_image("".join([*parts, "</svg>"]))
