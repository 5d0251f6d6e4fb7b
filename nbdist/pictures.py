"""Drawings in places that take none: where a page is not trusted, it has no SVG, but it has images of them."""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from xml.etree import ElementTree

__all__ = ["as_image"]

_UNFIT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")
"""What XML does not allow, and source code may have."""
_SVG = "{http://www.w3.org/2000/svg}"


def as_image(svg: str) -> str:
    """A drawing as HTML of an image; the titles of its groups are shown where they have their boxes."""
    svg = _UNFIT.sub("", svg)
    root = ElementTree.fromstring(svg)
    name = f"nbdist-{hashlib.sha1(svg.encode()).hexdigest()[:12]}"
    title = root.findtext(f"{_SVG}title") or ""
    areas = "".join(_area(group) for group in root.iter(f"{_SVG}g"))
    image = base64.b64encode(svg.encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{image}" alt="{escape(title)}" usemap="#{name}" '
        f'width="{root.get("width")}" height="{root.get("height")}" style="max-width:none">'
        f'<map name="{name}">{areas}</map>'
    )


def _area(group: ElementTree.Element) -> str:
    title, box = group.findtext(f"{_SVG}title"), group.find(f"{_SVG}rect")
    if not title or box is None:
        return ""
    left, top, width, height = (float(box.get(side, 0)) for side in ("x", "y", "width", "height"))
    corners = ",".join(str(round(each)) for each in (left, top, left + max(width, 1), top + height))
    return f'<area shape="rect" coords="{corners}" title="{escape(title)}">'
