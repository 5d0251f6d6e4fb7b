"""Watches the backward passes that a cell begins: `%%watch` makes a `Watcher`.

    %%watch --paused -a
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [loss])

    %%watch
    %%remote
    loss.backward()

A `Watcher` is a handle on one pass: the pass under way, or the last one. It pauses, steps and runs the pass, and views
draw it. It watches the contexts that threads of this process open while the cell runs, and the contexts that other
workers open, as a training loop in `%%remote` does (`nbdist.views.passes.scouts`). Of local passes, by torch's own
``backward()``, it sees those of a step on all workers as one (`nbdist.views.passes.joint`). If there are many in a row,
it watches only some of them (`nbdist.views.passes.pace`), so that a training loop is not slowed down; if passes must
pause, it watches all. If several passes run at the same time, the handle stays on one until it is over, and then turns
to another.

The state of a watcher, as `Watcher.state` returns it::

    waiting for a backward pass ──> running <──> paused      the state of the present pass
                                       └─────────┴──> over, or failed ──> running, with the next pass
    ended      the cell or the context ended before the pass was over, or before any pass began
    failed     the pass failed, or the cell runs in the background and raised an error
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from nbdist.amounts import plural
from nbdist.autograd import api
from nbdist.autograd.graph.events import Event, Pass
from nbdist.autograd.graph.messages import Head, PassId, Watching
from nbdist.autograd.graph.traces import Plan, Trace, planned
from nbdist.autograd.inspection import trace
from nbdist.autograd.passes.context import Context
from nbdist.autograd.passes.local_passes import local_passes
from nbdist.autograd.watching.watcher import LOCAL, Until, Watch
from nbdist.cluster.cluster import Cluster
from nbdist.cluster.output.arranger import grouped, say_members, say_names
from nbdist.cluster.partings import Parting
from nbdist.errors import UsageError
from nbdist.rpc.waits import blocking_wait
from nbdist.torch_private import torch_version
from nbdist.views.passes import page, report
from nbdist.views.passes.backward import Backward
from nbdist.views.passes.joint import JointPass
from nbdist.views.passes.local_scout import FIRST, LocalScout
from nbdist.views.passes.owners import PASSES_KEPT
from nbdist.views.passes.pace import Pace
from nbdist.views.passes.remarks import UNOWNED
from nbdist.views.passes.scouts import Scouts

T = TypeVar("T")

_LAST_REPORTS_SECONDS = 0.5  # at the end of a cell, for the last reports of other workers about a pass
_NOTHING = (
    " without a pass to show: no worker began a `backward()`, a pass by dist_autograd or a step of a pipeline in the "
    "cell. What autograd.grad computes is not shown"
)

_cells: WeakValueDictionary[int, Watcher] = WeakValueDictionary()  # by the ident of the thread that runs the cell


class Watcher:
    """Watches the passes of contexts that are opened on any worker while a cell runs; pauses, steps and runs them.

    As a context manager it surrounds the cell, or `begin` runs the cell on a thread. Any thread may call its methods.
    The notebook ``03_watch_backward.ipynb`` shows it.
    """

    def __init__(self, *, paused: bool = False, norms: bool = True, given: Watch | None = None) -> None:
        """Watch contexts from now on until `close`.

        With ``paused``, every pass halts before its first node. With ``norms``, workers measure the gradients' norms,
        which takes time. ``given`` is for `of`: then only that watch of the user's is followed.
        """
        self.changed: Callable[[], None] = lambda: None
        """Called after any news, by any thread; it must not block."""
        # True once the cell shows a view or picture of this watcher.
        self.shown = False
        self.view: Any = None  # the live view, if there is one
        self.error: BaseException | None = None
        """The error of a cell that runs in the background, if it has failed."""
        self._paused = paused
        self._norms = norms
        self._pace = Pace()
        self._watches: list[Watch] = []
        # The worker on which each watch's next pass begins (its incarnation), and the plan of that pass.
        self._plans: dict[Watch, tuple[int, Backward]] = {}
        self._opened: dict[int, int] = {}  # contexts that each worker has opened, by its incarnation, if known
        # The present pass: its watch, its id, and its plan.
        self._watch: Watch | None = None
        self._id: PassId | None = None
        self._pass: Backward | None = None
        self._outline: tuple[Plan | None, dict[str, Any]] = None, {}  # the last outline for a page, and its plan
        self._waiting = 0  # threads that wait for a pass, to step or run it
        self.ended = False
        """True once the watcher is closed, or the user's own watch has ended. Only the watcher sets it."""
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._noting = contextlib.ExitStack()  # of the cell's thread
        # The thread that runs the cell; it must not wait for a pass that it would have to begin itself.
        self._own = threading.get_ident() if given is None else 0
        self._given = given  # the user's own watch, if this watcher was made for one
        self._recorder = api.recorder()
        self._forget: Callable[[], object] = lambda: None
        self._scouts: Scouts | None = None
        self._local: LocalScout | None = None
        self._joint: dict[int, JointPass] = {}  # by number
        self._partings: list[Parting] = []  # for which workers have waited inside of a local pass
        self._next_joint = FIRST  # the number of the next local pass that all workers watch
        if given is None:
            self._scouts = Scouts(self, held=paused)  # first: it waits, and Ctrl-C may end the wait
            self._forget = self._recorder.when_opened(self._on_context, self._decide)
            self._local = LocalScout(self._recorder, self._act, self._act, held=paused)

    @classmethod
    def of(cls, watch: Watch) -> Watcher:
        """Return a watcher that draws and steers a `Watch` that the user has made, whose callbacks it replaces."""
        self = cls(paused=watch.paused, given=watch)
        self._follow(watch)
        self._on_news(watch)  # needed for a watch that has ended, which will have no more news
        return self

    def __enter__(self) -> Watcher:
        _cells.setdefault(self._own, self)  # of several watchers in one thread, the outermost counts
        self._noting.enter_context(local_passes.noted())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Close; after a cell without an error, first wait a moment for the last reports of workers about the pass."""
        self._noting.close()
        with blocking_wait(), self._changed:
            if error is None and self._watch is not None:
                self._changed.wait_for(self._is_complete, _LAST_REPORTS_SECONDS)
        try:
            with contextlib.suppress(Exception):  # a remark must not fail the user's cell
                if error is None:
                    self._mark_unowned()
        finally:
            self.close()

    def _mark_unowned(self) -> None:
        """Mark the parameters of local passes that belong to no optimizer, also to none made after the passes."""
        workers = {name for joint in list(self._joint.values()) for name in joint.plans}
        if not workers or self._scouts is None or self._local is None:
            return
        me = self._recorder.transport.name
        unowned = {me: self._local.owners.unowned(), **self._scouts.unowned(sorted(workers - {me}))}
        with self._changed:
            for number, joint in self._joint.items():
                for name in joint.plans.keys() & unowned.keys():
                    joint.mark(name, unowned[name].get(number, ()), UNOWNED)
                if joint.watch is self._watch and joint.plans:
                    self._pass = joint.backward(self._names())

    def _is_complete(self) -> bool:
        has_plans = not any(joint.lacks_plans for joint in self._joint.values())
        return self._watch is None or (self._watch.complete and has_plans)

    def close(self) -> None:
        """Stop watching, and resume paused passes. What was seen stays. Doing this twice is harmless."""
        with self._changed:
            if self.ended:
                return
            self.ended = True
            watches, self._watches = self._watches, []
            self._changed.notify_all()
        self._forget()
        if _cells.get(self._own) is self:  # else it is an outer watcher's
            del _cells[self._own]
        if self._scouts is not None and self._local is not None:
            self._scouts.call_back()
            self._local.end()
        for watch in watches:
            watch.close()
        for joint in self._joint.values():
            self._recorder.close(joint.context)
        self._plans.clear()
        self._wake_and_tell()

    # -- in the background --------------------------------------------------------------------

    def begin(self, cell: Callable[[], Any], then: Callable[[], None] = lambda: None) -> None:
        """Run a cell on a thread of its own and watch it until its end; then the thread calls ``then()``.

        The watcher is closed before that. An error of the cell is kept in `error`, and `wait` raises it.
        """

        def run() -> None:
            self._own = threading.get_ident()
            _cells[self._own] = self
            try:
                with local_passes.noted():
                    cell()
            except BaseException as error:  # the user's cell: `wait` raises whatever it raised
                self.error = error
            finally:
                self._end(self.error)
                then()

        self._own = 0  # the calling thread may wait for passes
        self._thread = threading.Thread(target=run, name="watched cell", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of a cell that runs in the background, ``timeout`` seconds at most; raise its error.

        Raises:
            UsageError: the cell does not run in the background.
            TimeoutError: the cell has not ended in time.
        """
        if self._thread is None:
            raise UsageError(
                "this cell does not run in the background, so there is nothing to wait for: run it with %%watch -a"
            )
        with blocking_wait():
            self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                "the watched cell has not ended in time" + (": it is paused, call run()" if self.paused else "")
            )
        if self.error is not None:
            raise self.error

    # -- acting -------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """True if the present pass is paused; if none is open, True if the next pass will be."""
        watch = self._open()
        return watch.paused if watch is not None else self._must_halt()

    @property
    def count(self) -> int:
        """The number of contexts opened since, on all workers as far as they have told; not in cells of others."""
        return sum(self._opened.values())

    @property
    def under_way(self) -> bool:
        """True if the present pass has begun and is not over."""
        seen = self.last
        return self._open() is not None and seen is not None and not seen.over

    def pause(self) -> None:
        """Halt the present pass before its next node on every worker, and every later pass before its first node.

        Returns at once, before the workers have halted.
        """
        self._steer(True)

    def run(self, until: Until = None) -> Event | None:
        """Let the present pass run to its end, or ``until`` a place where it halts again.

        Without ``until`` this returns None at once, and later passes are no longer paused. Otherwise it waits for a
        pass, if none is under way, and until the pass halts or ends; later passes are paused or not as before. See
        `nbdist.autograd.watching.watcher.Watch.run` for the places and the result.

        Raises:
            UsageError: ``until`` is no such place; or with ``until``, in the thread of the cell itself, while no pass
                is under way.
        """
        if until is None:
            self._steer(False)
            return None
        return self._with_pass(lambda watch: watch.run(until))

    def step(self, count: int = 1, worker: str | None = None) -> list[Event]:
        """Let ``count`` halted nodes run one by one, on any worker or on one; return their events.

        Later passes are paused. If no pass is under way, this waits for the next one; if the cell ends without one, it
        returns an empty list.

        Raises:
            UsageError: in the thread of the cell itself, while no pass is under way.
        """
        self._paused = True
        return self._with_pass(lambda watch: watch.step(count, worker)) or []

    def trace(self) -> Trace:
        """Return the graph that the context of the present pass (under way, or the last) has recorded on all workers.

        For a step of a pipeline, these are its operations. If the context has ended, the graph is the plan's.

        Raises:
            UsageError: there has been no pass yet, or its context ended before its plan was made.
        """
        with self._changed:
            watch, found = self._watch, self._pass
        is_whole = found is not None and (found.plan.trace.of_step or (self.last and self.last.mode == LOCAL))
        if watch is not None and not watch.closed and not is_whole:
            with contextlib.suppress(UsageError):  # the context has just ended
                return trace(watch.context_id)
        if found is None:
            raise UsageError("there has been no backward pass to trace: call this after one has begun in the cell")
        return found.plan.trace

    def _with_pass(self, act: Callable[[Watch], T]) -> T | None:
        """Call ``act`` with the watch of the pass under way, or of the next one; None if the cell ends without one."""
        self._pace.disturbed()
        with self._changed:
            self._waiting += 1
            if not self.under_way:
                # Pause open contexts too: their pass may begin before this thread hears of it. On another worker, the
                # pass may run some nodes before that worker gets the order to pause.
                self._hold()
        acted = None
        try:
            while (watch := self._await_pass()) is not None:
                try:
                    acted = watch
                    done = act(watch)
                    if watch.inside and Cluster.current is not None and Cluster.current.running:
                        self._partings = Cluster.current.partings()
                    return done
                except UsageError:
                    if not watch.closed:  # if it is closed, its context has just ended: wait for the next pass
                        raise
            return None
        finally:
            with self._changed:
                self._waiting -= 1
            self._hold(acted)  # later passes as before; `act` has left its own watch as it should be
            self._pace.disturbed()
            self._wake_and_tell()

    def _hold(self, but: Watch | None = None) -> None:
        """Pause or resume every open watch except ``but``, and later ones, as `_must_halt` says."""
        with self._changed:  # held to the end: another thread may want the opposite
            held = self._must_halt()
            self._tell_scouts()
            for watch in self._watches:
                if watch is not but and watch.paused != held:
                    _steer_watch(watch, held)

    def _steer(self, paused: bool) -> None:
        """Pause or resume every open watch, and all passes that begin later, by order of the user."""
        self._pace.disturbed()
        with self._changed:
            self._paused = paused
            self._tell_scouts()
            for watch in self._watches:
                _steer_watch(watch, paused)
        self._wake_and_tell()

    def _tell_scouts(self) -> None:
        """Tell other workers whether to pause the passes of contexts that they open later. Does not wait for them."""
        if self._scouts is not None and self._local is not None and not self.ended:
            self._local.hold(self._must_halt())
            self._scouts.hold(self._must_halt())

    def _open(self) -> Watch | None:
        """Return the watch of the pass under way or the last one; None if there is none, or the watch is closed."""
        watch = self._watch
        return watch if watch is not None and not watch.closed else None

    def _await_pass(self) -> Watch | None:
        """Wait for a pass to be under way, and return its watch; None if the cell ends without one."""
        with blocking_wait(), self._changed:
            while not self.ended:
                watch = self._open()
                if watch is not None and self.under_way:
                    return watch
                if threading.get_ident() == self._own:
                    raise UsageError(
                        "no backward pass is under way, and the cell that asks would have to begin it: run the cell "
                        "with %%watch -a, and step or run the pass from another cell"
                    )
                self._changed.wait()
        return None

    # -- looking ------------------------------------------------------------------------------

    @property
    def last(self) -> Pass | None:
        """The present pass as its watch records it, or None: the pass under way, or else the last one."""
        watch, id = self._watch, self._id
        return watch.seen(id)[0] if watch is not None and id is not None else None

    @property
    def backward(self) -> Backward | None:
        """The plan of the present pass with all events seen so far; None if there is no pass, or no plan yet."""
        with self._changed:
            watch, id, found = self._watch, self._id, self._pass
        if watch is None or id is None:
            return None
        _, events, halted = watch.seen(id)
        over = self.state in ("failed", "over", "ended")
        return found.after(events, halted, over=over) if found is not None else None

    @property
    def state(self) -> str:
        """The state of the watcher: "waiting for a backward pass", or of the present pass "running", "paused", "over".

        It is "failed" if the pass, or the cell in the background, raised an error, and "ended" if the cell or the
        context ended before the pass was over, or before any pass.
        """
        seen = self.last
        if self.error is not None or (seen is not None and seen.error):
            return "failed"
        if seen is None:
            return "ended" if self.ended else "waiting for a backward pass"
        if seen.over:
            return "over"
        if self._open() is None:
            return "ended"
        return "paused" if self.paused else "running"

    def drawn(self) -> tuple[dict[str, Any], dict[str, Any], Backward | None]:
        """Return the data of a page: the outline of the present pass, its progress, and the pass itself or None."""
        found = self.backward
        # Once for each pass: it is large, and does not change.
        if found is not None and self._outline[0] is not found.plan:
            self._outline = found.plan, page.outline(found)
        outline = self._outline[1] if found is not None else {}  # now: another thread may draw the next pass meanwhile
        seen = self.last
        snapshot = {
            **(page.snapshot(found) if found is not None else {}),
            "state": self.state,
            "paused": self.paused,
            "ended": self.ended,
            "over": seen is not None and seen.over,
            "told": self._told(found, seen),
        }
        return outline, snapshot, found

    def told(self) -> str:
        """Return a line about the present pass: its kind, the nodes that have run, the state, an error."""
        return self._told(self.backward, self.last)

    def others(self) -> list[tuple[str, Backward]]:
        """Return the local passes that are kept beside the present one, each with a line about it."""
        with self._changed:
            joints = [each for each in self._joint.values() if each.watch is not self._watch]
            known = [(each.backward(self._names()), *each.watch.seen(each.id)) for each in joints]
        made = [(found.after(events, over=True), seen) for found, seen, events, _ in known if seen is not None]
        return [
            (f"{_say(found, seen)}, {'failed' if seen.error else 'over' if seen.over else 'ended'}", found)
            for found, seen in made
        ]

    def _told(self, found: Backward | None, seen: Pass | None) -> str:
        failed = f": {type(self.error).__name__}: {self.error}" if self.error is not None else ""
        if seen is None:
            return f"{self.state}{failed or (_NOTHING if self.state == 'ended' else '')}"
        error = f": {seen.error.splitlines()[0]}" if seen.error else failed
        more = f"; {self.count} contexts until now" if self.count > 1 else ""
        stands = "; ".join(["", *self._say_stands(seen)]) if self.state == "paused" and seen.mode == LOCAL else ""
        return f"{_say(found, seen)}, {self.state}{error}{more}{stands}"

    def _say_stands(self, seen: Pass) -> Iterator[str]:
        shares = list(seen.shares.values())
        held = {at.worker: at for at in (share.at for share in shares) if at is not None}
        if torch_version() < (2, 14) and len(shares) > 1:
            yield f"torch {torch.__version__} cannot stop it before collectives, 2.14 or newer can"
        yield from _say_held([worker for worker in sorted(held) if held[worker].node is None], held)
        for parting in self._partings:
            waiting = [worker for worker in parting.present if self._watch and worker in self._watch.inside]
            if waiting:
                awaited = " and ".join(_say_held(parting.absent, held, ", which"))
                yield f"{say_names(waiting)} {plural(len(waiting), 'waits', 'wait')} for {awaited}: {parting.text}"

    def __repr__(self) -> str:
        if (found := self.backward) is None:
            return f"<{'a watched cell' if self._given is None else 'a watch'}, {self._told(None, None)}>"
        return "\n".join([self._told(found, self.last), *report.as_text(found)])

    # -- contexts and news ----------------------------------------------------------------------

    def _decide(self) -> bool:
        """Return whether to watch the context that the calling thread is about to open."""
        now = time.monotonic()
        with self._changed:
            if _cells.get(threading.get_ident(), self) is not self:  # it runs another watcher's cell
                return False
            self._opened[self._recorder.me] = self._opened.get(self._recorder.me, 0) + 1
            self._pace.begins(now)
            due = not self.ended and (self._must_halt() or (not self.under_way and self._pace.is_due(now)))
            if due:
                self._pace.looks(now)
        return due

    def _must_halt(self) -> bool:
        """Return whether the next pass must halt before its first node: passes are paused, or a thread waits for it."""
        with self._changed:
            return self._paused or self._waiting > 0

    def _on_context(self, context: Context) -> None:
        """Watch a context that the calling thread has just opened."""
        if context.watch is None:
            self._follow(self._recorder.passes.observing.watch(context, paused=self._must_halt(), norms=self._norms))

    def look_at(self, opened: int) -> Watching | None:
        """Watch the current context, which another worker has opened as its ``opened``-th; return None to refuse."""
        # A `Scout` calls this in that context, and the worker's step waits for the answer.
        if (context := self._recorder.contexts.current) is None:
            return None
        with self._changed:
            self._opened[context.maker] = opened
            # Not while another pass is under way, unless the next pass must halt.
            if self.ended or context.watch is not None or not (self._must_halt() or not self.under_way):
                return None
        watch = self._recorder.passes.observing.watch(context, paused=self._must_halt(), norms=self._norms)
        self._follow(watch)
        return watch.watching

    # -- local passes, as their scouts call it ------------------------------------------------------

    def _act(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def join(self, worker: int, number: int) -> Head | None:
        """Let a share of local pass ``number`` begin on a worker; return None not to watch it."""
        with self._changed:
            if self.ended or _cells.get(threading.get_ident(), self) is not self:
                return None
            joint = self._joint.get(number)
            if joint is None:
                if not (number <= FIRST or self._must_halt() or not self.under_way):
                    return None
                self._drop_oldest()
                context = self._recorder.contexts.new()
                observing = self._recorder.passes.observing
                watch = observing.watch(context, paused=self._must_halt(), norms=self._norms)
                joint = self._joint[number] = JointPass(number, context, watch, observing)
                self._follow(watch)
            head = joint.join(worker)
            joint.watch.begin(joint.id, LOCAL)  # with the lock: a watch that is closed before would await nothing
        return head

    def show(self, worker: int, number: int, plan: Plan) -> None:
        """Draw the plan of a share that has joined."""
        with self._changed:
            joint = self._joint.get(number)
            if joint is not None:
                joint.show(plan)
                if joint.watch is self._watch:
                    self._pass = joint.backward(self._names())
        self._wake_and_tell()

    def leave(self, worker: int, number: int, error: str, batches: int) -> None:
        """Note that a share has ended, with an error's text if it failed, after so many batches of events."""
        with self._changed:
            if (joint := self._joint.get(number)) is not None:
                joint.leave(worker, error and f"{error} ({self._recorder.transport.name_of(worker)})", batches)

    def forget(self, worker: int) -> None:
        """End the shares of a lost worker."""
        for number, joint in list(self._joint.items()):
            if worker in joint.running:
                self.leave(worker, number, "WorkerLost: the worker is gone", 0)

    def is_due(self, number: int) -> None:
        """Have all workers watch their local pass ``number``, unless they will watch an earlier one."""
        with self._changed:
            if self.ended or number <= self._next_joint + 1 or not (self._scouts and self._local) or self.under_way:
                return
            self._next_joint = number
        self._local.watch(number)
        self._scouts.watch(number)

    def _drop_oldest(self) -> None:
        """Drop the oldest joint pass that is over, if there are too many; the caller holds the lock."""
        over = [number for number, each in self._joint.items() if not each.running and each.watch is not self._watch]
        if over and len(self._joint) >= PASSES_KEPT:
            self._recorder.close(self._joint.pop(over[0]).context)

    def _names(self) -> list[str]:
        return [record.name for record in self._recorder.membership.members()]

    def plan(self, context_id: int, root: int, plan: Plan) -> None:
        """Store the plan of a pass that begins now on the worker ``root``, an incarnation, if it is watched here."""
        found = Backward(plan)
        with self._changed:
            watch = next((watch for watch in self._watches if watch.context_id == context_id), None)
            if watch is not None:
                self._plans[watch] = root, found

    def _follow(self, watch: Watch) -> None:
        """Make a watch, whose callbacks this replaces, call this watcher; pause or resume it as `_must_halt` says."""
        watch.on_plan = lambda make_plan: self.plan(watch.context_id, self._recorder.me, make_plan())
        watch.on_news = lambda: self._on_news(watch)
        with self._changed:
            self._watches = [other for other in self._watches if not other.closed]  # a loop has many
            if not self.ended:
                self._watches.append(watch)
                # `_must_halt` may have changed since the watch began.
                if self._given is None and watch.paused != self._must_halt():
                    _steer_watch(watch, self._must_halt())
                return
        watch.close()

    def _on_begin_elsewhere(self, watch: Watch, id: PassId) -> None:
        """Make the plan of a pass that has begun without one. A thread of the agent's pool runs this; it waits."""
        seen = watch.seen(id)[0]
        if seen is None or watch.closed:
            return
        try:
            recorded = trace(watch.context_id)
        except UsageError:  # the context has ended
            return
        # The roots are not known here: take the nodes of the root worker to which no gradients come.
        whole = Backward(planned(recorded, []))
        roots = [key for key in whole.nodes if key[0] == seen.root and not whole.before[key]]
        found = Backward(planned(recorded, roots, "fast" if seen.mode == "fast" else "smart"))
        with self._changed:
            if self._id == id:  # else another pass has become the present one
                self._pass = found
        self._wake_and_tell()

    def _on_news(self, watch: Watch) -> None:
        """Turn to a new pass of a watch if there is one, and update the view. Any thread may call this."""
        with self._changed:
            if not self.ended:  # a watcher that has ended keeps its present pass
                self._turn_to(watch)
            if watch is self._given and watch.closed:
                self.ended = True
        self._wake_and_tell()

    def _turn_to(self, watch: Watch) -> None:
        """Make the latest pass of ``watch`` the present one, unless another is under way; the caller holds the lock."""
        if self.under_way and watch is not self._watch:  # stay with a pass until it is over
            return
        if not _is_under_way(watch):
            watch = next(filter(_is_under_way, self._watches), watch)
        id = watch.latest
        if id is None or (watch is self._watch and id == self._id):
            return
        self._watch, self._id = watch, id
        root, found = self._plans.pop(watch, (None, None))
        self._pass = found if root == id.root else None  # else that plan is of another worker's pass
        if (joint := next((joint for joint in self._joint.values() if joint.watch is watch), None)) is not None:
            self._pass = joint.backward(self._names())
        if self._pass is None:
            self._recorder.transport.submit(partial(self._on_begin_elsewhere, watch, id))

    def _wake_and_tell(self) -> None:
        """Wake the threads that wait for a pass or for the end, and call `changed`, which updates the live view."""
        with self._changed:
            self._changed.notify_all()
        self.changed()


def _say(found: Backward | None, seen: Pass) -> str:
    """Return the kind of a pass, and how many of its nodes have run."""
    ran = sum(share.done for share in found.shares()) if found is not None else 0
    total = len(found.plan.waits_for) if found is not None else 0
    kind = f"{seen.mode.upper()} pass of {seen.root}"
    if found is not None and found.plan.trace.of_step:
        kind = f"pipeline step of {seen.root}"
    elif seen.mode == LOCAL:
        number = f" #{seen.number}" if seen.number > 1 else ""
        kind = f"backward(){number} on {say_members(found.plan.workers) if found is not None else ''}"
    return f"{kind}: {ran} of {total} nodes"


def _say_held(workers: Sequence[str], held: Mapping[str, Event], which: str = "") -> Iterator[str]:
    for name, names in grouped(workers, lambda worker: held[worker].name if worker in held else "").items():
        yield say_names(names) + (f"{which} {plural(len(names), 'is', 'are')} held before {name}" if name else "")


def _steer_watch(watch: Watch, paused: bool) -> None:
    try:
        watch.pause() if paused else watch.run()
    except UsageError:
        if not watch.closed:  # it has just ended: nothing to steer
            raise


def _is_under_way(watch: Watch) -> bool:
    seen = watch.seen(watch.latest)[0] if watch.latest is not None and not watch.closed else None
    return seen is not None and not seen.over
