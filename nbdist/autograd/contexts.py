"""Contexts: the record of one iteration, on each worker that it touches.

The worker that makes a context is the one that ends it. Whoever is touched by way of a third worker tells the
maker so (`Entered`); so the maker knows all, and the end of a context does not depend on any worker between.
Calls that come too late, after the context's end, find that it has been there and is over.

A worker that takes the place of a dead one counts its contexts from the same number as the dead one did. What tells
two contexts with the same id apart is the incarnation of their maker.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from nbdist.autograd.edges import Node, Received, Sent
from nbdist.autograd.graph import walk
from nbdist.autograd.leaves import Gradients
from nbdist.autograd.messages import PassId, Watching
from nbdist.errors import UsageError

if TYPE_CHECKING:
    from nbdist.autograd.inspection import Plan
    from nbdist.autograd.observer import Observer
    from nbdist.autograd.run import Run
    from nbdist.autograd.watching import Watch

__all__ = ["Context", "Contexts"]

_BITS = 48
_REMEMBERED = 10_000


class Numbers:
    """Numbers for the nodes of a context, by which they are called wherever they are shown."""

    def __init__(self) -> None:
        self._numbers: dict[Node, int] = {}
        self._lock = threading.Lock()

    def of(self, nodes: Iterable[Node]) -> dict[Node, int]:
        """Theirs; those that have none yet get the next ones, in the order in which they were made."""
        nodes = list(nodes)
        with self._lock:
            new = [node for node in nodes if node not in self._numbers]
            for node in sorted(new, key=lambda node: node._sequence_nr()):
                self._numbers[node] = len(self._numbers)
            return {node: self._numbers[node] for node in nodes}


class Context:
    """The record of one iteration, on this worker."""

    def __init__(self, id: int, maker: int, *, lines: bool = False, check: bool = False) -> None:
        self.id = id
        self.maker = maker
        self.lines = lines
        """Whether it is noted where in the code nodes are made."""
        self.check = check
        """Whether what is computed is looked at for NaN."""
        self.noting: AbstractContextManager[None] | None = None
        """What does that for the thread that opened it, on the maker."""
        self.sends: dict[int, Sent] = {}
        self.receives: dict[int, Received] = {}
        self.workers: set[int] = set()
        """Whom this worker has sent something in the context; on the maker, all who have it."""
        self.roots: dict[tuple[Node, int], None] = {}
        """Where passes began on this worker."""
        self.runs: dict[PassId, Run] = {}
        self.given_up: set[PassId] = set()
        self.numbers = Numbers()
        self.watching: Watching | None = None
        """Who wants to know of the passes that begin here."""
        self.watches_over: set[tuple[int, int]] = set()
        """Who does not want to know any more, also where that overtakes that it wants to."""
        self.watch: Watch | None = None
        """What has come of that, where it is this worker."""
        self.before_step: Callable[[Plan], None] | None = None
        """Called, if another worker watches, where a step of a pipeline is about to begin here,"""
        self.before_pass: Callable[[Literal["smart", "fast"], Sequence[tuple[Node, int]]], None] | None = None
        """and a backward pass, with its roots."""
        self.step_observers: dict[PassId, Observer] = {}
        """Who sees the steps of pipelines that are under way here."""
        self.lock = threading.Lock()
        self._gradients = Gradients()
        self._contributions: dict[object, Gradients] = {}

    def nodes(self, more: Iterable[tuple[Node, int]] = ()) -> Iterable[Node]:
        """All that are known: behind what was sent, behind the roots of passes, what was received, and more."""
        starts = [*more, *self.roots]
        starts += [slot.edge for sent in list(self.sends.values()) for slot in sent.slots]
        starts += [(node, 0) for end in list(self.receives.values()) for node in end.nodes]
        found = walk(starts)
        return [*found.leaves, *found.nodes.difference(found.leaves)]  # leaves have no order but that of the walk

    def number_all(self, more: Iterable[tuple[Node, int]] = ()) -> dict[Node, int]:
        """The same with their numbers."""
        return self.numbers.of(self.nodes(more))

    def commit(self, run: Run) -> None:
        """A pass is over: its gradients are the context's."""
        with self.lock:
            if self.runs.pop(run.head.id, None) is not None:
                self._gradients.update(run.part.gradients)

    def contribute(self, key: object, gradients: Gradients) -> None:
        """Add what was computed on this worker without a pass; `withdraw` takes it back."""
        with self.lock:
            self._contributions[key] = gradients

    def withdraw(self, key: object) -> None:
        """It turned out that the rest of it failed."""
        with self.lock:
            self._contributions.pop(key, None)

    def fold(self) -> None:
        """Make one sum of all passes, of which none is under way."""
        with self.lock:
            for gradients in self._contributions.values():
                self._gradients.update(gradients)
            self._contributions.clear()
            for run in self.runs.values():
                self._gradients.update(run.part.gradients)
                run.part.gradients = Gradients()

    def scale(self, leaves: Iterable[torch.Tensor], factor: float) -> None:
        """Multiply the gradients of some leaves."""
        self.fold()
        with self.lock:
            self._gradients.scale(leaves, factor)

    def stored(self) -> list[torch.Tensor]:
        """The gradients that are kept on this worker, those of several passes one by one."""
        with self.lock:
            parts = [
                self._gradients,
                *self._contributions.values(),
                *(run.part.gradients for run in self.runs.values()),
            ]
        return [gradient for part in parts for _, gradient in part.items()]

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """What the passes have gathered on this worker, those included of which the end is not yet known here."""
        return dict(self._total().items())

    def gradients_of(self, leaves: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return each of these leaves with what `gradients` has for it, or None. No tensor is hashed, which is slow."""
        total = self._total()
        return [(leaf, total.of(leaf)) for leaf in leaves]

    def _total(self) -> Gradients:
        total = Gradients()
        with self.lock:
            total.update(self._gradients)
            for gradients in self._contributions.values():
                total.update(gradients)
            for run in self.runs.values():
                total.update(run.part.gradients)
        return total


class _PerThread(threading.local):
    context: Context | None = None


class Contexts:
    """All contexts that touch one worker."""

    def __init__(self, worker_id: int, incarnation: int) -> None:
        self._incarnation = incarnation
        self._first = worker_id << _BITS
        self._numbers = itertools.count()
        self._messages = itertools.count()
        self._contexts: dict[int, Context] = {}
        self._over: OrderedDict[tuple[int, int], None] = OrderedDict()
        """The contexts that have ended, as (id, incarnation of the maker)."""
        self._lock = threading.Lock()
        self.here = _PerThread()
        """The context that the calling thread has entered, which may have ended meanwhile: see `current`."""
        self.is_gone: Callable[[int], bool] = lambda maker: False
        """Whether a maker was a member and is one no more; set by who knows the members."""
        self.on_displaced: Callable[[Context], None] = lambda context: None
        """Called with a dead maker's context that has given way; set by who runs its passes."""

    def __len__(self) -> int:
        return len(self._contexts)

    @property
    def last_id(self) -> int:
        """The highest id that a context of this worker could have."""
        return self._first + (1 << _BITS) - 1

    def next_message(self) -> int:
        """The id of one more edge."""
        return self._first + next(self._messages)

    def all(self) -> list[Context]:
        """Every context that is here."""
        with self._lock:
            return list(self._contexts.values())

    # -- of the calling thread ----------------------------------------------------------------

    @property
    def current(self) -> Context | None:
        """The context of the calling thread, unless it has ended meanwhile."""
        context = self.here.context
        return context if context is not None and context.id in self._contexts else None

    def set_current(self, context: Context | None) -> Context | None:
        """Change the calling thread's; the one before."""
        before, self.here.context = self.here.context, context
        return before

    @contextmanager
    def outside(self) -> Generator[None]:
        """The calling thread is in no context, for the time of the block: whoever only looks is not to be recorded."""
        before = self.set_current(None)
        try:
            yield
        finally:
            self.set_current(before)

    # -- life ---------------------------------------------------------------------------------

    def new(self, *, lines: bool = False, check: bool = False) -> Context:
        """Make one; this worker is to end it."""
        with self._lock:
            context = Context(self._first + next(self._numbers), self._incarnation, lines=lines, check=check)
            self._contexts[context.id] = context
        return context

    def get(self, id: int) -> Context:
        """The context of that id."""
        context = self._contexts.get(id)
        if context is None:
            raise UsageError(
                f"Could not find autograd context with id: {id}"
                + (
                    ": it has ended"
                    if any(over == id for over, _ in self._over)
                    else "; contexts end with their `with` block"
                )
            )
        return context

    def find(self, id: int) -> Context | None:
        """The context of that id, if it is here."""
        return self._contexts.get(id)

    def enter(
        self,
        id: int,
        maker: int,
        entered: Callable[[], Any] = lambda: None,
        *,
        lines: bool = False,
        check: bool = False,
    ) -> Context | None:
        """Return the context to which a message belongs, or None if that context is over.

        Calls ``entered()`` if the context is new on this worker. A dead maker's context is over, also where a third
        worker's message comes late. So a context with the same id but another maker is that of a dead maker, whose
        place ``maker`` has taken: it gives way.
        """
        context = self._contexts.get(id)
        if context is not None and context.maker == maker:
            context.lines = context.lines or lines  # that it is watched may have been known before
            context.check = context.check or check
            return context
        with self._lock:
            before = self._contexts.get(id)
            if before is not None and before.maker == maker:
                return before
            if (id, maker) in self._over or self.is_gone(maker):
                return None
            if before is not None:
                self._note_over(id, before.maker)
            context = self._contexts[id] = Context(id, maker, lines=lines, check=check)
        if before is not None:
            self.on_displaced(before)
        entered()
        return context

    def release(self, id: int, maker: int) -> Context | None:
        """End ``maker``'s context of that id, also for messages that come later; return it if it was here."""
        with self._lock:
            self._note_over(id, maker)
            context = self._contexts.get(id)
            return self._contexts.pop(id) if context is not None and context.maker == maker else None

    def _note_over(self, id: int, maker: int) -> None:
        """With the lock held: remember that a context has ended, for messages that come too late."""
        self._over[id, maker] = None
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def made_by(self, incarnation: int) -> Iterable[Context]:
        """Those whose maker it is."""
        return [context for context in self.all() if context.maker == incarnation]
