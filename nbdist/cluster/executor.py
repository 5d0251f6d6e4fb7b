"""Calls functions on workers, each on the first worker that is free: `Cluster.executor`.

One rule gives all orders: a worker that is free takes the oldest task that it may run. ::

    submit ── Task ──> Lanes ──> one thread for each worker that has tasks ── call ──> `worker_tasks.run`
    caller <── Task.settle ─────────────────────────┘ <── value, started, completed ──┘

Each worker runs one task at a time, in a thread beside its cells.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

import torch

from nbdist.cluster.worker_tasks import now, run
from nbdist.errors import UsageError
from nbdist.rpc import api

if TYPE_CHECKING:
    from nbdist.cluster.cluster import Cluster

__all__ = ["Lanes", "Task", "WorkerExecutor"]


class Task(Future[Any]):
    """The future of one call's value, which also knows the worker that ran the call, and when.

    `cancel` drops a task that no worker has begun. ``cluster.interrupt()`` ends one that runs.
    """

    rank: int | None = None
    """The rank of the worker that runs the task; None until a worker has taken it."""
    started: datetime.datetime | None = None
    """When the call started, by the worker's clock; None until its value has arrived."""
    completed: datetime.datetime | None = None
    """When the call returned, by the worker's clock; None until its value has arrived."""
    received: datetime.datetime | None = None
    """When the value or the error arrived here; None until then."""

    def __init__(self, call: tuple[Any, ...] = (), workers: Sequence[str] = ()) -> None:
        """Make the task of ``function(*args, **kwargs)``, the three of which are ``call``, for one of some workers.

        No worker runs a task that has no call: whoever made it calls `settle`.
        """
        super().__init__()
        self.call, self.workers = call, workers
        self.submitted = now()
        """When the task was made."""

    @property
    def seconds(self) -> float:
        """How long the call took, by the worker's clock; 0 until its value has arrived."""
        return (self.completed - self.started).total_seconds() if self.started and self.completed else 0.0

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """Set the value, or the error if there is one."""
        self.received, self.call = now(), ()  # whoever keeps the task does not keep the arguments
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)


class Lanes:
    """Hands the tasks of one cluster to its workers, one at a time to each."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._waiting: list[Task] = []
        self._served: set[str] = set()
        """The workers that have a thread here."""

    def add(self, task: Task) -> None:
        """Queue a task. Called in any thread."""
        with self._lock:
            self._waiting.append(task)
            self._serve_all(task.workers)

    def _serve_all(self, names: Sequence[str]) -> None:
        """Start a thread for each of some workers that has none. The caller holds the lock."""
        for name in set(names) - self._served:
            self._served.add(name)
            threading.Thread(target=self._serve, args=(name,), name=f"nbdist-tasks-{name}", daemon=True).start()

    def _serve(self, name: str) -> None:
        while (task := self._take(name)) is not None:
            if not task.set_running_or_notify_cancel():
                continue
            try:
                self._wait_for_cells(name)
                task.rank = self._cluster.find(name).rank
                with torch.no_grad():  # a task's tensors are values: no context records them
                    value, started, completed = api.rpc_sync(name, run, task.call, timeout=0)
            except BaseException as error:
                task.settle(error=error)
            else:
                task.started, task.completed = started, completed
                task.settle(value)
                del value
            del task

    def _take(self, name: str) -> Task | None:
        """Return the oldest task that a worker may run. Without one, return None: the worker's thread ends.

        A dead worker leaves a task to the living ones. If none lives, the dead one takes the task, which then fails.
        """
        with self._lock:
            for task in self._waiting:
                if name not in task.workers:
                    continue
                living = [each for each in task.workers if self._cluster.find(each).alive]
                if name in living or not living:
                    self._waiting.remove(task)
                    return task
                self._serve_all(living)  # one may have been restarted since the task was added
            self._served.remove(name)
            return None

    def _wait_for_cells(self, name: str) -> None:
        """Wait until the cells that a worker was given before the task have ended.

        The kernel thread knows the cells. It is asked in its turn, after all cells that were sent before this.
        """
        if not self._cluster.running:
            raise UsageError("the cluster has been shut down")

        async def end_of_cells() -> None:
            for cell in list(self._cluster.find(name).cells):
                ended = asyncio.Event()
                cell.when_done(ended.set)
                await ended.wait()

        self._cluster.kernel_thread.run(end_of_cells()).result()


class WorkerExecutor(Executor):
    """Calls functions on some workers, as an executor of `concurrent.futures`. `Cluster.executor` makes it.

    ``map`` and the ``with`` block are Python's: ``with cluster.executor() as pool: pool.map(f, items)``.
    """

    def __init__(self, lanes: Lanes, workers: Sequence[str]) -> None:
        self._lanes, self._workers = lanes, workers
        self._tasks: set[Task] = set()
        self._is_shut_down = False

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Task:
        """Call a function on the first worker that is free; return the future of its value at once.

        The future fails with the error that the function raised, with `EncodeError` if the arguments cannot be sent,
        and with `WorkerLost` if the worker dies. Living workers take over the tasks that a dead one has not begun; if
        none lives, these fail as well.

        Raises:
            UsageError: The executor has been shut down.
        """
        if self._is_shut_down:
            raise UsageError("this executor has been shut down; cluster.executor() makes another")
        task = Task((function, args, kwargs), self._workers)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._lanes.add(task)
        return task

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse new tasks. With ``cancel_futures``, drop the tasks that no worker has begun. Wait for the rest.

        Returns at once if ``wait`` is false. The workers live on.
        """
        self._is_shut_down = True
        left = list(self._tasks)
        if cancel_futures:
            for task in left:
                task.cancel()
        if wait:
            concurrent.futures.wait(left)
