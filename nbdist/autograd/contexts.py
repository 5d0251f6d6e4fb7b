"""Contexts: the record of one iteration, on each worker that it touches.

The life of a context, here made by worker0::

    worker0, the maker            worker1                  worker2
    new()
      |---- call ------------------> enter()
      |                                |---- call ----------> enter()
      |<------------- Entered ---------------------------------|      worker0 now knows of worker2
    release()
      |---- Release ---------------> release()
      |---- Release ----------------------------------------> release()

Only the maker ends a context. A worker that a third worker's call has brought into the context tells the maker so
(`Entered`); so the maker knows all its workers, and can end the context even if a worker between them has died.
Messages that come after the end find the context in `Contexts._over`, and are not recorded.

A worker that takes the place of a dead one counts its contexts from the same number as the dead one did. Two contexts
with the same id differ in the incarnation of their maker.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from nbdist.autograd.graph.edges import Node, Received, Sent
from nbdist.autograd.graph.walk import walk
from nbdist.autograd.messages import PassId, Watching
from nbdist.autograd.passes.leaves import GradientStore
from nbdist.errors import UsageError

if TYPE_CHECKING:
    from nbdist.autograd.graph.inspection import Plan
    from nbdist.autograd.passes.state import Run
    from nbdist.autograd.watching.observer import Observer
    from nbdist.autograd.watching.watcher import Watch

__all__ = ["Context", "Contexts"]

_COUNTER_BITS = 48
"""The ids of contexts and messages are the worker's id, and below it a count of this many bits."""
_ENDED_CONTEXTS_REMEMBERED = 10_000
"""The number of ended contexts that a worker remembers, to recognise messages that come too late."""


class NodeNumbers:
    """Gives the nodes of a context on this worker the numbers by which they are shown to the user."""

    def __init__(self) -> None:
        self._numbers: dict[Node, int] = {}
        self._lock = threading.Lock()

    def of(self, nodes: Iterable[Node]) -> dict[Node, int]:
        """Return the number of each node; new nodes get the next numbers, in the order in which they were made.

        A node keeps its number for the life of the context, so repeated calls agree.
        """
        nodes = list(nodes)
        with self._lock:
            new = [node for node in nodes if node not in self._numbers]
            for node in sorted(new, key=lambda node: node._sequence_nr()):
                self._numbers[node] = len(self._numbers)
            return {node: self._numbers[node] for node in nodes}


