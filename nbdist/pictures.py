"""HTML that looks as the page around it does: in the page's font and colours; and drawings as images.

A page that is not trusted shows no SVG, but it shows images of them. An image cannot see the page's variables, so a
drawing has two sets of colours (`SVG_STYLE`), and a rule beside the image tells it which the page is::

    the page is light, or says nothing      dark ink on white paper
    the page is dark, and trusted           light ink on dark paper

Where the rule is not allowed, the drawing has its own white paper, on which it can be read in a dark page, too.
"""

from __future__ import annotations

import base64
import re
from html import escape
from xml.etree import ElementTree

__all__ = ["SVG_FONT", "SVG_STYLE", "as_image", "themed"]

_UNFIT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")
"""What XML does not allow, and source code may have."""
_SMALLEST = 0.66
"""By so much an image is made smaller before it is scrolled: letters of 11 pixels are 7 then."""

SVG_FONT = "system-ui, sans-serif"
"""The font of drawings."""
SVG_STYLE = (
    "<style>.paper{fill:#fff}.track{fill:#eee}.ink{fill:#222}.line{stroke:#222}.gap{stroke:#fff}"
    "@media (prefers-color-scheme:dark){.paper{fill:#111}.track{fill:#2b2b2b}.ink{fill:#e6e6e6}.line{stroke:#888}"
    ".gap{stroke:#111}}</style>"
)
"""The classes of a drawing's parts, with their colours in light and dark pages."""
_DARK = '<style>[data-jp-theme-light="false"] .nbdist-image, .vscode-dark .nbdist-image { color-scheme: dark; }</style>'
_THEME = (
    "font-family:var(--jp-ui-font-family, inherit);font-size:var(--jp-ui-font-size1, inherit);"
    "color:var(--jp-ui-font-color1, inherit)"
)
_SVG = "{http://www.w3.org/2000/svg}"


def themed(*parts: str) -> str:
    """Return HTML that shows these parts in the font, size and colour of the page's own texts."""
    return f'<div style="{_THEME}">{"".join(parts)}</div>'


def as_image(svg: str) -> str:
    """Return a drawing as HTML of an image, with the titles of its groups where they have their boxes.

    The image is as wide as its page allows, and never wider than it was drawn. Where less than two thirds of that is
    left, it is scrolled in a box of its own; it is never cut. The titles are in elements that lie on the image, because
    an image map does not follow an image's size. The drawing is dark in a dark page if it has the classes of
    `SVG_STYLE`.
    """
    svg = _UNFIT.sub("", svg)
    root = ElementTree.fromstring(svg)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    title = root.findtext(f"{_SVG}title") or ""
    titles = "".join(_titled(group, width, height) for group in root.iter(f"{_SVG}g"))
    image = base64.b64encode(svg.encode()).decode()
    return (
        f'{_DARK}<div style="overflow-x:auto">'
        f'<div style="position:relative;max-width:{width:g}px;min-width:{width * _SMALLEST:.0f}px">'
        f'<img src="data:image/svg+xml;base64,{image}" alt="{escape(title)}" width="{width:g}" '
        f'class="nbdist-image" style="display:block;width:100%;max-width:100%;height:auto">{titles}</div></div>'
    )


def _titled(group: ElementTree.Element, width: float, height: float) -> str:
    """Return an element that has a group's title, and lies where the group's first rectangle is drawn."""
    title, box = group.findtext(f"{_SVG}title"), group.find(f"{_SVG}rect")
    if not title or box is None or not width or not height:
        return ""
    x, y, wide, high = (float(box.get(side, 0)) for side in ("x", "y", "width", "height"))
    sides = {"left": x / width, "top": y / height, "width": max(wide, 1) / width, "height": high / height}
    style = ";".join(f"{side}:{share * 100:.2f}%" for side, share in sides.items())
    return f'<span title="{escape(title)}" style="position:absolute;{style}"></span>'
