"""Sends the tasks of views to workers: one at a time to each, in the order in which they were given.

A worker of ipyparallel does one thing after the other, and a load balanced task goes to whoever is free. Both come of
one rule here: a worker that is free takes the oldest task that it may do. Each worker has a thread here while it has
tasks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.cluster.cells import Cell
from nbdist.cluster.cluster import Cluster
from nbdist.compat.ipyparallel import tasks
from nbdist.rpc import api

__all__ = ["Lanes", "Task"]


@dataclass(eq=False)
class Task:
    """One call, the workers that may do it, and whom to tell."""

    call: tuple[Any, ...]
    """The arguments of `tasks.run`."""
    workers: Sequence[str]
    sent: Callable[[str], None]
    """Told who does it."""
    ended: Callable[[Any, BaseException | None], None]
    """Told what `tasks.run` has returned, or the error."""


class Lanes:
    """The tasks of one cluster that nobody has taken."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._tasks: list[Task] = []
        self._served: set[str] = set()

    @classmethod
    def of(cls, cluster: Cluster) -> Lanes:
        """Return the lanes of a cluster."""
        return _lanes.get(cluster) or _lanes.setdefault(cluster, cls(cluster))

    def add(self, tasks: Sequence[Task]) -> None:
        """Have tasks done, each by the first of its workers that is free. Called in any thread."""
        with self._lock:
            self._tasks += tasks
            idle = {name for task in tasks for name in task.workers} - self._served
            self._served |= idle
        for name in sorted(idle):
            threading.Thread(target=self._serve, args=(name,), name=f"nbdist-view-{name}", daemon=True).start()

    def _serve(self, name: str) -> None:
        while True:
            with self._lock:
                task = next((task for task in self._tasks if self._may(name, task)), None)
                if task is None:
                    self._served.remove(name)
                    return
                self._tasks.remove(task)
            try:
                self._wait_for_cells(name)
                task.sent(name)
                with torch.no_grad():  # a task's tensors are values: no context records them
                    answer, error = api.rpc_sync(name, tasks.run, task.call, timeout=0), None
            except BaseException as failed:
                answer, error = None, failed
            task.ended(answer, error)
            del task, answer, error

    def _may(self, name: str, task: Task) -> bool:
        """Return whether a worker is to do a task. One that is dead leaves it to others, if any of them lives."""
        living = [each for each in task.workers if self._cluster.find(each).alive] or task.workers
        return name in living

    def _wait_for_cells(self, name: str) -> None:
        """Wait until the cells that a worker has been given are over: they came before the task.

        The kernel thread knows them. It is asked in its turn, after all cells that were sent before this.
        """

        async def cells() -> list[Cell]:
            return list(self._cluster.find(name).cells)

        for cell in self._cluster.kernel_thread.run(cells()).result():
            over = threading.Event()
            cell.when_done(over.set)
            over.wait()


_lanes: weakref.WeakKeyDictionary[Cluster, Lanes] = weakref.WeakKeyDictionary()
