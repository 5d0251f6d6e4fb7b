"""Collects tasks in one handle: a future that also says which engines ran them, and how long that took."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

from nbdist.cluster.executor import Task
from nbdist.cluster.sinks import current_sink
from nbdist.cluster.worker_tasks import now
from nbdist.compat.ipyparallel.closed import Closed
from nbdist.views.progress import LiveText, bar

__all__ = ["AsyncResult", "wait_for"]

_FACTS = {"engine_id": "rank"} | {each: each for each in ("submitted", "started", "completed", "received")}
"""What ``metadata`` says of a task, and the name that `Task` has for that."""


def wait_for(results: AsyncResult | Iterable[AsyncResult], timeout: float | None = None) -> bool:
    """Wait until all tasks of some handles have ended, at most ``timeout`` seconds; return whether they have."""
    return not wait([results] if isinstance(results, AsyncResult) else results, timeout).not_done


class AsyncResult(Closed, Future[Any]):
    """Holds the values of tasks, now or later.

    A handle is a `concurrent.futures.Future`: `result`, `done`, `add_done_callback` and `asyncio.wrap_future` work.
    Stop ends a wait for the handle, not its tasks; ``cluster.interrupt()`` ends the tasks.
    """

    def __init__(self, tasks: Sequence[Task], *, single: bool = False, chunks: bool = False) -> None:
        """Make the handle of some tasks, whose value is the list of their values.

        With ``single``, there is one task, and its value is the handle's. With ``chunks``, each task's value is a list,
        and the handle's value joins the lists.
        """
        super().__init__()
        self._tasks, self._single = tasks, single
        self._join = itertools.chain.from_iterable if chunks else iter
        self.msg_ids = [secrets.token_hex(8) for _ in tasks]
        self._begun, self._left = min((task.submitted for task in tasks), default=now()), iter(tasks)
        self.set_running_or_notify_cancel()
        self._settle()

    def _settle(self, _: object = None) -> None:
        """Set the value, or the first error, once all tasks have ended. Called again when the next one has."""
        for task in self._left:
            if not task.done():
                return task.add_done_callback(self._settle)
        try:
            values = list(self._values())
            self.set_result(values[0] if self._single else values)
        except BaseException as error:
            self.set_exception(error)

    def _values(self) -> Iterator[Any]:
        return self._join(task.result() for task in self._tasks)

    # ipyparallel's names
    get = Future.result
    ready = Future.done
    wait = wait_for

    def successful(self) -> bool:
        """Return whether all tasks have ended, and none with an error."""
        return self.done() and self.exception() is None

    @property
    def progress(self) -> int:
        """The number of tasks that have ended."""
        return sum(task.done() for task in self._tasks)

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """Of each task: the engine that runs it, and when it was submitted, started, completed and received."""
        return [{fact: getattr(task, name) for fact, name in _FACTS.items()} for task in self._tasks]

    def get_dict(self, timeout: float | None = None) -> dict[int | None, Any]:
        """Return the values by engine; each engine must have run one task."""
        self.get(timeout)
        return {task.rank: task.result() for task in self._tasks}

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Any]:
        """Yield the values in order, each as soon as it has arrived."""
        return iter(self.result()) if self._single else self._values()

    def __getitem__(self, key: int | slice | str) -> Any:
        """Wait, and return some of the values; or one entry of each task's `metadata`: ``result["engine_id"]``."""
        if not isinstance(key, str):
            return self.result()[key]
        facts = [each[key] for each in self.metadata]
        return facts[0] if self._single else facts

    def __getattr__(self, name: str) -> Any:
        return self[name] if name in _FACTS else super().__getattr__(name)

    @property
    def elapsed(self) -> float:
        """Seconds since the tasks were submitted; once all have ended, until the last value arrived."""
        ends = [task.received or now() for task in self._tasks]
        return (max(ends, default=self._begun) - self._begun).total_seconds()

    @property
    def wall_time(self) -> float:
        """Seconds from the submission of the tasks until the last value arrived, which it waits for."""
        self.wait()
        return self.elapsed

    @property
    def serial_time(self) -> float:
        """Seconds that all tasks together took on workers. Waits for them."""
        self.wait()
        return sum(task.seconds for task in self._tasks)

    def wait_interactive(self, interval: float = 0.1, timeout: float | None = None) -> None:
        """Wait, and show a progress bar, drawn anew every ``interval`` seconds. `get` raises the tasks' errors."""
        shown, ends = LiveText(current_sink()), time.monotonic() + (math.inf if timeout is None else timeout)
        while not self.wait(interval) and time.monotonic() < ends:
            shown.draw(f"{self._bar()}  {self.elapsed:.1f} s")
        shown.draw(self._bar(), last=True)

    def _bar(self) -> str:
        return f"{bar(self.progress, len(self), 30)}  {self.progress}/{len(self)} tasks"
