"""Functions through which a lower layer gets objects of a higher layer, without importing it.

`nbdist` itself, above all layers, sets them; each imports its layer when it is first called. So a worker takes part in
calls that are recorded for a backward pass, although its program never imported `nbdist.autograd`; and a trace that is
printed in a plain script draws itself, although the drawing is in `nbdist.views`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.cluster.cluster import Cluster
    from nbdist.compat.ipyparallel.views import DirectView, LoadBalancedView
    from nbdist.rpc.agent import Agent
    from nbdist.views.timeline.timeline import Timeline

__all__ = ["describe", "draw", "make_recorder", "make_timeline", "make_view"]

make_recorder: Callable[[Any], Any]
"""Returns the recorder of an agent, a `nbdist.rpc.recording.CallRecorder`, which the agent calls for each call."""

describe: Callable[[Any], str]
"""Returns a value as lines of text. For a `Trace`, a `Plan` or an `Examination`, whose repr this is."""

draw: Callable[[Any], dict[str, str]]
"""Returns a value's pictures by MIME type. For a `Trace`, a `Plan`, a `PipelineTimeline` or an `Examination`."""

make_timeline: Callable[[Agent], Timeline]
"""Returns a new timeline of the work of an agent and its world. For `Cluster.timeline`."""

make_view: Callable[[Cluster, Any, bool], DirectView | LoadBalancedView]
"""Returns a view of a cluster's workers, as ipyparallel has them. For `Cluster.view`, whose arguments it takes."""
