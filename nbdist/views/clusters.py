"""`Cluster` with all its views, which make themselves known to it here: it knows none of them."""

from __future__ import annotations

from nbdist.cluster.cluster import Cluster
from nbdist.views.timeline import Timeline

__all__ = ["Cluster"]


def _timeline(cluster: Cluster) -> Timeline:
    """Record what all workers do, until `stop`, or the end of a ``with`` block."""
    return Timeline(cluster.agent)


Cluster.add_view("timeline", _timeline)
