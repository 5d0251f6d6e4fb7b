"""Draws docs/tour.svg, the picture of the docs' first page, from cells that run in a real notebook kernel.

Run it from the repository, where nbdist and its test extra are installed: ``python docs/draw_tour.py``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PICTURE = Path(__file__).parent / "tour.svg"

CELLS = (
    "%load_ext nbdist\n%dist_init -n 3 --seed 1",
    '%%remote\nx = torch.full((2,), float(rank))\ndist.all_reduce(x)\nprint("sum:", x)',
    'import torch\nw = rpc.remote("worker1", torch.ones, args=(128, 64))  # the value stays on worker1\n'
    'print(rpc.rpc_sync("worker2", lambda there: there.to_here().sum(), args=(w,)))\nw.peek()',
    "%%remote 2\ny = torch.ones(2, 3) @ torch.ones(2, 3)",
    "%%remote 1\nimport os\nos._exit(3)",
    "%dist_restart\n%dist_shutdown",
)

WIDTH, MARGIN, GUTTER, PAD = 860, 16, 76, 8
LINE, CHARACTER, SIZE = 17, 7.8, 13
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
INK, FAINT, ERROR, MAGIC, STRING, COMMENT = "#1f2328", "#59636e", "#b42318", "#8250df", "#0a5c36", "#59636e"


def run_cells() -> list[list[tuple[str, str]]]:
    """Return what each cell shows: pairs of a kind, ``out``, ``result`` or ``error``, and text."""
    sys.path.insert(0, str(ROOT / "tests"))
    with tempfile.TemporaryDirectory(prefix="nbdist-draw-", dir="/tmp") as runtime:
        os.environ.setdefault("NBDIST_RUNTIME_DIR", runtime)
        from helpers.notebook.frontend import Notebook

        with Notebook(load=False) as notebook:
            return [_shown(notebook.run(code, check=False)) for code in CELLS]


def _shown(cell: Any) -> list[tuple[str, str]]:
    shown: list[tuple[str, str]] = []
    displays: dict[str, int] = {}
    for message in cell.messages:
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            shown.append(("out", content["text"]))
        elif kind == "execute_result":
            shown.append(("result", content["data"]["text/plain"]))
        elif kind == "error":
            shown.append(("error", cell.traceback))
        elif kind in ("display_data", "update_display_data") and "text/plain" in content["data"]:  # else a live view
            id = content.get("transient", {}).get("display_id", "")
            place = displays.setdefault(id, len(shown))
            if place == len(shown):
                shown.append(("out", ""))
            shown[place] = ("out", content["data"]["text/plain"])
    return [(kind, text.rstrip("\n")) for kind, text in shown]


def draw(outputs: list[list[tuple[str, str]]]) -> str:
    """Return the picture, as SVG."""
    shapes: list[str] = []
    y = float(MARGIN)
    for number, (code, shown) in enumerate(zip(CELLS, outputs, strict=True), 1):
        lines = code.split("\n")
        height = len(lines) * LINE + 2 * PAD
        shapes.append(
            f'<rect x="{MARGIN + GUTTER}" y="{y:g}" width="{WIDTH - 2 * MARGIN - GUTTER}" height="{height}" rx="4" '
            f'fill="#f6f8fa" stroke="#d1d9e0"/>'
        )
        shapes.append(_text(MARGIN + GUTTER - 10, y + PAD + LINE - 5, f"[{number}]:", FAINT, anchor="end"))
        shapes += [_code(y + PAD + (row + 1) * LINE - 5, line) for row, line in enumerate(lines) if line]
        y += height + PAD / 2
        for kind, text in shown:
            lines = text.split("\n")
            if kind == "error":
                shapes.append(
                    f'<rect x="{MARGIN + GUTTER}" y="{y + 2:g}" width="{WIDTH - 2 * MARGIN - GUTTER}" '
                    f'height="{len(lines) * LINE + PAD:g}" fill="#fff1f0"/>'
                )
                y += PAD / 2
            if kind == "result":
                shapes.append(_text(MARGIN + GUTTER - 10, y + LINE - 5, f"[{number}]:", FAINT, anchor="end"))
            color = ERROR if kind == "error" else INK
            for line in lines:
                y += LINE
                if line:
                    shapes.append(_text(MARGIN + GUTTER + 10, y - 5, line, color))
            y += PAD / 2 if kind == "error" else 0
        y += PAD
    height = y + MARGIN - PAD
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'height="{height:g}" font-family="{FONTS}" font-size="{SIZE}">\n<title>A notebook with nbdist</title>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _code(y: float, line: str) -> str:
    """Return a line of code, with its magic, its strings and its comment in colours of their own."""
    if line.startswith("%"):
        return _text(MARGIN + GUTTER + 10, y, line, MAGIC)
    code, mark, comment = line.partition("  # ")
    parts = [
        _coloured(f'"{piece}"', STRING) if place % 2 else escape(piece, quote=False)
        for place, piece in enumerate(code.split('"'))
    ]
    if mark:
        parts.append(_coloured(mark + comment, COMMENT))
    return _element(MARGIN + GUTTER + 10, y, "".join(parts), INK, len(line))


def _coloured(text: str, color: str) -> str:
    return f'<tspan fill="{color}">{escape(text, quote=False)}</tspan>'


def _text(x: float, y: float, text: str, color: str, *, anchor: str = "start") -> str:
    return _element(x, y, escape(text, quote=False), color, len(text), anchor)


def _element(x: float, y: float, inner: str, color: str, length: int, anchor: str = "start") -> str:
    # The length is given, so that columns meet in whatever font the reader has.
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{color}" xml:space="preserve" text-anchor="{anchor}" '
        f'textLength="{length * CHARACTER:g}" lengthAdjust="spacingAndGlyphs">{inner}</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(run_cells()))
    print(f"{PICTURE} is drawn.")
