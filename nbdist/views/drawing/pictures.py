"""HTML in the font and colours of the page around it, and drawings as images.

A page that is not trusted shows no SVG, but it shows images of SVG. An image cannot read the page's variables, so a
drawing has two sets of colours (`_SVG_STYLE`), and a style rule beside the image tells it whether the page is dark::

    the page is light, or does not say      dark ink on white paper
    the page is dark, and trusted           light ink on dark paper

If the page does not allow the rule, the drawing keeps its white paper, so it is readable in a dark page, too.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from html import escape
from xml.etree import ElementTree

_UNFIT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")  # XML forbids these; code may have them
_SMALLEST = 0.66  # the scale below which an image is scrolled instead: letters of 11 pixels are 7 pixels high then

# The classes of a drawing's parts, with their colours in light and in dark pages.
_SVG_STYLE = (
    "<style>.paper{fill:#fff}.track{fill:#eee}.ink{fill:#222}.line{stroke:#222}.gap{stroke:#fff}"
    "@media (prefers-color-scheme:dark){.paper{fill:#111}.track{fill:#2b2b2b}.ink{fill:#e6e6e6}.line{stroke:#888}"
    ".gap{stroke:#111}}</style>"
)
# Tells an image that its page is dark, in JupyterLab and VS Code.
_DARK = '<style>[data-jp-theme-light="false"] .nbdist-image, .vscode-dark .nbdist-image { color-scheme: dark; }</style>'
_THEME = (
    "font-family:var(--jp-ui-font-family, inherit);font-size:var(--jp-ui-font-size1, inherit);"
    "color:var(--jp-ui-font-color1, inherit)"
)
_SVG = "{http://www.w3.org/2000/svg}"


def themed(*parts: str) -> str:
    """Return HTML that shows ``parts``, which are HTML, in the font, size and colour of the page's own text."""
    return f'<div style="{_THEME}">{"".join(parts)}</div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return a legend as HTML. Each entry is a colour and the HTML of its meaning."""
    return " ".join(
        f'<span style="margin-right:12px;white-space:nowrap"><span style="color:{colour}">■</span> {meaning}</span>'
        for colour, meaning in entries
    )


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return a drawing on paper as SVG; ``title`` is escaped here. The ``parts`` use the classes of `_SVG_STYLE`."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" font-size="11"><title>{escape(title)}</title>{_SVG_STYLE}'
        f'<rect width="100%" height="100%" class="paper"/>{"".join(parts)}</svg>'
    )


def as_image(svg: str) -> str:
    """Return a drawing as an HTML image, with a tooltip over the box of each group that has a title."""
    # As wide as its page allows, and never wider than it was drawn. In a page with less than two thirds of this width,
    # it scrolls. In a dark page it is dark if the drawing uses the classes of `_SVG_STYLE`.
    svg = _UNFIT.sub("", svg)
    root = ElementTree.fromstring(svg)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    title = root.findtext(f"{_SVG}title") or ""
    # Elements that lie on the image, in per cent of its size: an image map does not follow the size of an image.
    titles = "".join(_titled(group, width, height) for group in root.iter(f"{_SVG}g"))
    image = base64.b64encode(svg.encode()).decode()
    return (
        f'{_DARK}<div style="overflow-x:auto">'
        f'<div style="position:relative;max-width:{width:g}px;min-width:{width * _SMALLEST:.0f}px">'
        f'<img src="data:image/svg+xml;base64,{image}" alt="{escape(title)}" width="{width:g}" '
        f'class="nbdist-image" style="display:block;width:100%;max-width:100%;height:auto">{titles}</div></div>'
    )


def _titled(group: ElementTree.Element, width: float, height: float) -> str:
    """Return an element with a group's title as its tooltip, over the group's first rectangle; "" if it has none."""
    title, box = group.findtext(f"{_SVG}title"), group.find(f"{_SVG}rect")
    if not title or box is None or not width or not height:
        return ""
    x, y, wide, high = (float(box.get(side, 0)) for side in ("x", "y", "width", "height"))
    sides = {"left": x / width, "top": y / height, "width": max(wide, 1) / width, "height": high / height}
    style = ";".join(f"{side}:{share * 100:.2f}%" for side, share in sides.items())
    return f'<span title="{escape(title)}" style="position:absolute;{style}"></span>'
