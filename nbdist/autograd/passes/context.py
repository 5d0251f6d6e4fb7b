"""The state of autograd on one worker: the `Context` of each iteration, and the `Run` of each pass in it.

A context has its runs, and a run has its context, so one module defines both.

The token of a mark or gradient message moves through the lists of a `Run` in this way::

    on the receiver                                            on the sender
    Mark -------------------------------------> settled        sent
    Gradients --> arrived --> taken by a thread --> settled
                    ^              |
                    +-- waits for -+---------> waiting         the next report empties settled, waiting and sent
                        the end of the marking
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch

from nbdist.autograd.graph import messages
from nbdist.autograd.graph.edges import GraphEdge, Node, Received, Sent
from nbdist.autograd.graph.messages import Head, PassId, Token, Watching
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

Outgoing = tuple[messages.Gradients, list[torch.Tensor | None]]  # a message, and the gradients that are its payload


class Context:
    """The record of one iteration on this worker: what it sent and received, its passes, their gradients.

    `lock` is held while gradients are added up, and while the run that a message belongs to is found.
    """

    def __init__(self, id: int, maker: int, *, lines: bool = False, check: bool = False) -> None:
        self.id = id
        self.maker = maker
        self.thread = 0  # on the maker: the ident of the thread that opened it, if one did
        self.lines = lines  # note the line of code that makes each node
        self.check = check  # search the results of the forward pass for NaN
        self.is_entered = False  # by a call or answer that has arrived, of which the maker was told if it must know
        # On the maker: the block in which the thread that opened the context notes lines or looks for NaN.
        self.noting: AbstractContextManager[None] | None = None
        self.sends: dict[int, Sent] = {}
        self.receives: dict[int, Received] = {}
        self.workers: set[int] = set()  # to which this one has sent a message; on the maker, all that have the context
        self.roots: dict[GraphEdge, None] = {}  # graph edges from which passes began on this worker, in order
        # The passes whose gradients are not added to the context's yet: those under way, or not known to be over.
        self.runs: dict[PassId, Run] = {}
        self.given_up: set[PassId] = set()
        self.numbers = NodeNumbers()
        self.watching: Watching | None = None  # passes that begin on this worker report to this watch
        self.watches_over: set[tuple[int, int]] = set()  # (watcher, number): the end may arrive before the begin
        self.watch: Watch | None = None  # the newest watch of the context that is on this worker itself
        # Called before a backward pass, or a step of a pipeline, begins on this worker, with a function that makes its
        # plan, if another worker watches.
        self.before_pass: Callable[[Callable[[], Plan]], None] | None = None
        self.step_observers: dict[PassId, Observer] = {}  # of pipeline steps and local passes here
        self.lock = threading.Lock()
        self._gradients = GradientStore()
        self._contributions: dict[object, GradientStore] = {}

    def nodes(self, more: Iterable[GraphEdge] = ()) -> Iterable[Node]:
        """Return all nodes here: those behind sent tensors, roots and ``more``, and receive nodes that are alive."""
        starts = [*more, *self.roots]
        starts += [slot.edge for sent in list(self.sends.values()) for slot in sent.slots]
        starts += [(node, 0) for end in list(self.receives.values()) for node in end.nodes]
        found = walk(starts)
        return [*found.leaves, *found.nodes.difference(found.leaves)]  # leaves have no other order than the walk's

    def number_all(self, more: Iterable[GraphEdge] = ()) -> dict[Node, int]:
        """Return the number by which users see each node of the graph on this worker, as `nodes` finds them."""
        return self.numbers.of(self.nodes(more))

    def commit(self, run: Run) -> None:
        """Add the gradients of a pass that is over to the context's; once, and not if the pass was given up."""
        with self.lock:
            if run.head.id in self.runs:
                # First, as it raises without room on a GPU: the gradients must then stay those of the run
                # (test_sums_for_which_a_gpu_has_no_room_leave_the_gradients_as_they_were).
                self._gradients.update(run.part.gradients)
                del self.runs[run.head.id]

    def contribute(self, key: object, gradients: GradientStore) -> None:
        """Add the gradients of a pipeline's step on this worker, or replace those of the same ``key``."""
        with self.lock:
            self._contributions[key] = gradients

    def withdraw(self, key: object) -> None:
        """Remove a contribution, because its step failed on another worker."""
        with self.lock:
            self._contributions.pop(key, None)

    def fold(self) -> None:
        """Replace the gradients of all passes and pipeline steps by their sums; call it only while no pass runs."""
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
            stores = self._stores()
        return [gradient for store in stores for _, gradient in store.items()]

    def _stores(self) -> list[GradientStore]:
        """Return the gradients of the context, of each pipeline step, and of each pass; `lock` is held."""
        return [self._gradients, *self._contributions.values(), *[run.part.gradients for run in self.runs.values()]]

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients on this worker by leaf, summed over all passes, those under way included."""
        # A worker other than the root learns only later that a pass is over, so passes under way cannot be left out.
        return dict(self._total().items())

    def gradients_of(self, leaves: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return each of these leaves with its gradient, or with None; unlike `gradients`, this hashes no tensor."""
        total = self._total()
        return [(leaf, total.of(leaf)) for leaf in leaves]

    def _total(self) -> GradientStore:
        total = GradientStore()
        with self.lock:
            for store in self._stores():
                total.update(store)
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
        self.ended = False  # over or given up on this worker, which sends no more messages of it
        self.told: set[int] = set()  # the workers to which this one has sent messages of the pass
        self.settled: list[Token] = []  # for the next report: this worker has done all that follows from them
        self.waiting: list[Token] = []  # for the next report: they only wait for the end of the marking
        self.outbox: Outgoing | None = None  # gradients for the root, to travel in one message with the next report
        self.sent: list[tuple[Token, int]] = []  # for the next report, with the receivers
        self.arrived: list[Token] = []  # of gradients that no thread has taken up
        self.taken: list[Token] = []  # of gradients that a thread has taken up, until the last thread stops
        self.reports = 0
        self.threads = 0
        self.most_threads = 1
        self.entries = 0  # how many times a thread has begun to run the pass
        self.again = False  # something has arrived, and no thread was added for it: a running one must look once more
        # On the root only:
        self.ledger: Ledger | None = None
        self.outcome: Future[None] | Latch | None = None
        self.error: BaseException | None = None
        self.leader: int | None = None  # the worker that was asked for the pass's turn to reduce
        self.its_turn = False
        self.waiting_for_turn: set[int] = set()  # the workers that must not continue before
