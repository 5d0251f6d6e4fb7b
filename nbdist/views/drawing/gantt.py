"""Draws timelines as HTML that needs no script, so they can be seen in a saved notebook too.

All timelines use the colours and words of one table, `KINDS`::

    kind        colour            the work that took the time
    call        grey              a function that a program called on a worker
    forward     blue              a micro-batch in the forward pass of a pipeline's stage
    backward    orange            a micro-batch in the backward pass of a pipeline's stage
    segment     red               a part of a distributed backward pass, on one worker
    step        green             an optimizer's update
    cell        light green       a cell on a worker
    pass        violet            a local backward pass, such as ``loss.backward()``
    load        brown             the loading of a batch
    wait        yellow            a worker that came to a collective before the last one
    collective  dark blue         a collective, over all workers of its group
    own         light grey        nbdist's own work: a step's order, a state dict, a message on its way

The colours are ones that colour-blind people can tell apart; most are from the palette of Okabe and Ito.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from typing import NamedTuple

from nbdist.amounts import counted
from nbdist.views.drawing.pictures import as_image, legend, svg, themed

# The width in pixels: JupyterLab's room for outputs in a window 1,050 wide with its file browser open.
_WIDTH = 590
_ROW = 24  # the height of a row in pixels
_LETTER = 6.5  # the width of a letter in pixels, about, at the font size of the drawing
_NARROW = 8  # pixels: neighbours of one kind that are not wider together are drawn as one bar
_LABEL_LETTERS = 24  # of a row's label are drawn; a longer label ends with an ellipsis


class Kind(NamedTuple):
    """The colour of one kind of work, and its words: in the legend, and after a number."""

    colour: str
    words: str
    one: str
    many: str
    ink: str = "#111"
    """The colour of texts on it."""


_COLLECTIVE = "collective, from its first worker to its last, and to its end where torch has noted that"
KINDS: dict[str, Kind] = {
    "call": Kind("#b0b0b0", "call of a function", "call", "calls"),
    "forward": Kind("#56b4e9", "forward of a micro-batch (its number)", "micro-batch forward", "micro-batches forward"),
    "backward": Kind(
        "#e69f00", "backward of a micro-batch (its number)", "micro-batch backward", "micro-batches backward"
    ),
    "segment": Kind("#d55e00", "segment of a backward pass", "backward segment", "backward segments"),
    "step": Kind("#009e73", "optimizer step", "optimizer step", "optimizer steps"),
    "cell": Kind("#ccffaa", "cell", "cell", "cells"),
    "pass": Kind("#9933ff", "local backward pass", "local backward pass", "local backward passes", "#fff"),
    "load": Kind("#663311", "loading of a batch", "batch loaded", "batches loaded", "#fff"),
    "wait": Kind("#f0e442", "wait for the last worker of a collective", "wait", "waits"),
    "collective": Kind("#0072b2", _COLLECTIVE, "collective", "collectives", "#fff"),
    "own": Kind("#dcdcdc", "nbdist's own work", "task of nbdist's own", "tasks of nbdist's own"),
}


class Bar(NamedTuple):
    """A bar of a timeline: one piece of work, from ``start`` to ``end`` in seconds."""

    start: float
    end: float
    text: str
    kind: str  # one of `KINDS`
    tip: str


_Row = tuple[str, Sequence[Bar]]  # the label and the bars
_Band = tuple[Sequence[Bar], Collection[int]]


def fold(bars: Sequence[Bar], seconds: float) -> list[Bar]:
    """Return a row's bars, sorted by start, with neighbours of one kind as one bar if they overlap or are narrow."""
    # A bar that stands for several has their number as its text, and the tip of the longest.
    groups: list[list[Bar]] = []
    end = 0.0
    for bar in bars:
        last = groups[-1][-1] if groups else bar._replace(kind="")
        if last.kind == bar.kind and (bar.start < end or bar.end - last.start < _NARROW * seconds / _WIDTH):
            groups[-1].append(bar)
            end = max(end, bar.end)
        else:
            groups.append([bar])
            end = bar.end
    return [_as_one(group) if len(group) > 1 else group[0] for group in groups]


