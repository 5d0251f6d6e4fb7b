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
from typing import TYPE_CHECKING

from nbdist.errors import RendezvousError

if TYPE_CHECKING:  # workers import this module, but not the notebook's side of clusters
    from nbdist.cluster.lifecycle import Lifecycle
    from nbdist.cluster.worker_changes import WorkerChanges

__all__ = ["end_group", "enter_group", "follow", "form_group_anew", "restart_worker"]

_lifecycle: Lifecycle | None = None
"""The starts and process groups of this process's cluster, in the notebook; None unless the cluster runs."""
_changes: WorkerChanges | None = None
"""The changes of its workers."""


def follow(lifecycle: Lifecycle | None = None, changes: WorkerChanges | None = None) -> None:
    """Let requests of workers reach the parts of this process's cluster; without arguments, the cluster has ended."""
    global _lifecycle, _changes
    _lifecycle, _changes = lifecycle, changes


def form_group_anew(generation: int) -> None:
    """Form the process group of this process's cluster again once all its workers are idle. Returns at once.

    ``generation`` is the number of the group that is gone. Does nothing if another group has formed since, if a
    worker is dead, or if there is no cluster any more.
    """
    if _lifecycle is not None:
        _lifecycle.form_group_later(generation)


def enter_group(name: str) -> int:
    """Return the number of the process group that worker ``name`` forms in a cell: see `Lifecycle.enter_group`.

    Raises RendezvousError if there is no cluster any more.
    """
    if _lifecycle is None:
        raise RendezvousError("the process group cannot form: the cluster has ended")
    return _lifecycle.enter_group(name)


def end_group(generation: int, why: str) -> None:
    """End the forming of a process group on all workers, with RendezvousError and the text ``why``."""
    if _lifecycle is not None:
        _lifecycle.generations.end(generation, why)


def restart_worker(name: str, incarnation: int, because: str) -> None:
    """Restart a worker of this process's cluster in a new thread. Returns at once.

    ``incarnation`` is the incarnation of the worker's agent. Does nothing if another incarnation runs by now, because
    the worker has been restarted meanwhile, or if there is no cluster any more. ``because`` is the reason, for the text
    of the WorkerLost of the worker's cells.
    """
    if (changes := _changes) is not None:
        threading.Thread(
            target=changes.replace, args=(name, incarnation, because), name="nbdist-mending", daemon=True
        ).start()
