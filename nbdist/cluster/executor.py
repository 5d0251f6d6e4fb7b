"""Calls functions on workers, each on the first worker that is free: `Cluster.executor`.

There is one rule: a free worker takes the oldest task that it may run. ::

    submit ── Task ──> Lanes ──> one thread for each worker that has tasks ── call ──> `worker.tasks.run`
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
from typing import Any, Protocol

import torch

from nbdist.cluster.kernels.connection import KernelThread
from nbdist.cluster.worker.tasks import now, run
from nbdist.cluster.workers import Worker
from nbdist.errors import UsageError
from nbdist.rpc import api

__all__ = ["Lanes", "Task", "WorkerExecutor"]


class Task(Future[Any]):
    """The future of one call's value, which also knows the worker that ran the call, and when.

    `cancel` drops a task that no worker has taken, and returns False for a task that one has taken;
    ``cluster.interrupt()`` ends a task that runs.
    """

    rank: int | None = None
    """The rank of the worker that runs the task; None until that worker has ended its earlier cells."""
    started: datetime.datetime | None = None
    """When the call started, by the worker's clock; None until its value has arrived."""
    completed: datetime.datetime | None = None
    """When the call returned, by the worker's clock; None until its value has arrived."""
    received: datetime.datetime | None = None
    """When the value or the error arrived here; None until then."""

    def __init__(self, call: tuple[Any, ...] = (), workers: Sequence[str] | None = ()) -> None:
        """Make a task for ``call``, which is ``(function, args, kwargs)``, to run on one of these workers.

        ``workers`` is None for all workers of the cluster, also those that join before one has taken the task.
        A task without a call is run by no worker: the code that made the task must call `settle`.
        """
        super().__init__()
        self.call, self.workers = call, workers
        self.submitted = now()
        """When the task was made."""

    @property
    def seconds(self) -> float:
        """Seconds that the call took, by the worker's clock; 0 until its value has arrived, and for a failed task."""
        return (self.completed - self.started).total_seconds() if self.started and self.completed else 0.0

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """Complete the task with an error if there is one, else with a value. Drops the arguments. Call it once.

        A second call raises InvalidStateError.
        """
        self.received, self.call = now(), ()  # a task that somebody keeps does not keep its arguments
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)


class TaskCluster(Protocol):
    """The parts of a `nbdist.cluster.cluster.Cluster` that `Lanes` needs."""

    @property
    def running(self) -> bool:
        """True while the workers are ready."""
        ...

    @property
    def kernel_thread(self) -> KernelThread:
        """The thread that talks to the workers' kernels."""
        ...

    @property
    def names(self) -> list[str]:
        """The names of the workers, of which there may be more later."""
        ...

    def find(self, name: str) -> Worker:
        """Return the worker called ``name``, dead or alive. Raises UnknownWorker if there is none."""
        ...


class Lanes:
    """Hands the tasks of one cluster to its workers, one task at a time to each, by a thread for each worker."""

    def __init__(self, cluster: TaskCluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._waiting: list[Task] = []
        self._served: set[str] = set()
        """The names of the workers that have a thread."""

    def add(self, task: Task) -> None:
        """Queue a task, and start threads for its workers that have none. Called in any thread.

        Returns at once; the first of these workers that is free runs the task. Once the cluster has been shut down,
        the task fails with UsageError.
        """
        with self._lock:
            self._waiting.append(task)
            self._serve_all(self._workers_of(task))

    def look_again(self) -> None:
        """Start threads for workers that have joined, if there are tasks that they may run. Called in any thread."""
        with self._lock:
            for task in self._waiting:
                self._serve_all(self._workers_of(task))

    def _workers_of(self, task: Task) -> Sequence[str]:
        """Return the names of the workers that may run a task."""
        return self._cluster.names if task.workers is None else task.workers

    def _serve_all(self, names: Sequence[str]) -> None:
        """Start a thread for each of some workers that has none. The caller holds the lock."""
        for name in set(names) - self._served:
            self._served.add(name)
            threading.Thread(target=self._serve, args=(name,), name=f"nbdist-tasks-{name}", daemon=True).start()

    def _serve(self, name: str) -> None:
        """Run tasks on a worker, one after another, until there is none for it. In that worker's thread.

        An error of the call, or a worker that dies, fails the task and not the thread. A cancelled task is skipped.
        """
        while (task := self._take(name)) is not None:
            if not task.set_running_or_notify_cancel():
                continue
            try:
                self._wait_for_cells(name)
                task.rank = self._cluster.find(name).rank
                with torch.no_grad():  # tensors travel as plain values: no autograd context records them
                    value, started, completed = api.rpc_sync(name, run, task.call, timeout=0)
            except BaseException as error:
                task.settle(error=error)
            else:
                task.started, task.completed = started, completed
                task.settle(value)
                del value
            del task

    def _take(self, name: str) -> Task | None:
        """Take the oldest task that a worker may run out of the queue and return it; None if there is none.

        Does not wait. After None the worker's thread must end: it no longer counts as serving the worker. Takes the
        lock. A dead worker leaves tasks to living ones. If none of a task's workers lives, a dead one takes it, and it
        fails.
        """
        with self._lock:
            for task in self._waiting:
                workers = self._workers_of(task)
                if name not in workers:
                    continue
                living = [each for each in workers if self._cluster.find(each).alive]
                if name in living or not living:
                    self._waiting.remove(task)
                    return task
                self._serve_all(living)  # a worker may have been restarted since the task was added
            self._served.remove(name)
            return None

    def _wait_for_cells(self, name: str) -> None:
        """Wait until the cells that a worker was sent before have ended. UsageError if the cluster has been shut down.

        The kernel thread knows the cells, and is asked after it has sent all earlier ones.
        """
        if not self._cluster.running:
            raise UsageError("this cluster has been shut down; make another")

        async def end_of_cells() -> None:
            for cell in list(self._cluster.find(name).cells):
                ended = asyncio.Event()
                cell.when_done(ended.set)
                await ended.wait()

        self._cluster.kernel_thread.run(end_of_cells()).result()


class WorkerExecutor(Executor):
    """Calls functions on some workers, as an executor of `concurrent.futures`. `Cluster.executor` makes it.

    `map` and the ``with`` block work as for Python's own executors. Functions must be importable on the workers, or be
    defined in the notebook or script, which sends them.

    Example:
        ::

            with cluster.executor() as pool:
                values = list(pool.map(function, items))
    """

    def __init__(self, lanes: Lanes, workers: Sequence[str] | None) -> None:
        """Make an executor for these workers; None for all, also those that join later."""
        self._lanes, self._workers = lanes, workers
        self._tasks: set[Task] = set()
        self._is_shut_down = False

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Task:
        """Call a function on the first worker that is free. Does not wait.

        Args:
            function: The function to call.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The future of the function's value. It fails with the function's error, with `EncodeError` if the function,
            an argument or the value cannot be sent, and with `WorkerLost` if the worker that has taken the task dies.
            Living workers take over the tasks that a dead one has not taken; if none lives, these fail as well.

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
        """Refuse new tasks, and wait for the submitted ones. The workers stay.

        Args:
            wait: Whether to wait; else the tasks run on while this returns.
            cancel_futures: Whether to drop the tasks that no worker has taken.
        """
        self._is_shut_down = True
        left = list(self._tasks)
        if cancel_futures:
            for task in left:
                task.cancel()
        if wait:
            concurrent.futures.wait(left)
