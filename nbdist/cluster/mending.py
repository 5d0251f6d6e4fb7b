"""`Mending`: what a worker may ask of the notebook for its process group. Workers call it by its name, "mending".

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

from nbdist.cluster.lifecycle import Lifecycle
from nbdist.cluster.worker_changes import WorkerChanges


class Mending:
    """Answers the requests of one cluster's workers, while it runs. No method waits for what it begins."""

    METHODS = ("form_group_anew", "enter_group", "end_group", "restart_worker")  # those that workers call

    def __init__(self, lifecycle: Lifecycle, changes: WorkerChanges) -> None:
        self._lifecycle, self._changes = lifecycle, changes

    def form_group_anew(self, generation: int) -> None:
        """Form the process group again once all workers are idle: see `Lifecycle.form_group_later`."""
        self._lifecycle.form_group_later(generation)

    def enter_group(self, name: str) -> int:
        """Return the number of the process group that worker ``name`` forms in a cell: see `Lifecycle.enter_group`."""
        return self._lifecycle.enter_group(name)

    def end_group(self, generation: int, why: str) -> None:
        """End the forming of a process group on all workers, with RendezvousError and the text ``why``."""
        self._lifecycle.generations.end(generation, why)

    def restart_worker(self, name: str, incarnation: int, because: str) -> None:
        """Restart a worker in a new thread: see `WorkerChanges.replace`."""
        threading.Thread(
            target=self._changes.replace, args=(name, incarnation, because), name="nbdist-mending", daemon=True
        ).start()
