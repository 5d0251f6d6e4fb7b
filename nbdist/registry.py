"""Functions through which a lower layer gets objects of a higher layer, without importing it.

The package's own ``__init__``, above all layers, sets them. Each function imports its layer when it is first called. So
a worker can record calls for a backward pass although its program never imported `nbdist.autograd`, and a trace in a
plain script can draw itself although the drawing code is in `nbdist.views`. Types of higher layers are not named here,
which would tie all layers into one circle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

make_recorder: Callable[[Any], Any]
"""Returns a new recorder for an agent, a `nbdist.rpc.recording.CallRecorder`. The agent uses it for each call."""

describe: Callable[[Any], str]
"""Returns the repr of a `Trace`, a `Plan` or an `Examination`: lines of text."""

draw: Callable[[Any], dict[str, str]]
"""Returns the pictures of a `Trace`, a `Plan`, a `PipelineTimeline` or an `Examination`, by MIME type."""

make_timeline: Callable[[Any], Any]
"""Returns a new timeline of the work of an agent and its world. For `Cluster.timeline`, which has its type."""

make_view: Callable[[Any, Any, bool], Any]
"""Returns a view of a cluster's workers, like ipyparallel's views. For `Cluster.view`, whose arguments it takes."""
