"""The objects of higher layers that lower layers use, such as ``registry.Timeline``.

A lower layer never imports a higher one: it asks this module for an object by name, which imports the object's module
at the first use. So a worker can record calls for a backward pass although its program never imported
`nbdist.autograd`, and a trace in a plain script can draw itself although the drawing code is in `nbdist.views`. Types
of higher layers are not named here, which would tie all layers into one circle.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

MODULES = {
    "Recorder": "nbdist.autograd.recorder",
    "text_of": "nbdist.views.values",
    "pictures_of": "nbdist.views.values",
    "Timeline": "nbdist.views.timeline.timeline",
    "Client": "nbdist.compat.ipyparallel.client",
}
"""The module of each object, by the object's name."""

# Types of objects above, without values: each use asks `__getattr__`. The others are Any.
text_of: Callable[[Any], str]
pictures_of: Callable[[Any], dict[str, str]]


def __getattr__(name: str) -> Any:
    """Import the module of an object, and return the object. AttributeError for a name that `MODULES` lacks."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)
