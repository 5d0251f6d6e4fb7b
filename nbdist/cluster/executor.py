"""Calls functions on workers, each on the first worker that is free: `Cluster.executor`.

There is one rule: a free worker takes the oldest task that it may run. ::

    submit ── Task ──> Lanes ──> one thread for each worker ── call ──> `worker.tasks.run`
    caller <── Task.settle ────────────────┘ <── value, started, completed ──┘

Each worker runs one task at a time, in a thread beside its cells. It is free when it runs no task and no cell.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import torch

from nbdist.cluster.jupyter.kernel_connection import KernelThread
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.worker.tasks import now, run
from nbdist.errors import UsageError, WorkerLost
from nbdist.rpc.agent import Agent


class Task(Future[Any]):
    """The future of one call's value, which also knows the worker that ran the call, and when.

    `cancel` drops a task that no worker has taken, and returns False for a task that one has taken;
    ``cluster.interrupt()`` ends a task that runs.
    """

    rank: int | None = None
    """The rank of the worker that runs the task; None until a worker has taken it."""
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

    def allows(self, worker: Worker) -> bool:
        """Return whether the task may run on a worker."""
        return self.workers is None or worker.name in self.workers

    @property
    def seconds(self) -> float:
        """Seconds that the call took, by the worker's clock; 0 until its value has arrived, and for a failed task."""
        return (self.completed - self.started).total_seconds() if self.started and self.completed else 0.0

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """Complete the task with an error if there is one, else with a value. Call it once: a second call raises."""
        self.received, self.call = now(), ()  # a task that somebody keeps does not keep its arguments
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)


class Lanes:
    """Hands the tasks of one cluster to its workers, by a thread for each, from the first task to the cluster's end."""

    def __init__(self, workers: Sequence[Worker], thread: KernelThread, agent: Agent) -> None:
        """Make the lanes of the cluster that has this list of workers, which may grow, and this process's agent."""
        self._workers, self._thread, self._agent = workers, thread, agent
        self._changed = threading.Condition()
        # The tasks that no worker has taken, the oldest first: True once the cells that were sent before are known.
        self._waiting: dict[Task, bool] = {}
        self._served: set[str] = set()  # the names of the workers that have a thread
        self._closed = False

    def add(self, task: Task) -> None:
        """Queue a task for the first free one of its workers. It fails once the cluster is shut down. In any thread."""
        with self._changed:
            self._waiting[task] = False
            self.look_again()
            self._thread.soon(self._offer, task)  # that thread sends the cells, in their order
        if self._closed:
            self.close()  # fails the task

    def look_again(self) -> None:
        """Wake the threads: a worker has become free, has joined, or is lost. In any thread."""
        with self._changed:
            if not self._waiting or self._closed:
                return
            for worker in self._workers:
                if worker.name not in self._served:
                    name = f"nbdist-tasks-{worker.name}"
                    threading.Thread(target=self._serve, args=(worker,), name=name, daemon=True).start()
                    self._served.add(worker.name)
                    worker.on_change = self.look_again
            self._changed.notify_all()

    def close(self) -> None:
        """Fail the tasks that no worker has taken, and end the threads, as the cluster is being shut down."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
            self._changed.notify_all()
        for task in waiting:
            if task.running() or task.set_running_or_notify_cancel():
                task.settle(error=UsageError("this cluster has been shut down; make another"))

    def _offer(self, task: Task) -> None:
        """Let the workers take a task that was added. In the kernel thread, which has sent the cells before it."""
        with self._changed:
            if task in self._waiting:
                self._waiting[task] = True
                self._changed.notify_all()

    def _serve(self, worker: Worker) -> None:
        while (task := self._take(worker)) is not None:
            if task.running() or task.set_running_or_notify_cancel():  # it runs already if it was put back
                self._run(task, worker)
            del task  # while this waits, it would keep the task's value

    def _take(self, worker: Worker) -> Task | None:
        with self._changed:
            while not self._closed:
                if (task := self._next(worker)) is not None:
                    del self._waiting[task]
                    return task
                self._changed.wait()
        return None

    def _next(self, worker: Worker) -> Task | None:
        """Return the oldest task that a free worker may run, or a dead one must fail, else None. Under the lock."""
        alive = worker.alive
        if alive and (worker.cells or not self._is_member(worker.incarnation)):  # the agent may know first of a loss
            return None
        for task, is_offered in self._waiting.items():
            if is_offered and task.allows(worker) and (alive or not self._is_possible(task)):
                return task
        return None

    def _is_possible(self, task: Task) -> bool:
        return any(each.alive and task.allows(each) for each in self._workers)

    def _is_member(self, incarnation: int | None) -> bool:
        return incarnation is not None and self._agent.member(incarnation) is not None

    def _run(self, task: Task, worker: Worker) -> None:
        """Run a task on a worker and settle it, or put it back if the worker was lost before the call was sent."""
        task.rank, incarnation = worker.rank, worker.incarnation
        try:
            try:
                with torch.no_grad():  # tensors travel as plain values: no autograd context records them
                    answer = self._agent.begin(worker.name, run, *task.call, timeout=0)
            except WorkerLost:  # the call has not gone out, whereas one may have begun whose worker is lost later
                if self._put_back(task, incarnation):
                    return
                raise
            value, started, completed = answer.wait(self._agent.read_as_guest)
        except BaseException as error:  # the function's, or RPC's: whatever it is, the caller gets it
            task.settle(error=error)
        else:
            task.started, task.completed = started, completed
            task.settle(value)
        finally:
            del task  # else its error would keep it alive, through its traceback and this frame

    def _put_back(self, task: Task, incarnation: int | None) -> bool:
        """Queue a task again, as the oldest, if the agent that should have got it is lost and a worker for it lives."""
        with self._changed:
            if self._closed or self._is_member(incarnation) or not self._is_possible(task):
                return False
            task.rank = None
            self._waiting = {task: True, **self._waiting}
            self._changed.notify_all()
            return True


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
