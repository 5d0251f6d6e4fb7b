"""`LocalScout`: has the local passes of one process observed, those that a `Watcher` wants to see."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from nbdist.autograd import api
from nbdist.autograd.graph.edges import GraphEdge
from nbdist.autograd.graph.messages import Head
from nbdist.autograd.graph.numbers import NodeNumbers
from nbdist.autograd.inspection import plan_local
from nbdist.autograd.passes.context import Context
from nbdist.autograd.passes.local_passes import local_passes
from nbdist.autograd.recorder import Recorder
from nbdist.autograd.watching.group_limits import GROUP_LIMITS
from nbdist.views.passes.owners import Owners
from nbdist.views.passes.pace import Pace

FIRST = 3
"""The number of passes at the beginning of a cell that are watched in any case: those of several losses, say."""
_TOLD_WITHIN = 0.1  # seconds until all workers know which pass is watched next


class LocalScout:
    """Counts the local passes of this process, and asks a `Watcher` about those that are watched.

    All workers watch passes of the same numbers, to see those of a DDP step together: the first ones, those that a
    worker finds due (`Pace`), and all while passes must pause.
    """

    def __init__(self, recorder: Recorder, ask: Callable[..., Any], tell: Callable[..., object], *, held: bool) -> None:
        """Follow local passes. ``ask`` calls a method of the watcher by its name; ``tell`` need not wait for its end.

        The methods are `Watcher.join`, and told `Watcher.show`, `Watcher.leave` and `Watcher.is_due`.
        """
        self._recorder = recorder
        self._ask, self._tell = ask, tell
        self._pace = Pace()
        self._count = 0
        self._next = FIRST  # the number of the next pass to watch, or of one of the first
        self._lock = threading.Lock()
        self._ended = False
        self.owners = Owners()
        self._forget_passes = local_passes.follow(self._look, lambda: self._is_watched(self._count + 1))
        self.hold(held)

    def hold(self, held: bool) -> None:
        """Watch every pass, because it must pause, or stop that."""
        with self._lock:
            self._held = held and not self._ended  # messages may overtake each other
            # Before a pass begins: another worker may wait for this one already.
            GROUP_LIMITS.hold(id(self), self._held)

    def end(self) -> None:
        """End the work; a second call does nothing."""
        self._forget_passes()
        self._ended = True
        self.hold(False)
        self.owners.close()

    def watch(self, number: int) -> None:
        """Watch the pass with this number, too."""
        self._next = max(self._next, number)

    def _is_watched(self, number: int) -> bool:
        return self._held or number == self._next or number <= FIRST

    def _look(self, roots: Sequence[GraphEdge]) -> AbstractContextManager[None] | None:
        if api.recorder() is not self._recorder:  # in a process of several agents: the thread is another one's
            return None
        now = time.monotonic()
        with self._lock:
            self._count += 1
            number = self._count
            self._pace.begins(now)
            watched = self._is_watched(number)
            if watched:
                self._pace.looks(now)
            elif not (number > self._next and self._pace.is_due(now)):
                return None
        if watched:
            return self._share(number, roots)
        self._tell("is_due", number + 2 + int(_TOLD_WITHIN / max(self._pace.typical, _TOLD_WITHIN / 100)))
        return None

    def _share(self, number: int, roots: Sequence[GraphEdge]) -> AbstractContextManager[None] | None:
        here = self._recorder
        context = None
        try:
            with here.contexts.outside():
                head: Head | None = self._ask("join", here.me, number)
                context = here.contexts.enter(head.context, head.id.root) if head is not None else None
                if context is not None:
                    context.numbers = NodeNumbers()
                    self._tell("show", here.me, number, plan_local(context.numbers, roots))
                    self.owners.add(number, context.numbers.of(context.numbers.all()))
        except BaseException:  # Ctrl-C, too
            self._give_up(number, context)
            raise
        if head is None or context is None:  # refused, or too late: the notebook may have answered after all
            self._give_up(number, context)
            return None

        def ended(error: str, batches: int) -> None:
            with here.contexts.outside():
                self._tell("leave", here.me, number, error, batches)

        @contextmanager
        def observed() -> Iterator[None]:
            try:
                with here.passes.observing.observed_local(head, context, roots, ended):
                    yield
            finally:
                self._drop(context)

        return observed()

    def _give_up(self, number: int, context: Context | None) -> None:
        """Tell the watcher that a share which it may await does not begin."""
        if context is not None:
            self._drop(context)
        with self._recorder.contexts.outside():
            self._tell("leave", self._recorder.me, number, "", 0)

    def _drop(self, context: Context) -> None:
        context.numbers = NodeNumbers()  # it keeps the nodes of the graph alive
        if context.maker != self._recorder.me:
            self._recorder.contexts.release(context.id, context.maker)
