"""Watches the backward passes that a cell begins: what `%%watch` gives.

    %%watch --paused -a
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [loss])

It is a handle on the pass that is under way, or was last: it pauses, steps and runs it, and is what a view draws. Of
many passes one after the other it watches one now and then, so that a training loop is not held up by being looked at;
if it is to be paused, the next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from nbdist.autograd import api
from nbdist.autograd.contexts import Context
from nbdist.autograd.edges import Node
from nbdist.autograd.inspection import plan_from
from nbdist.autograd.messages import PassId
from nbdist.autograd.seen import Event, Pass
from nbdist.autograd.watching import Until, Watch
from nbdist.errors import UsageError
from nbdist.rpc.futures import blocking_wait
from nbdist.views import report
from nbdist.views.backward import Backward

__all__ = ["Watcher"]

_EVERY = 1.0
"""Seconds after which one more of many passes is looked at."""


class Watcher:
    """Watches the passes of contexts that begin in this process."""

    def __init__(self, *, paused: bool = False, norms: bool = True) -> None:
        self.changed: Callable[[], None] = lambda: None
        """Called by whatever thread has news; it must not block."""
        self.shown = False
        """Whether there is a view of it already."""
        self.count = 0
        """How many contexts there were."""
        self.error: BaseException | None = None
        """How the cell failed, if it runs in the background and has."""
        self._paused = paused
        self._norms = norms
        self._looked = float("-inf")
        self._watch: Watch | None = None
        self._id: PassId | None = None
        self._pass: Backward | None = None
        self._ended = False
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        # Where nodes were made is noted in all contexts of the cell: which of them is looked at shows later.
        self._forget = api.recorder().when_opened(self._on_context, lines=True)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Watch no more; what was seen stays."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._changed.notify_all()
        self._forget()
        watch = self._watch
        if watch is not None:
            watch.close()
        self._news()

    # -- in the background --------------------------------------------------------------------

    def begin(self, cell: Callable[[], Any], then: Callable[[], None] = lambda: None) -> None:
        """Run a cell on a thread of its own, until whose end it is watched, and ``then`` something more."""

        def run() -> None:
            try:
                cell()
            except BaseException as error:
                self.error = error
            finally:
                self.close()
                then()

        self._thread = threading.Thread(target=run, name="watched cell", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of a cell that runs in the background; its error is raised."""
        if self._thread is None:
            raise UsageError("this cell does not run in the background: %%watch -a does that")
        with blocking_wait():
            self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError("the watched cell has not ended" + (": it is paused" if self.paused else ""))
        if self.error is not None:
            raise self.error

    # -- acting -------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Whether passes are to halt."""
        return self._paused

    def pause(self) -> None:
        """Halt the pass before its next node on every worker; or the next pass, if none is under way."""
        self._paused = True
        watch = self._open()
        if watch is not None:
            watch.pause()
        self._news()

    def run(self, until: Until = None) -> Event | None:
        """Go on: to the end, or as `nbdist.autograd.watching.Watch.run` has it ``until``."""
        if until is None:
            self._paused = False
            watch = self._open()
            if watch is not None:
                watch.run()
            self._news()
            return None
        watch = self._await_pass()
        found = watch.run(until) if watch is not None else None
        self._news()
        return found

    def step(self, count: int = 1, worker: str | None = None) -> list[Event]:
        """Let that many nodes run, wherever the pass is halted, or on one worker; what ran."""
        self._paused = True
        watch = self._await_pass()
        found = watch.step(count, worker) if watch is not None else []
        self._news()
        return found

    def _open(self) -> Watch | None:
        watch = self._watch
        return watch if watch is not None and not watch.closed else None

    def _await_pass(self) -> Watch | None:
        """The watch of the pass that is under way, or of the next one; None where the cell ends without."""
        with blocking_wait(), self._changed:
            while not self._ended:
                watch, seen = self._open(), self.last
                if watch is not None and self._id is not None and (seen is None or not seen.over):
                    return watch
                if self._thread is None or self._thread is threading.current_thread():
                    raise UsageError("no backward pass is under way")
                self._changed.wait()
        return None

    # -- looking ------------------------------------------------------------------------------

    @property
    def last(self) -> Pass | None:
        """The pass that was looked at last."""
        watch, id = self._watch, self._id
        return watch.seen(id)[0] if watch is not None and id is not None else None

    @property
    def backward(self) -> Backward | None:
        """What is known of it."""
        with self._changed:
            watch, id, found = self._watch, self._id, self._pass
        if watch is None or id is None or found is None:
            return None
        _, events, halted = watch.seen(id)
        with self._changed:
            found.take(events, halted)
        return found

    @property
    def state(self) -> str:
        """In a word."""
        seen = self.last
        if seen is None:
            return "ended" if self._ended else "waiting for a backward pass"
        if seen.error:
            return "failed"
        if seen.over:
            return "over"
        return "paused" if self._paused or (self._watch is not None and self._watch.paused) else "running"

    def snapshot(self) -> dict[str, Any]:
        """What a page draws."""
        found, seen = self.backward, self.last
        with self._changed:
            drawn = found.snapshot() if found is not None else {}
        return {
            **drawn,
            "pass": f"{self.count} {self._id}",
            "state": self.state,
            "paused": self._paused,
            "over": seen is not None and seen.over,
            "told": self.told(),
        }

    def told(self) -> str:
        """A line about how far it is."""
        seen = self.last
        if seen is None:
            return self.state
        ran = sum(share.done for share in found.shares()) if (found := self.backward) is not None else 0
        total = len(found.plan.waits_for) if found is not None else 0
        error = f": {seen.error.splitlines()[0]}" if seen.error else ""
        more = f"; {self.count} contexts until now" if self.count > 1 else ""
        return f"{seen.mode.upper()} pass of {seen.root}: {ran} of {total} nodes, {self.state}{error}{more}"

    def __repr__(self) -> str:
        found = self.backward
        if found is None:
            return f"<a watched cell, {self.state}>"
        return "\n".join([self.told(), *report.as_text(found)])

    # -- what comes ---------------------------------------------------------------------------

    def _on_context(self, context: Context) -> None:
        with self._changed:
            self.count += 1
            due = self._paused or time.monotonic() - self._looked >= _EVERY
            busy = self._open() is not None and self.last is not None and not self.last.over
            if self._ended or not due or busy:
                return
        watch = api.recorder().passes.observing.watch(context, paused=self._paused, norms=self._norms)
        watch.on_begin = lambda id, mode, roots: self._on_begin(watch, context, id, mode, roots)
        watch.on_news = self._news

    def _on_begin(
        self, watch: Watch, context: Context, id: PassId, mode: api.Mode, roots: Sequence[tuple[Node, int]]
    ) -> None:
        found = Backward(plan_from(context, roots, mode))
        with self._changed:
            self._watch, self._id, self._pass = watch, id, found
            self._looked = time.monotonic()
        self._news()

    def _news(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self.changed()
