"""Watching the passes of a context from one place: what each worker has done of them; and pausing and stepping.

>>> with dist_autograd.context() as context_id:                         # doctest: +SKIP
...     loss = forward()
...     watch = dist_autograd.watch(context_id, paused=True)
...     handle = context_id.backward_async(loss)
...     watch.step(3)              # three nodes, wherever they are
...     watch.run(until="nan")     # up to where the first NaN or Inf comes up
...     watch.run()
...     handle.wait()

It is the real pass that is paused, not a record of it. What the workers see comes to the watch by itself, in batches;
nothing is asked of them, and nothing is seen by anybody as long as there is no watch.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from nbdist.autograd import messages
from nbdist.autograd.edges import Node
from nbdist.autograd.messages import Control, Happening, PassId, Watching
from nbdist.autograd.seen import Event, Key, Pass, Share
from nbdist.errors import UsageError
from nbdist.rpc.futures import blocking_wait

if TYPE_CHECKING:
    from typing import Protocol

    from nbdist.autograd.inspection import Plan

    class Transport(Protocol):
        """What a watch needs of an agent."""

        @property
        def me(self) -> int:
            """This worker's incarnation."""

        def name_of(self, worker: int) -> str:
            """A worker's name."""

        def tell(self, to: int, message: messages.Message, body: Any = None) -> None:
            """Send, if it is there."""

        def is_there(self, worker: int) -> bool:
            """Whether it is still a member."""

        def freeze(self, context_id: int, frozen: bool) -> None:
            """Have nobody's time run, or run again, on all workers."""


__all__ = ["Until", "Watch"]

_ids = itertools.count(1)
_log = logging.getLogger("nbdist.autograd")

Until = Literal["nan", "message"] | Key | None


