"""The handle of tasks: a future that also knows its parts, who did them, and how long that took."""

from __future__ import annotations

import datetime
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any

from nbdist.cluster.sinks import current_sink
from nbdist.compat.ipyparallel.closed import refuse

__all__ = ["AsyncResult"]

_TOLD = ("engine_id", "submitted", "started", "completed", "received")
_BAR = 30
"""Characters of a full progress bar."""


class AsyncResult(Future):  # type: ignore[type-arg]
    """The values of tasks, now or later; one part for each task.

    It is a `concurrent.futures.Future`: `result`, `done`, `add_done_callback` and `asyncio.wrap_future` work. Stop ends
    a wait for it, not its tasks; ``cluster.interrupt()`` ends these.
    """

    def __init__(self, count: int, engines: Mapping[str, int], *, chunks: bool = False, single: bool = False) -> None:
        """Make the handle of ``count`` tasks; ``engines`` are the workers' numbers by name.

        With ``chunks`` the value of a task is a list, and the whole has all their items. With ``single`` the whole is
        the one value, and no list.
        """
        super().__init__()
        self._engines, self._chunks, self._single = engines, chunks, single
        self._parts: list[Future[Any]] = [Future() for _ in range(count)]
        self._left, self._lock = count, threading.Lock()
        self.metadata: list[dict[str, Any]] = [{**dict.fromkeys(_TOLD), "submitted": _now()} for _ in range(count)]
        """Of each part: the engine, and when the part was submitted, started, completed and received."""
        self.msg_ids = [secrets.token_hex(8) for _ in range(count)]
        """A name for each part."""
        self.set_running_or_notify_cancel()
        if not count:
            self.set_result([])

    @classmethod
    def of(cls, value: Any) -> AsyncResult:
        """Return the handle of a value that is there already."""
        result = cls(1, {}, single=True)
        result.on_ended(0, (value, time.time(), time.time()), None)
        return result

    # -- filled by lanes ------------------------------------------------------------------------

    def on_sent(self, part: int, worker: str) -> None:
        """Note who does a part."""
        self.metadata[part]["engine_id"] = self._engines[worker]

    def on_ended(self, part: int, answer: tuple[Any, float, float] | None, error: BaseException | None) -> None:
        """Take a part's value, and when it began and ended, or its error; the last part settles the whole."""
        told = self.metadata[part]
        told["received"] = _now()
        if error is not None:
            self._parts[part].set_exception(error)
        elif answer is not None:
            value, began, ended = answer
            told["started"], told["completed"] = (
                datetime.datetime.fromtimestamp(at, datetime.UTC) for at in (began, ended)
            )
            self._parts[part].set_result(value)
        with self._lock:
            self._left -= 1
        if self._left:
            return
        failed = next((error for each in self._parts if (error := each.exception()) is not None), None)
        if failed is not None:
            self.set_exception(failed)
        else:
            values = [value for each in self._parts for value in self._values(each)]
            self.set_result(values[0] if self._single else values)

    def _values(self, part: Future[Any]) -> list[Any]:
        return part.result() if self._chunks else [part.result()]

    # -- looking --------------------------------------------------------------------------------

    def get(self, timeout: float | None = None) -> Any:
        """Return the values; raise the first error, or TimeoutError after ``timeout`` seconds."""
        return self.result(_seconds(timeout))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all parts have ended, at most ``timeout`` seconds; return whether they have."""
        return not wait([self], _seconds(timeout)).not_done

    def ready(self) -> bool:
        """Return whether all parts have ended."""
        return self.done()

    def successful(self) -> bool:
        """Return whether all parts have ended, and none with an error."""
        return self.done() and self.exception() is None

    @property
    def progress(self) -> int:
        """How many parts have ended."""
        return len(self) - self._left

    def get_dict(self, timeout: float | None = None) -> dict[int, Any]:
        """Return the values by engine; each engine must have done one part."""
        self.get(timeout)
        return {each["engine_id"]: part.result() for each, part in zip(self.metadata, self._parts, strict=True)}

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        """Yield the values in order, each as soon as it is there."""
        if self._single:
            yield from self.result()
        else:
            for each in self._parts:
                yield from self._values(each)

    def __getitem__(self, key: int | slice | str) -> Any:
        """Return some of the values, waited for, or what ``metadata`` says of the parts."""
        if isinstance(key, str):
            told = [each[key] for each in self.metadata]
            return told[0] if self._single else told
        return self.result()[key]

    def __getattr__(self, name: str) -> Any:
        if name in _TOLD:
            return self[name]
        return refuse("AsyncResult", name)

    # -- time -----------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        """Seconds since the tasks were submitted, at most until the last one was received."""
        submitted = min((each["submitted"] for each in self.metadata), default=_now())
        return float(max(((each["received"] or _now()) - submitted).total_seconds() for each in self.metadata))

    @property
    def wall_time(self) -> float:
        """Seconds from the first task's submission until the last one was received."""
        self.wait()
        return self.elapsed

    @property
    def serial_time(self) -> float:
        """Seconds that the tasks took on workers, together."""
        self.get()
        return float(sum((each["completed"] - each["started"]).total_seconds() for each in self.metadata))

    def wait_interactive(self, interval: float = 0.1, timeout: float | None = None) -> None:
        """Wait, and show a progress bar, drawn anew every ``interval`` seconds. Errors are raised by `get`."""
        deadline = None if timeout is None or timeout < 0 else time.monotonic() + timeout
        sink, id, kind = current_sink(), secrets.token_hex(8), "display_data"
        while True:
            over = self.wait(interval) or (deadline is not None and time.monotonic() > deadline)
            if over or sink.interactive:  # where nobody watches, only the end is shown, the same each time
                data = {"text/plain": self._bar(with_time=sink.interactive)}
                sink.publish(kind, {"data": data, "metadata": {}, "transient": {"display_id": id}})
                kind = "update_display_data"
            if over:
                return

    def _bar(self, *, with_time: bool) -> str:
        full = round(_BAR * self.progress / max(1, len(self)))
        time_taken = f"  {self.elapsed:.1f} s" if with_time else ""
        return f"{'█' * full}{'░' * (_BAR - full)}  {self.progress}/{len(self)} tasks{time_taken}"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _seconds(timeout: float | None) -> float | None:
    """Return a limit as Python has it; of ipyparallel's, a negative one is none."""
    return None if timeout is None or timeout < 0 else timeout
