"""Lets a worker ask for help after it has aborted collectives of NCCL. The notebook runs these functions, by RPC.

==================  ===============================================  ==================================================
worker              reason                                           notebook
==================  ===============================================  ==================================================
`form_group_anew`   an interrupt has aborted the process group       forms it again once all workers are idle
`restart_worker`    an abort has not returned within 5 s, or a       kills the worker and starts it again; its cells
                    thread stays in its collective although a        fail with WorkerLost, which says why
                    member has died: it can only end with the
                    process
==================  ===============================================  ==================================================

If a member has died and the abort succeeds, the worker asks for nothing: the user's `%dist_restart` starts the dead
worker, and forms the group again.
"""

from __future__ import annotations

import threading
from typing import Protocol

__all__ = ["MendableCluster", "follow", "form_group_anew", "restart_worker"]


class MendableCluster(Protocol):
    """The parts of a `nbdist.cluster.cluster.Cluster` that these requests need."""

    def form_group_later(self, generation: int) -> None:
        """Form the process group of all workers again once all are idle; return at once."""
        ...

    def replace(self, name: str, incarnation: int, because: str) -> None:
        """Restart the worker ``name`` for the reason ``because``, and wait for it; see `restart_worker`."""
        ...


_cluster: MendableCluster | None = None
"""The cluster of this process, in the notebook; None before it starts and after it has ended."""


def follow(cluster: MendableCluster | None) -> None:
    """Let requests of workers reach ``cluster``, the one of this process; None when the cluster has ended."""
    global _cluster
    _cluster = cluster


def form_group_anew(generation: int) -> None:
    """Form the process group of this process's cluster again once all its workers are idle. Returns at once.

    ``generation`` is the number of the group that was aborted. Does nothing if another group has formed since, if a
    worker is dead, or if there is no cluster any more.
    """
    if (cluster := _cluster) is not None:
        cluster.form_group_later(generation)


def restart_worker(name: str, incarnation: int, because: str) -> None:
    """Restart a worker of this process's cluster in a new thread. Returns at once.

    ``incarnation`` is the incarnation of the worker's agent. Does nothing if another incarnation runs by now, because
    the worker has been restarted meanwhile, or if there is no cluster any more. ``because`` is the reason, for the text
    of the WorkerLost of the worker's cells.
    """
    if (cluster := _cluster) is not None:
        threading.Thread(
            target=cluster.replace, args=(name, incarnation, because), name="nbdist-mending", daemon=True
        ).start()
