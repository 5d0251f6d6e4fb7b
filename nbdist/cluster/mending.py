"""Lets a worker ask for help with its process group. The notebook runs these functions, by RPC.

==================  ===============================================  ==================================================
worker              reason                                           notebook
==================  ===============================================  ==================================================
`form_group_anew`   an interrupt has aborted the process group, or   forms it again once all workers are idle
                    a cell has destroyed it
`enter_group`       a cell forms the group again                     numbers the group, and makes its store
`end_group`         this has failed on the worker                    ends the waits of the other workers
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
from typing import Any

from nbdist.errors import RendezvousError

__all__ = ["end_group", "enter_group", "follow", "form_group_anew", "restart_worker"]

_cluster: Any = None
"""The cluster of this process, in the notebook; None before it starts and after it has ended."""


def follow(cluster: Any) -> None:
    """Let requests of workers reach ``cluster``, the one of this process; None when the cluster has ended."""
    global _cluster
    _cluster = cluster


def form_group_anew(generation: int) -> None:
    """Form the process group of this process's cluster again once all its workers are idle. Returns at once.

    ``generation`` is the number of the group that is gone. Does nothing if another group has formed since, if a
    worker is dead, or if there is no cluster any more.
    """
    if (lifecycle := getattr(_cluster, "lifecycle", None)) is not None:
        lifecycle.form_group_later(generation)


def enter_group(name: str) -> int:
    """Return the number of the process group that worker ``name`` forms in a cell: see `Lifecycle.enter_group`.

    Raises RendezvousError if there is no cluster any more.
    """
    if (lifecycle := getattr(_cluster, "lifecycle", None)) is None:
        raise RendezvousError("the process group cannot form: the cluster has ended")
    return int(lifecycle.enter_group(name))


def end_group(generation: int, why: str) -> None:
    """End the forming of a process group on all workers, with RendezvousError and the text ``why``."""
    if (lifecycle := getattr(_cluster, "lifecycle", None)) is not None:
        lifecycle.generations.end(generation, why)


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
