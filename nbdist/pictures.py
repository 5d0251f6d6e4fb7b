"""Drawings in places that take none: where a page is not trusted, it has no SVG, but it has images of them."""

from __future__ import annotations

import base64
import re
from html import escape
from xml.etree import ElementTree

__all__ = ["as_image"]

_UNFIT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")
"""What XML does not allow, and source code may have."""
_SMALLEST = 0.66
"""By so much an image is made smaller before it is scrolled: letters of 11 pixels are 7 then."""
_SVG = "{http://www.w3.org/2000/svg}"


def as_image(svg: str) -> str:
    """Return a drawing as HTML of an image, with the titles of its groups where they have their boxes.

    The image is as wide as its page allows, and never wider than it was drawn. Where less than two thirds of that is
    left, it is scrolled in a box of its own; it is never cut. The titles are in elements that lie on the image, because
    an image map does not follow an image's size.
    """
    svg = _UNFIT.sub("", svg)
    root = ElementTree.fromstring(svg)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    title = root.findtext(f"{_SVG}title") or ""
    titles = "".join(_titled(group, width, height) for group in root.iter(f"{_SVG}g"))
    image = base64.b64encode(svg.encode()).decode()
    return (
        '<div style="overflow-x:auto">'
        f'<div style="position:relative;max-width:{width:g}px;min-width:{width * _SMALLEST:.0f}px">'
        f'<img src="data:image/svg+xml;base64,{image}" alt="{escape(title)}" width="{width:g}" '
        f'style="display:block;width:100%;max-width:100%;height:auto">{titles}</div></div>'
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
