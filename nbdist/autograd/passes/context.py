"""The state of autograd on one worker: the `Context` of each iteration, and the `Run` of each pass in it.

A context has its runs, and a run has its context, so one module defines both.

The token of a mark or gradient message moves through the lists of a `Run` in this way::

    on the receiver                                            on the sender
    Mark -------------------------------------> settled        sent
    Gradients --> arrived --> taken by a thread --> settled
                    ^              |
                    +-- waits for -+---------> marked          the next report empties settled, marked and sent
                        the end of the marking
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from nbdist.autograd.graph import messages
from nbdist.autograd.graph.edges import Node, Received, Sent
from nbdist.autograd.graph.messages import Head, Mode, PassId, Token, Watching
from nbdist.autograd.graph.numbers import NodeNumbers
from nbdist.autograd.graph.traces import Plan
from nbdist.autograd.graph.walk import walk
from nbdist.autograd.passes.gradient_store import GradientStore
from nbdist.autograd.passes.ledger import Ledger
from nbdist.autograd.passes.worker_part import Part
from nbdist.autograd.watching.observer import Observer
from nbdist.autograd.watching.watcher import Watch
from nbdist.gpus import side_streams
from nbdist.gpus.spans import CUDA_IS_BUILT
from nbdist.rpc.futures import Future
from nbdist.rpc.latch import Latch

Outgoing = tuple[messages.Gradients, list[torch.Tensor | None]]
"""A gradient message, and the gradients that travel as its payload."""


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
        """The watches that have ended, as (watcher, number): the end may arrive before the begin."""
        self.watch: Watch | None = None
        """The newest watch of the context that is on this worker itself."""
        self.before_step: Callable[[Plan], None] | None = None
        """Called before a step of a pipeline begins on this worker, if another worker watches."""
        self.before_pass: Callable[[Mode, Sequence[tuple[Node, int]]], None] | None = None
        """Called before a backward pass begins on this worker, with its mode and roots, if another worker watches."""
        self.step_observers: dict[PassId, Observer] = {}
        """The observers of the pipeline steps that run on this worker."""
        self.lock = threading.Lock()
        self._gradients = GradientStore()
        self._contributions: dict[object, GradientStore] = {}

    def nodes(self, more: Iterable[tuple[Node, int]] = ()) -> Iterable[Node]:
        """Return all nodes here: those behind sent tensors, roots and ``more``, and receive nodes that are alive."""
        starts = [*more, *self.roots]
        starts += [slot.edge for sent in list(self.sends.values()) for slot in sent.slots]
        starts += [(node, 0) for end in list(self.receives.values()) for node in end.nodes]
        found = walk(starts)
        return [*found.leaves, *found.nodes.difference(found.leaves)]  # leaves have no other order than the walk's

    def number_all(self, more: Iterable[tuple[Node, int]] = ()) -> dict[Node, int]:
        """Return the number by which users see each node of the graph on this worker; `nodes` finds the nodes.

        A node keeps its number for the life of the context.
        """
        return self.numbers.of(self.nodes(more))

    def commit(self, run: Run) -> None:
        """Add the gradients of a pass that is over to the context's; once, and not if the pass was given up.

        If a GPU has no room for the sums, this raises torch's error and changes nothing.
        """
        with self.lock:
            if run.head.id in self.runs:
                self._gradients.update(run.part.gradients)
                del self.runs[run.head.id]

    def contribute(self, key: object, gradients: GradientStore) -> None:
        """Add gradients that a pipeline's step has computed on this worker; `withdraw` removes them by the key.

        ``key`` names the step. A second call with the same key replaces the gradients of the first.
        """
        with self.lock:
            self._contributions[key] = gradients

    def withdraw(self, key: object) -> None:
        """Remove a contribution, because its step failed on another worker; harmless if there is none."""
        with self.lock:
            self._contributions.pop(key, None)

    def fold(self) -> None:
        """Add up the gradients of all passes and pipeline steps into one sum for each leaf, which replaces them.

        Call it only while no pass runs. A second call changes nothing.
        """
        with self.lock:
            for gradients in self._contributions.values():
                self._gradients.update(gradients)
            self._contributions.clear()
            for run in self.runs.values():
                self._gradients.update(run.part.gradients)
                run.part.gradients = GradientStore()

    def scale(self, leaves: Iterable[torch.Tensor], factor: float) -> None:
        """Fold, and multiply as `GradientStore.scale` does; call it only while no pass runs."""
        self.fold()
        with self.lock:
            self._gradients.scale(leaves, factor)

    def stored(self) -> list[torch.Tensor]:
        """Return all gradient tensors of the context on this worker; gradients of several passes are not added up."""
        with self.lock:
            parts = [
                self._gradients,
                *self._contributions.values(),
                *(run.part.gradients for run in self.runs.values()),
            ]
        return [gradient for part in parts for _, gradient in part.items()]

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients on this worker by leaf, summed over all passes, those under way included.

        A worker other than the root learns of the end of a pass only later, so it cannot leave out passes under way.
        """
        return dict(self._total().items())

    def gradients_of(self, leaves: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return each of these leaves, in their order, with its gradient summed over all passes, or with None.

        Hashes no tensor, which would be slow.
        """
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
        if CUDA_IS_BUILT:
            side_streams.catch_up(gradient for _, gradient in total.items())
        return total


class Run:
    """One pass on one worker. `Passes` holds `lock` while it changes the lists of tokens and counts threads."""

    def __init__(self, head: Head, context: Context) -> None:
        self.head = head
        self.context = context
        self.part: Part
        self.observer: Observer | None = None
        self.lock = threading.Lock()
        self.ended = False
        """True once the pass is over or given up on this worker: it sends no more messages of it."""
        self.told: set[int] = set()
        """The workers to which this one has sent messages of the pass."""
        self.settled: list[Token] = []
        """Tokens for the next report: this worker has done all that follows from them."""
        self.marked: list[Token] = []
        """Tokens for the next report: they only wait for the end of the marking."""
        self.outbox: Outgoing | None = None
        """Gradients for the root, kept back so that they travel in one message with the next report."""
        self.sent: list[tuple[Token, int]] = []
        """Tokens for the next report: this worker has sent them, each to the receiver beside it."""
        self.arrived: list[Token] = []
        """Tokens of gradients that no thread has taken up."""
        self.taken: list[Token] = []
        """Tokens of gradients that a thread has taken up, until the last thread stops."""
        self.reports = 0
        """The number of reports sent."""
        self.threads = 0
        """The number of threads that run the pass now."""
        self.most_threads = 1
        self.entries = 0
        """The number of times that a thread has begun to run the pass."""
        self.again = False
        """True if something has arrived and no thread was added for it: a running thread must look once more."""
        # On the root only:
        self.ledger: Ledger | None = None
        self.outcome: Future[None] | Latch | None = None
        self.error: BaseException | None = None
        self.leader: int | None = None
        """The worker that was asked for the pass's turn to reduce."""
        self.its_turn = False
        self.waiting_for_turn: set[int] = set()
        """The workers that must not continue before the pass has its turn."""
