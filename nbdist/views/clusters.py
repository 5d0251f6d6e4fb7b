"""`Cluster` with all its views, which make themselves known to it here: it knows none of them."""

from __future__ import annotations

from nbdist.cluster.cluster import Cluster
from nbdist.views.timeline import Timeline

__all__ = ["Cluster"]

Cluster.add_view("timeline", lambda cluster: Timeline(cluster.agent))