class Watch:
    """What is seen of the backward passes of one context, and the way to pause them."""

    def __init__(
        self, transport: Transport, context: int, *, paused: bool, norms: bool, ended: Callable[[Watch], None]
    ) -> None:
        self.id = next(_ids)
        self.context_id = context
        self._transport = transport
        self._norms = norms
        self._ended = ended
        self._control = Control(1, paused)
        self._passes: dict[PassId, Pass] = {}
        self._reached: Event | None = None
        """What the passes were to run to."""
        self._lost = set[int]()
        self._frozen = False
        self._closed = False
        self._changed = threading.Condition(threading.RLock())
        self.on_begin: Callable[[Literal["smart", "fast"], Sequence[tuple[Node, int]]], None] | None = None
        """Called where a pass begins on this worker, before there is anything of it."""
        self.on_step: Callable[[Plan], None] | None = None
        """The same, where a step of a pipeline begins."""
        self.on_news: Callable[[], None] | None = None
        """Called when something was seen, by whatever thread; it must not block."""
        self.view: Any = None
        """Who draws it."""

    # -- looking ------------------------------------------------------------------------------

    @property
    def watching(self) -> Watching:
        """What passes are to know that begin now."""
        return Watching(self._transport.me, self.id, self._norms, self._control)

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._closed

    @property
    def passes(self) -> list[Pass]:
        """The passes, oldest first; of those that are over, with all that was seen on any worker."""
        with blocking_wait(), self._changed:
            while any(seen.over and not seen.complete for seen in self._passes.values()) and not self._closed:
                self._changed.wait()
            for seen in self._passes.values():
                seen.events.sort(key=lambda event: event.time)
            return list(self._passes.values())

    @property
    def complete(self) -> bool:
        """Whether all is here that was seen of the passes that have begun."""
        with self._changed:
            return all(seen.complete for seen in self._passes.values())

    @property
    def halted(self) -> list[Event]:
        """Where passes are halted now, the longest wait first."""
        with self._changed:
            found = [worker.at for seen in self._open() for worker in seen.shares.values() if worker.at is not None]
        return sorted(found, key=lambda event: event.time)

    def __repr__(self) -> str:
        how = "closed" if self._closed else "paused" if self._control.paused else "open"
        lines = [f"<Watch of context {self.context_id}, {how}>"]
        with self._changed:
            lines += [f"  {seen!r}" for seen in self._passes.values()]
        lines += [f"  {event.worker} is halted before {event.name} (node {event.node})" for event in self.halted]
        return "\n".join(lines)

    def seen(self, id: PassId) -> tuple[Pass | None, list[Event], list[Event]]:
        """What is known now of one pass: itself, what has happened, and where it is halted. It is not waited for."""
        with self._changed:
            known = self._passes.get(id)
            if known is None:
                return None, [], []
            return known, list(known.events), [each.at for each in known.shares.values() if each.at is not None]

    @property
    def paused(self) -> bool:
        """Whether passes are to halt."""
        return self._control.paused

    @property
    def latest(self) -> PassId | None:
        """The pass that was heard of last."""
        with self._changed:
            return next(reversed(self._passes), None)

    def _open(self) -> list[Pass]:
        return [seen for seen in self._passes.values() if not seen.over]

    # -- acting -------------------------------------------------------------------------------

    def pause(self) -> None:
        """Halt every worker before its next node."""
        self._steer(paused=True)

    def run(self, until: Until = None) -> Event | None:
        """Let the passes go on.

        Without ``until`` this returns at once. Else it waits until they are halted, where the first NaN or Inf comes up
        (``"nan"``), before the next node that sends gradients to another worker (``"message"``), or before a certain
        node (``("worker1", 5)``, by the numbers of the context's `trace`); or until they are over. What it returns
        tells where that was; None where it did not come to that. Of a NaN, its ``told`` and ``inherited`` say so if the
        node was given it by the forward pass already, and by which message it came.
        """
        if until is None:
            self._steer()
            return None
        how, worker, node = ("node", *until) if isinstance(until, tuple) else (until, "", -1)
        if how not in ("nan", "message", "node"):
            raise UsageError(f'until must be "nan", "message" or a node such as ("worker1", 5), not {until!r}')
        with blocking_wait(), self._changed:
            self._reached = None
            self._steer(until=how, worker=worker, node=node)
            while self._reached is None:
                if self._closed or all(each.complete for each in self._passes.values()):
                    break
                self._changed.wait()
            return self._reached

    def step(self, count: int = 1, worker: str | None = None) -> list[Event]:
        """Let that many nodes run, one after the other, wherever the passes are halted, or on one worker.

        Returns what ran; that is less where the passes are over before, or that worker has to wait for others.
        """
        if not self._control.paused:
            self.pause()
        ran: list[Event] = []
        with blocking_wait(), self._changed:
            while len(ran) < count:
                found = self._next_halt(worker)
                if found is not None:
                    ran += self._let_go(*found)
                elif self._closed or not self._may_go_on(worker):
                    break
                else:
                    self._changed.wait()
        return ran

    def _next_halt(self, name: str | None) -> tuple[PassId, int] | None:
        halts = [
            (worker.at.time, id, number)
            for id, seen in self._passes.items()
            for number, worker in seen.shares.items()
            if not seen.over and worker.at is not None and name in (None, worker.at.worker)
        ]
        return min(halts)[1:] if halts else None

    def _may_go_on(self, name: str | None) -> bool:
        """Whether some pass may come to a halt yet, as far as can be known before it is tried."""
        if name is None:
            return bool(self._open())
        for seen in self._open():
            known = [worker for number, worker in seen.shares.items() if self._transport.name_of(number) == name]
            if not all(worker.resting for worker in known) or (seen.root == name and not known):
                return True
        return False

    def _let_go(self, id: PassId, number: int) -> list[Event]:
        """Let one halted node run; its end, if it comes to that."""
        seen = self._passes[id]
        worker = seen.shares[number]
        halt, node = worker.halt, worker.at.node if worker.at is not None else None
        worker.gone, worker.at = halt, None
        known = len(seen.events)
        self._transport.tell(number, messages.Go(id, self.context_id, halt))
        name = self._transport.name_of(number)
        while True:
            for event in seen.events[known:]:
                if event.what == "done" and event.worker == name and event.node == node:
                    return [event]
            if self._closed or (seen.over and seen.complete):
                return []
            self._changed.wait()

    def _steer(self, *, paused: bool = False, until: str = "", worker: str = "", node: int = -1) -> None:
        with self._changed:
            if self._closed:
                raise UsageError(f"the watch of context {self.context_id} has ended, with the context or by close()")
            self._control = Control(self._control.version + 1, paused, until, worker, node)
            if not paused:
                # Who is known to be halted goes on from there, also where what it is to run to is there again.
                for seen in self._passes.values():
                    for each in seen.shares.values():
                        each.gone, each.at = each.halt, None
            for number in {number for seen in self._passes.values() for number in seen.shares}:
                self._tell(number)
            self._freeze()

    def _tell(self, number: int) -> None:
        """Have one worker know how it is to go on; with the lock held."""
        over = [(id, seen.shares[number].gone) for id, seen in self._passes.items() if number in seen.shares]
        self._transport.tell(number, messages.Steer(self.context_id, self.id, self._control, over))

    def _freeze(self) -> None:
        """While a pass is paused, nobody's patience runs out; with the lock held."""
        frozen = not self._closed and self._control.paused and bool(self._open())
        if frozen != self._frozen:
            self._frozen = frozen
            self._transport.freeze(self.context_id, frozen)

    def close(self) -> None:
        """Let the passes go on, and watch no more; what was seen stays."""
        with self._changed:
            if self._closed:
                return
            if self._control.paused or self._control.until:
                self._steer()
            self._closed = True
            self._freeze()
            self._changed.notify_all()
        self._ended(self)
        self._tell_news()
        self.on_begin = self.on_step = None
        if self.complete:
            self.on_news = None  # else what is still on its way is news

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what comes ---------------------------------------------------------------------------

    def prepare(self, mode: Literal["smart", "fast"], roots: Sequence[tuple[Node, int]]) -> None:
        """A pass is going to begin here; whoever wants to see it before is given the time for that."""
        if self.on_begin is not None:
            try:
                self.on_begin(mode, roots)
            except Exception:
                _log.exception("a backward pass could not be drawn")

    def prepare_step(self, plan: Plan) -> None:
        """Show what a step of a pipeline consists of that is going to begin here."""
        if self.on_step is not None:
            self.on_step(plan)

    def begin(self, id: PassId, mode: Literal["smart", "fast"]) -> None:
        """A pass begins here."""
        with self._changed:
            self._of(id, mode)
            self._freeze()
        self._tell_news()

    def on_observed(self, message: messages.Observed, sender: int) -> None:
        """News from a worker."""
        with self._changed:
            seen = self._of(message.id, "smart" if message.smart else "fast")
            worker = seen.shares.setdefault(sender, Share())
            worker.overtaken[message.number] = message
            while (following := worker.overtaken.pop(worker.taken + 1, None)) is not None:
                worker.taken += 1
                worker.version = following.version
                for happening in following.happenings:
                    self._enter(seen, worker, self._transport.name_of(sender), happening)
            if self._reached is not None and self._control.until:
                self._steer(paused=True)  # it has come to what it was to run to: so halt the others
            elif worker.version < self._control.version:
                self._tell(sender)
            self._freeze()
            self._changed.notify_all()
        self._tell_news()

    def on_over(self, message: messages.Over) -> None:
        """A pass has ended."""
        with self._changed:
            seen = self._of(message.id, "")
            seen.over, seen.error = True, message.error
            seen.told = {worker: n for worker, n in message.observed.items() if worker not in self._lost}
            self._freeze()
            self._changed.notify_all()
        self._tell_news()

    def on_lost(self, worker: int) -> None:
        """A worker is gone; what it has not told will not come."""
        with self._changed:
            self._lost.add(worker)
            for id, seen in self._passes.items():
                if id.root == worker and not seen.over:  # who would have said so
                    seen.over, seen.error, seen.told = True, f"WorkerLost: {seen.root}, where it began, is gone", {}
                seen.told.pop(worker, None)
                known = seen.shares.get(worker)
                if known is not None:
                    known.at = None
            self._freeze()
            self._changed.notify_all()
        self._tell_news()

    def _tell_news(self) -> None:
        then = self.on_news
        if then is not None:
            then()

    def _of(self, id: PassId, mode: str) -> Pass:
        seen = self._passes.get(id)
        if seen is None:
            seen = self._passes[id] = Pass(self._transport.name_of(id.root), id.number, mode)
        seen.mode = seen.mode or mode
        return seen

    def _enter(self, seen: Pass, worker: Share, name: str, happening: Happening) -> None:
        event = Event(
            happening.time,
            name,
            happening.what,
            happening.node if happening.node >= 0 else None,
            happening.name or None,
            happening.message if happening.message >= 0 else None,
            happening.seconds if happening.seconds >= 0 else None,
            None if happening.norm < 0 else happening.norm,
            happening.histogram,
            happening.inherited,
        )
        if event.what == "resting":
            worker.resting = True
            return
        if event.what in ("arrived", "running") or (event.what == "began" and name == seen.root):
            worker.resting = False
        if worker.at is not None and event.what == "running" and event.node == worker.at.node:
            worker.at = None
        now = happening.version == self._control.version
        reached = self._reached is None and bool(self._control.until) and now
        if event.what == "halted" and worker.at is not None and happening.halt == worker.halt and not reached:
            return  # as is known
        if event.what == "halted" and happening.halt > worker.gone and (now or self._control.paused):
            worker.halt, worker.at = happening.halt, event  # else it is going to hear that it need not halt
        if reached:
            self._reached = event
        seen.events.append(event)
