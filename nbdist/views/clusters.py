"""Registers the views of `Cluster` with the class: layer 5 must not import layer 6, where the views are."""

from __future__ import annotations

from nbdist.cluster.cluster import Cluster
from nbdist.views.timeline.timeline import Timeline

__all__ = ["Cluster"]


def _timeline(cluster: Cluster) -> Timeline:
    """Record what all workers do from now on, until `Timeline.stop` or the end of a ``with`` block."""
    return Timeline(cluster.agent)


Cluster.add_view("timeline", _timeline)