class Context:
    """The record of one iteration on this worker: what it sent and received, its passes, their gradients.

    A thread holds `lock` while it adds up gradients, and while it finds the run that a message belongs to.
    """

    def __init__(self, id: int, maker: int, *, lines: bool = False, check: bool = False) -> None:
        self.id = id
        self.maker = maker
        self.lines = lines
        """True if the line of code that makes each node is noted."""
        self.check = check
        """True if the results of the forward pass are searched for NaN."""
        self.noting: AbstractContextManager[None] | None = None
        """On the maker: the block in which the thread that opened the context notes lines or looks for NaN."""
        self.sends: dict[int, Sent] = {}
        self.receives: dict[int, Received] = {}
        self.workers: set[int] = set()
        """The workers to which this one has sent a message of the context; on the maker, all that have it."""
        self.roots: dict[tuple[Node, int], None] = {}
        """The graph edges from which passes began on this worker, in order."""
        self.runs: dict[PassId, Run] = {}
        """The passes whose gradients are not added to the context's yet: those under way, or not known to be over."""
        self.given_up: set[PassId] = set()
        self.numbers = NodeNumbers()
        self.watching: Watching | None = None
        """The watch that passes which begin on this worker report to."""
        self.watches_over: set[tuple[int, int]] = set()
        """The watches that have ended, as (watcher, number of the watch): the end may overtake the begin on its way."""
        self.watch: Watch | None = None
        """The newest watch of the context that is on this worker itself."""
        self.before_step: Callable[[Plan], None] | None = None
        """Called before a step of a pipeline begins on this worker, if another worker watches."""
        self.before_pass: Callable[[Literal["smart", "fast"], Sequence[tuple[Node, int]]], None] | None = None
        """Called before a backward pass begins on this worker, with its mode and roots, if another worker watches."""
        self.step_observers: dict[PassId, Observer] = {}
        """The observers of the pipeline steps that run on this worker."""
        self.lock = threading.Lock()
        self._gradients = GradientStore()
        self._contributions: dict[object, GradientStore] = {}

    def nodes(self, more: Iterable[tuple[Node, int]] = ()) -> Iterable[Node]:
        """Return all nodes of the graph on this worker: those behind sent tensors, behind roots, and behind ``more``.

        The receive nodes that are still alive are among them.
        """
        starts = [*more, *self.roots]
        starts += [slot.edge for sent in list(self.sends.values()) for slot in sent.slots]
        starts += [(node, 0) for end in list(self.receives.values()) for node in end.nodes]
        found = walk(starts)
        return [*found.leaves, *found.nodes.difference(found.leaves)]  # leaves have no order but that of the walk

    def number_all(self, more: Iterable[tuple[Node, int]] = ()) -> dict[Node, int]:
        """Return the number of every node of the graph on this worker, as `nodes` finds them."""
        return self.numbers.of(self.nodes(more))

    def commit(self, run: Run) -> None:
        """Add the gradients of a pass that is over to the context's; once, and not if the pass was given up."""
        with self.lock:
            if self.runs.pop(run.head.id, None) is not None:
                self._gradients.update(run.part.gradients)

    def contribute(self, key: object, gradients: GradientStore) -> None:
        """Add gradients that a pipeline's step has computed on this worker; `withdraw` removes them by the key."""
        with self.lock:
            self._contributions[key] = gradients

    def withdraw(self, key: object) -> None:
        """Remove a contribution, because its step failed on another worker; harmless if there is none."""
        with self.lock:
            self._contributions.pop(key, None)

    def fold(self) -> None:
        """Add up the gradients of all passes and contributions; call it only while no pass runs.

        One sum replaces them, so a second call changes nothing.
        """
        with self.lock:
            for gradients in self._contributions.values():
                self._gradients.update(gradients)
            self._contributions.clear()
            for run in self.runs.values():
                self._gradients.update(run.part.gradients)
                run.part.gradients = GradientStore()

    def scale(self, leaves: Iterable[torch.Tensor], factor: float) -> None:
        """Multiply the gradients of some leaves by a factor; call it only while no pass runs.

        It serves the clipping of gradients.
        """
        self.fold()
        with self.lock:
            self._gradients.scale(leaves, factor)

    def stored(self) -> list[torch.Tensor]:
        """Return all gradient tensors of the context on this worker; those of several passes are not added up."""
        with self.lock:
            parts = [
                self._gradients,
                *self._contributions.values(),
                *(run.part.gradients for run in self.runs.values()),
            ]
        return [gradient for part in parts for _, gradient in part.items()]

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients on this worker by leaf, summed over passes; those of passes under way are included.

        A worker other than the root learns of the end of a pass later, so it cannot leave those out.
        """
        return dict(self._total().items())

    def gradients_of(self, leaves: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return each of these leaves with its gradient, or None. Hashes no tensor, which would be slow."""
        total = self._total()
        return [(leaf, total.of(leaf)) for leaf in leaves]

    def _total(self) -> GradientStore:
        total = GradientStore()
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
    """All contexts that touch one worker, and the one that each thread is in."""

    def __init__(self, worker_id: int, incarnation: int) -> None:
        self._incarnation = incarnation
        self._first = worker_id << _COUNTER_BITS
        self._numbers = itertools.count()
        self._messages = itertools.count()
        self._contexts: dict[int, Context] = {}
        self._over: OrderedDict[tuple[int, int], None] = OrderedDict()
        """The contexts that ended last, as (id, incarnation of the maker)."""
        self._lock = threading.RLock()  # a user's ``__del__``, which may run anywhere, may open a context
        self.here = _PerThread()
        """The context that the calling thread has entered. It may have ended meanwhile: see `current`."""
        self.is_gone: Callable[[int], bool] = lambda maker: False
        """Return whether the worker with this incarnation was a member and is lost; set by the recorder."""
        self.on_displaced: Callable[[Context], None] = lambda context: None
        """Called with a dead maker's context that one with the same id has replaced; set by the recorder."""

    def __len__(self) -> int:
        return len(self._contexts)

    @property
    def last_id(self) -> int:
        """The highest id that a context of this worker could have."""
        return self._first + (1 << _COUNTER_BITS) - 1

    def next_message(self) -> int:
        """Return a new number for an edge; no other worker has the same."""
        return self._first + next(self._messages)

    def all(self) -> list[Context]:
        """Return all contexts that this worker has now."""
        with self._lock:
            return list(self._contexts.values())

    # -- of the calling thread ----------------------------------------------------------------

    @property
    def current(self) -> Context | None:
        """The context of the calling thread, unless it has ended meanwhile."""
        context = self.here.context
        return context if context is not None and context.id in self._contexts else None

    def set_current(self, context: Context | None) -> Context | None:
        """Put the calling thread into a context, or into none; return the context it was in.

        The caller puts it back with the context that was returned.
        """
        before, self.here.context = self.here.context, context
        return before

    @contextmanager
    def outside(self) -> Generator[None]:
        """Take the calling thread out of its context for a block, so that calls which only look are not recorded."""
        before = self.set_current(None)
        try:
            yield
        finally:
            self.set_current(before)

    # -- life ---------------------------------------------------------------------------------

    def new(self, *, lines: bool = False, check: bool = False) -> Context:
        """Make a context, of which this worker is the maker; no thread enters it.

        `Recorder.open` enters it, and `Recorder.close` ends it on all workers.
        """
        with self._lock:
            context = Context(self._first + next(self._numbers), self._incarnation, lines=lines, check=check)
            self._contexts[context.id] = context
        return context

    def get(self, id: int) -> Context:
        """Return the context with an id; raises UsageError if this worker does not have it, or no longer."""
        context = self._contexts.get(id)
        if context is None:
            raise UsageError(
                f"Could not find autograd context with id: {id}"
                + (
                    ": it has ended"
                    if any(over == id for over, _ in self._over)
                    else ". It never came to this worker, or it ended: contexts end with their `with` block"
                )
            )
        return context

    def find(self, id: int) -> Context | None:
        """Return the context with an id, or None if this worker does not have it, or no longer."""
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

        Calls ``entered()`` if the context is new on this worker. A dead maker's context is over, even if a third
        worker's message of it comes late. So if there is a context with the same id and another maker, that maker is
        dead and ``maker`` has taken its place: the new context replaces the old one.
        """
        context = self._contexts.get(id)
        if context is not None and context.maker == maker:
            context.lines = context.lines or lines  # a Watch message may have made the context, without these
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
        """End a context on this worker, also for messages that come later; return it, or None if it was not here.

        ``maker`` is the incarnation of the worker that made the context: a restarted worker may reuse ids. A second
        call returns None.
        """
        with self._lock:
            self._note_over(id, maker)
            context = self._contexts.get(id)
            return self._contexts.pop(id) if context is not None and context.maker == maker else None

    def _note_over(self, id: int, maker: int) -> None:
        """Remember that a context has ended, for messages that come too late; called with the lock held."""
        self._over[id, maker] = None
        if len(self._over) > _ENDED_CONTEXTS_REMEMBERED:
            self._over.popitem(last=False)

    def made_by(self, incarnation: int) -> Iterable[Context]:
        """Return the contexts here that the worker with this incarnation has made."""
        return [context for context in self.all() if context.maker == incarnation]
