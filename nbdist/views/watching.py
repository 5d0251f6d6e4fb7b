"""Watches the backward passes that a cell begins: what `%%watch` gives.

    %%watch --paused -a
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [loss])

It is a handle on the pass that is under way, or was last: it pauses, steps and runs it, and is what a view draws. It
watches the contexts that any thread opens while the cell runs, and those that other workers open, as a training loop in
`%%remote` does (`nbdist.views.scouts`). Of many contexts one after the other it watches one now and then
(`nbdist.views.pace`), so that such a loop is not held up by being looked at; if passes are to be paused, all of them.
Of several passes at a time the handle is on one, and on the next when that is over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from nbdist.autograd import api
from nbdist.autograd.contexts import Context
from nbdist.autograd.edges import Node
from nbdist.autograd.inspection import Plan, Trace, plan_from, planned, trace
from nbdist.autograd.messages import PassId, Watching
from nbdist.autograd.seen import Event, Pass
from nbdist.autograd.watching import Until, Watch
from nbdist.errors import UsageError
from nbdist.rpc.futures import blocking_wait
from nbdist.views import report
from nbdist.views.backward import Backward
from nbdist.views.pace import Pace
from nbdist.views.scouts import Scouts

__all__ = ["Watcher"]

T = TypeVar("T")

_ON_ITS_WAY = 0.5
"""Seconds for what other workers have seen of a pass to come when the cell has ended."""

_cells: WeakValueDictionary[int, Watcher] = WeakValueDictionary()
"""Whose cell a thread runs."""


class Watcher:
    """Watches the passes of contexts that are opened on any worker while a cell runs."""

    def __init__(self, *, paused: bool = False, norms: bool = True, given: Watch | None = None) -> None:
        """Watch from now on until `close`; or what ``given`` does, the user's own."""
        self.changed: Callable[[], None] = lambda: None
        """Called by whatever thread has news; it must not block."""
        self.shown = False
        """Whether there is a view of it already,"""
        self.view: Any = None
        """and which, if it is a live one."""
        self.error: BaseException | None = None
        """How the cell failed, if it runs in the background and has."""
        self._paused = paused
        self._norms = norms
        self._pace = Pace()
        self._watches: list[Watch] = []
        self._plans: dict[Watch, tuple[int, Backward]] = {}
        """What the next pass consists of, and the worker on which it begins."""
        self._opened: dict[int, int] = {}
        """How many contexts each worker has opened, as far as is known."""
        self._watch: Watch | None = None
        self._id: PassId | None = None
        self._pass: Backward | None = None
        self._outline: tuple[Plan, dict[str, Any]] | None = None
        self._waiting = 0
        """So many wait for a pass, to do something with it."""
        self._due = set[int]()
        """The threads that are opening a context which is to be looked at."""
        self._ended = False
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._own = threading.get_ident() if given is None else 0
        """The thread that runs the cell; it must not wait for a pass of its own."""
        self._given = given
        """The one watch that this is about, if that is the user's."""
        self._recorder = api.recorder()
        self._forget: Callable[[], None] = lambda: None
        self._scouts: Scouts | None = None
        if given is None:
            self._forget = self._recorder.when_opened(self._on_context, self._decide)
            self._scouts = Scouts(self, held=paused)

    @classmethod
    def of(cls, watch: Watch) -> Watcher:
        """Return a handle on what the user watches already, and goes on watching."""
        self = cls(paused=watch.paused, given=watch)
        self._follow(watch)
        self._on_news(watch)  # also where it has ended
        return self

    def __enter__(self) -> Watcher:
        _cells.setdefault(self._own, self)  # of several in one thread, the first
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Close; if the cell has succeeded, when all has come that workers have seen of the last pass."""
        with blocking_wait(), self._changed:
            if error is None and self._watch is not None:
                self._changed.wait_for(lambda: self._watch is None or self._watch.complete, _ON_ITS_WAY)
        self.close()

    def close(self) -> None:
        """Watch no more; what was seen stays."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            watches, self._watches = self._watches, []
            self._changed.notify_all()
        self._forget()
        if _cells.get(self._own) is self:
            del _cells[self._own]
        if self._scouts is not None:
            self._scouts.call_back()
        for watch in watches:
            watch.close()
        self._plans.clear()
        self._news()

    # -- in the background --------------------------------------------------------------------

    def begin(self, cell: Callable[[], Any], then: Callable[[], None] = lambda: None) -> None:
        """Run a cell on a thread of its own, until whose end it is watched, and ``then`` something more."""

        def run() -> None:
            self._own = threading.get_ident()
            _cells[self._own] = self
            try:
                cell()
            except BaseException as error:
                self.error = error
            finally:
                self._end(self.error)
                then()

        self._own = 0
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
        watch = self._open()
        return watch.paused if watch is not None else self._held()

    @property
    def count(self) -> int:
        """How many contexts were opened until now, as far as is known."""
        return sum(self._opened.values())

    @property
    def ended(self) -> bool:
        """Whether nothing is watched any more."""
        return self._ended

    @property
    def under_way(self) -> bool:
        """Whether there is a pass that has begun, and is not over."""
        seen = self.last
        return self._open() is not None and seen is not None and not seen.over

    def pause(self) -> None:
        """Halt the pass before its next node on every worker; or the next pass, if none is under way."""
        self._steer(True)

    def run(self, until: Until = None) -> Event | None:
        """Go on: to the end, or as `nbdist.autograd.watching.Watch.run` has it ``until``."""
        if until is None:
            self._steer(False)
            return None
        return self._with_pass(lambda watch: watch.run(until))

    def step(self, count: int = 1, worker: str | None = None) -> list[Event]:
        """Let that many nodes run, wherever the pass is halted, or on one worker; what ran."""
        self._paused = True
        return self._with_pass(lambda watch: watch.step(count, worker)) or []

    def trace(self) -> Trace:
        """Return what the context of the pass has recorded on all workers, or the operations of a pipeline's step.

        Raises:
            UsageError: there has been no pass yet.
        """
        with self._changed:
            watch, found = self._watch, self._pass
        of_step = found is not None and found.plan.trace.of_step
        if watch is not None and not watch.closed and not of_step:
            with contextlib.suppress(UsageError):  # the context has just ended
                return trace(watch.context_id)
        if found is None:
            raise UsageError("there has been no backward pass to trace")
        return found.plan.trace

    def _with_pass(self, act: Callable[[Watch], T]) -> T | None:
        """Do something with the pass that is under way, or with the next one, from its first node on.

        If that begins on another worker, in a context that is open already, from where it is when that hears of it.
        """
        self._pace.disturbed()
        with self._changed:
            self._waiting += 1
            if not self.under_way:
                self._hold()  # a context that is open already: its pass may begin before this thread hears of it
        acted = None
        try:
            while (watch := self._await_pass()) is not None:
                try:
                    acted = watch
                    return act(watch)
                except UsageError:
                    if not watch.closed:  # else its context has ended just now
                        raise
            return None
        finally:
            with self._changed:
                self._waiting -= 1
            self._hold(acted)
            self._pace.disturbed()
            self._news()

    def _hold(self, but: Watch | None = None) -> None:
        """Have what is watched halt or not, as what comes next is to."""
        with self._changed:  # to the end: somebody else may want the opposite
            held = self._held()
            self._tell_scouts()
            for watch in self._watches:
                if watch is not but and watch.paused != held:
                    self._have(watch, held)

    def _steer(self, paused: bool) -> None:
        self._pace.disturbed()
        with self._changed:
            self._paused = paused
            self._tell_scouts()
            for watch in self._watches:
                self._have(watch, paused)
        self._news()

    def _tell_scouts(self) -> None:
        if self._scouts is not None and not self._ended:
            self._scouts.hold(self._held())

    @staticmethod
    def _have(watch: Watch, paused: bool) -> None:
        try:
            watch.pause() if paused else watch.run()
        except UsageError:
            if not watch.closed:
                raise

    def _open(self) -> Watch | None:
        watch = self._watch
        return watch if watch is not None and not watch.closed else None

    def _await_pass(self) -> Watch | None:
        """The watch of the pass that is under way, or of the next one; None where the cell ends without."""
        with blocking_wait(), self._changed:
            while not self._ended:
                watch = self._open()
                if watch is not None and self.under_way:
                    return watch
                if threading.get_ident() == self._own:
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
        """What is known of it now."""
        with self._changed:
            watch, id, found = self._watch, self._id, self._pass
        if watch is None or id is None:
            return None
        _, events, halted = watch.seen(id)
        return found.after(events, halted) if found is not None else None

    @property
    def state(self) -> str:
        """In a word."""
        if self.error is not None:
            return "failed"
        seen = self.last
        if seen is None:
            return "ended" if self._ended else "waiting for a backward pass"
        if seen.error:
            return "failed"
        if seen.over:
            return "over"
        if self._open() is None:
            return "ended"
        return "paused" if self.paused else "running"

    def drawn(self) -> tuple[dict[str, Any], dict[str, Any], Backward | None]:
        """What a page draws: of what the pass consists, how far that is, and the pass.

        The first is the same object as long as it is the same pass.
        """
        found = self.backward
        outline: dict[str, Any] = {}
        if found is not None:
            if self._outline is None or self._outline[0] is not found.plan:
                self._outline = found.plan, found.outline()
            outline = self._outline[1]
        return outline, self._snapshot(found), found

    def _snapshot(self, found: Backward | None) -> dict[str, Any]:
        seen = self.last
        return {
            **(found.snapshot() if found is not None else {}),
            "state": self.state,
            "paused": self.paused,
            "ended": self._ended,
            "over": seen is not None and seen.over,
            "told": self._told(found),
        }

    def told(self) -> str:
        """A line about how far it is."""
        return self._told(self.backward)

    def _told(self, found: Backward | None) -> str:
        seen = self.last
        failed = f": {type(self.error).__name__}: {self.error}" if self.error is not None else ""
        if seen is None:
            return f"{self.state}{failed}"
        ran = sum(share.done for share in found.shares()) if found is not None else 0
        total = len(found.plan.waits_for) if found is not None else 0
        error = f": {seen.error.splitlines()[0]}" if seen.error else failed
        more = f"; {self.count} contexts until now" if self.count > 1 else ""
        of_step = found is not None and found.plan.trace.of_step
        kind = f"pipeline step of {seen.root}" if of_step else f"{seen.mode.upper()} pass of {seen.root}"
        return f"{kind}: {ran} of {total} nodes, {self.state}{error}{more}"

    def __repr__(self) -> str:
        found = self.backward
        if found is None:
            return f"<{'a watched cell' if self._given is None else 'a watch'}, {self._told(None)}>"
        return "\n".join([self._told(found), *report.as_text(found)])

    # -- what comes ---------------------------------------------------------------------------

    def _decide(self) -> bool:
        """Return whether the context that the calling thread is about to open is to be looked at."""
        now = time.monotonic()
        with self._changed:
            if self._is_anothers():
                return False
            self._opened[self._recorder.me] = self._opened.get(self._recorder.me, 0) + 1
            self._pace.begins(now)
            due = not self._ended and (self._held() or (not self.under_way and self._pace.is_due(now)))
            if due:
                self._pace.looks(now)
                self._due.add(threading.get_ident())
        return due

    def _is_anothers(self) -> bool:
        """Return whether the calling thread runs the cell of another watcher."""
        owner = _cells.get(threading.get_ident())
        return owner is not None and owner is not self

    def _held(self) -> bool:
        """Whether the next pass is to be held before its first node."""
        with self._changed:
            return self._paused or self._waiting > 0

    def _on_context(self, context: Context) -> None:
        with self._changed:
            if threading.get_ident() not in self._due:
                return
            self._due.discard(threading.get_ident())
        if context.watch is None:
            self._follow(self._recorder.passes.observing.watch(context, paused=self._held(), norms=self._norms))

    def look_at(self, context: Context, opened: int) -> Watching | None:
        """Watch a context that another worker has opened, its ``opened``-th; return how, or None if not.

        A scout calls it, and waits for the answer.
        """
        with self._changed:
            self._opened[context.maker] = opened
            if self._ended or context.watch is not None or not (self._held() or not self.under_way):
                return None
        watch = self._recorder.passes.observing.watch(context, paused=self._held(), norms=self._norms)
        self._follow(watch)
        return watch.watching

    def plan(self, context_id: int, root: int, plan: Plan) -> None:
        """Take what a pass consists of that is about to begin on another worker."""
        with self._changed:
            watch = next((watch for watch in self._watches if watch.context_id == context_id), None)
            if watch is not None:
                self._plans[watch] = root, Backward(plan)

    def _follow(self, watch: Watch) -> None:
        """See what a watch sees."""
        watch.on_begin = lambda mode, roots: self._on_begin(watch, mode, roots)
        watch.on_step = lambda plan: self.plan(watch.context_id, self._recorder.me, plan)
        watch.on_news = lambda: self._on_news(watch)
        with self._changed:
            ended = self._ended
            self._watches = [other for other in self._watches if not other.closed]
            if not ended:
                self._watches.append(watch)
                if self._given is None and watch.paused != self._held():  # somebody has said otherwise meanwhile
                    self._have(watch, self._held())
        if ended:
            watch.close()

    def _on_begin(self, watch: Watch, mode: api.Mode, roots: Sequence[tuple[Node, int]]) -> None:
        # By its id: the context is not to be kept by who looks at it.
        found = Backward(plan_from(self._recorder.contexts.get(watch.context_id), roots, mode))
        with self._changed:
            self._plans[watch] = self._recorder.me, found

    def _on_begin_elsewhere(self, watch: Watch, id: PassId) -> None:
        """A pass has begun unseen, or on another worker, which alone knows its roots; but no gradient comes to them."""
        seen = watch.seen(id)[0]
        if seen is None or watch.closed:
            return
        try:
            recorded = trace(watch.context_id)
        except UsageError:  # the context has ended
            return
        whole = Backward(planned(recorded, []))
        roots = [key for key in whole.nodes if key[0] == seen.root and not whole.before(key)]
        found = Backward(planned(recorded, roots, "fast" if seen.mode == "fast" else "smart"))
        with self._changed:
            if self._id == id:
                self._pass = found
        self._news()

    def _on_news(self, watch: Watch) -> None:
        with self._changed:
            if not self._ended:
                self._turn_to(watch)
            if watch is self._given and watch.closed:
                self._ended = True
        self._news()

    def _turn_to(self, watch: Watch) -> None:
        """Be the handle on this watch's last pass, or on another one that is under way; with the lock held.

        Never while the pass is under way that this is the handle on.
        """
        if self.under_way and watch is not self._watch:
            return
        if not _is_under_way(watch):
            watch = next(filter(_is_under_way, self._watches), watch)
        id = watch.latest
        if id is None or (watch is self._watch and id == self._id):
            return
        self._watch, self._id = watch, id
        root, found = self._plans.pop(watch, (None, None))
        self._pass = found if root == id.root else None
        if self._pass is None:
            self._recorder.submit(partial(self._on_begin_elsewhere, watch, id))

    def _news(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self.changed()


def _is_under_way(watch: Watch) -> bool:
    seen = watch.seen(watch.latest)[0] if watch.latest is not None and not watch.closed else None
    return seen is not None and not seen.over