def _as_one(bars: Sequence[Bar]) -> Bar:
    kind, longest = KINDS[bars[0].kind], max(bars, key=lambda bar: bar.end - bar.start)
    tip = f"{counted(len(bars), kind.one, kind.many)}; the longest: {longest.tip}"
    return Bar(bars[0].start, max(bar.end for bar in bars), f"{len(bars)} ×", bars[0].kind, tip)  # noqa: RUF001


def micro_batch_name(kind: str, stage: int, micro_batch: int) -> str:
    """Return an operation's name in timelines: "forward of micro-batch 3, stage 1"."""
    return f"{kind} of micro-batch {micro_batch}, stage {stage}"


def with_legend(drawings: Sequence[str], kinds: Collection[str]) -> str:
    """Return drawings, which are HTML, as one piece of HTML in the page's font, with a legend of these `KINDS`."""
    entries = legend((kind.colour, escape(kind.words)) for name, kind in KINDS.items() if name in kinds)
    return themed(*drawings, f"<div>{entries}</div>")


def gantt(title: str, rows: Sequence[_Row], seconds: float, bands: Sequence[_Band] = ()) -> str:
    """Return a timeline as HTML: a line of bars for each row, above an axis from 0 to ``seconds``, in milliseconds.

    ``title`` is the heading. Each row is a label and its bars, whose times are in seconds. A bar's text is drawn if it
    fits; its tip is shown under the pointer. The ``bands`` are bars of a row, with the numbers of other rows
    that they cross, as a veil behind the bars there. The result is an SVG image; all texts are escaped here.
    """
    labels = [label if len(label) <= _LABEL_LETTERS else f"{label[: _LABEL_LETTERS - 1]}…" for label, _ in rows]
    left_end = 16 + int(_LETTER * max(map(len, labels), default=0))
    track = _WIDTH - left_end - 8
    scale = track / seconds if seconds else 0.0
    height = 20 + _ROW * len(rows) + 18
    parts = [f'<text x="4" y="13" font-weight="bold" class="ink">{escape(title)}</text>']
    for number, (label, (_, bars)) in enumerate(zip(labels, rows, strict=True)):
        top = 20 + number * _ROW
        parts.append(f'<text x="4" y="{top + 15}" class="ink">{escape(label)}</text>')
        parts.append(f'<rect x="{left_end}" y="{top}" width="{track}" height="{_ROW - 4}" class="track"/>')
        for bar in (bar for row, numbers in bands if number in numbers for bar in row):
            left, width = left_end + bar.start * scale, max((bar.end - bar.start) * scale, 0.5)
            veil = f'height="{_ROW}" fill="{KINDS[bar.kind].colour}" fill-opacity="0.3"'
            parts.append(f'<rect x="{left:.1f}" y="{top - 2}" width="{width:.1f}" {veil}/>')
        for bar in bars:
            left, width = left_end + bar.start * scale, max((bar.end - bar.start) * scale, 0.5)
            parts.append(
                f'<g><title>{escape(bar.tip)}</title><rect x="{left:.1f}" y="{top}" width="{width:.1f}" '
                f'height="{_ROW - 4}" fill="{KINDS[bar.kind].colour}" class="line" stroke-width="0.4"/>'
            )
            if width > _LETTER * len(bar.text) + 2:  # a text that does not fit is only in the tip
                place = f'x="{left + width / 2:.1f}" y="{top + 14}" text-anchor="middle" fill="{KINDS[bar.kind].ink}"'
                parts.append(f"<text {place}>{escape(bar.text)}</text>")
            parts.append("</g>")
    # All in milliseconds: `nbdist.amounts.duration` could give them different units.
    for at, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        place = f'x="{left_end + track * at / 4:.0f}" y="{height - 8}" text-anchor="{anchor}"'
        parts.append(f'<text {place} class="ink">{seconds * at / 4 * 1e3:.1f} ms</text>')
    return as_image(svg(_WIDTH, height, title, parts))
