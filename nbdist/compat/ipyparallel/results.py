"""Collects tasks in one handle: a future that also knows which engines ran the tasks, and how long they took."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

from nbdist.cluster.executor import Task
from nbdist.cluster.output.sinks import current_sink
from nbdist.cluster.worker.tasks import now
from nbdist.compat.ipyparallel.closed import Closed
from nbdist.views.workers.line import LiveText
from nbdist.views.workers.progress import bar

# The entries of a task's ``metadata``, and the attributes of `Task` that they come from.
_FACTS = {"engine_id": "rank"} | {each: each for each in ("submitted", "started", "completed", "received")}


def wait_for(results: AsyncResult | Iterable[AsyncResult], timeout: float | None = None) -> bool:
    """Wait until all tasks of some handles have ended, at most ``timeout`` seconds; return whether all have.

    A negative timeout means no limit, here and in the methods of `AsyncResult`: ipyparallel's notebooks pass -1. An
    error of a task is not raised here: `AsyncResult.get` raises it.
    """
    return not wait([results] if isinstance(results, AsyncResult) else results, _limit(timeout)).not_done


def _limit(timeout: float | None) -> float | None:
    return timeout if timeout is None or timeout >= 0 else None


class AsyncResult(Closed, Future[Any]):
    """The handle of tasks: a future of their values.

    A handle is a `concurrent.futures.Future`: `result`, `done`, `add_done_callback` and `asyncio.wrap_future` work.
    The stop button ends a wait for the handle, but not its tasks; ``cluster.interrupt()`` interrupts the tasks.
    ``notebooks/10_from_ipyparallel.ipynb`` shows it.
    """

    def __init__(self, tasks: Sequence[Task], *, single: bool = False, chunks: bool = False) -> None:
        """Make a handle whose value is the list of the tasks' values.

        With ``single``, there is one task, and its value is the handle's value. With ``chunks``, each task's value is a
        list, and the handle's value is all lists joined.
        """
        super().__init__()
        self._tasks, self._single = tasks, single
        self._join = itertools.chain.from_iterable if chunks else iter
        self.msg_ids = [secrets.token_hex(8) for _ in tasks]
        self._begun, self._left = min((task.submitted for task in tasks), default=now()), iter(tasks)
        self.set_running_or_notify_cancel()
        self._settle()

    def _settle(self, _: object = None) -> None:
        """Set the value or the first error if all tasks have ended; else ask an open task to call this when it ends."""
        # The constructor calls this, and then the thread in which that task ends. No lock: one task calls at a time.
        for task in self._left:
            if not task.done():
                return task.add_done_callback(self._settle)
        try:
            values = list(self._values())
            self.set_result(values[0] if self._single else values)
        except BaseException as error:  # the user's function: whatever it raises, also KeyboardInterrupt, is the answer
            self.set_exception(error)

    def _values(self) -> Iterator[Any]:
        return self._join(task.result() for task in self._tasks)

    def result(self, timeout: float | None = None) -> Any:
        """Wait, at most ``timeout`` seconds, and return the value. Raises the tasks' first error, or TimeoutError."""
        return super().result(_limit(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, at most ``timeout`` seconds, and return the tasks' first error, or None. May raise TimeoutError."""
        return super().exception(_limit(timeout))

    # ipyparallel has these names for methods of futures.
    get = result
    ready = Future.done
    wait = wait_for

    def successful(self) -> bool:
        """Return whether all tasks have ended without an error."""
        return self.done() and self.exception() is None

    @property
    def progress(self) -> int:
        """The number of tasks that have ended."""
        return sum(task.done() for task in self._tasks)

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """A dict for each task: "engine_id" (a rank), "submitted", "started", "completed" and "received" (datetimes).

        An entry is None until it is known: "started" and "completed" until the value has arrived.
        """
        return [{fact: getattr(task, name) for fact, name in _FACTS.items()} for task in self._tasks]

    def get_dict(self, timeout: float | None = None) -> dict[int | None, Any]:
        """Wait, at most ``timeout`` seconds, and return the values by engine, the last one if an engine ran several.

        Raises the first error of the tasks, TimeoutError if they take longer.
        """
        self.get(timeout)
        return {task.rank: task.result() for task in self._tasks}

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self._tasks)

    def __iter__(self) -> Iterator[Any]:
        """Yield the values in order, each as soon as it has arrived. Raises the error of a task that failed."""
        return iter(self.result()) if self._single else self._values()

    def __getitem__(self, key: int | slice | str) -> Any:
        """Wait for the values, and return one of them, or a slice. Raises the first error of the tasks.

        For a name such as "engine_id", return this entry of each task's `metadata` at once, as a list; of a handle with
        a single task, the one entry. Any other name raises KeyError.
        """
        if not isinstance(key, str):
            return self.result()[key]
        facts = [each[key] for each in self.metadata]
        return facts[0] if self._single else facts

    def __getattr__(self, name: str) -> Any:
        """Return an entry of each task's `metadata`, as in ``result.engine_id``. Other names raise AttributeError."""
        return self[name] if name in _FACTS else super().__getattr__(name)

    @property
    def elapsed(self) -> float:
        """Seconds from the submission of the tasks until now, or until the last value arrived."""
        ends = [task.received or now() for task in self._tasks]
        return (max(ends, default=self._begun) - self._begun).total_seconds()

    @property
    def wall_time(self) -> float:
        """Seconds from the submission of the tasks until the last value or error arrived. Reading this waits for it."""
        self.wait()
        return self.elapsed

    @property
    def serial_time(self) -> float:
        """Seconds that all tasks together took on workers; a failed task counts as 0. Reading this waits for them."""
        self.wait()
        return sum(task.seconds for task in self._tasks)

    def wait_interactive(self, interval: float = 0.1, timeout: float | None = None) -> None:
        """Wait, at most ``timeout`` seconds, and show a progress bar, drawn every ``interval`` seconds.

        Returns then, even if tasks are still open. An error of a task is not raised here: `get` raises it.
        """
        limit = _limit(timeout)
        shown, ends = LiveText(current_sink()), time.monotonic() + (math.inf if limit is None else limit)
        while not self.wait(interval) and time.monotonic() < ends:
            shown.draw(f"{self._progress_bar()}  {self.elapsed:.1f} s")
        shown.draw(self._progress_bar(), last=True)

    def _progress_bar(self) -> str:
        return f"{bar(self.progress, len(self), 30)}  {self.progress}/{len(self)} tasks"
