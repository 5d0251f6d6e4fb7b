"""`JointPass`: one local pass of each worker, drawn and steered as one."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from nbdist.autograd.graph.hooks import Note
from nbdist.autograd.graph.messages import Head, PassId
from nbdist.autograd.graph.traces import Plan, Trace
from nbdist.autograd.passes.context import Context
from nbdist.autograd.passes.observing import Observing
from nbdist.autograd.watching.watcher import Watch
from nbdist.views.passes.backward import Backward


class JointPass:
    """The passes with one number, counted on each worker since the cell began: those of a step of DDP or FSDP.

    Any worker may join late, also when the others have ended. The caller holds a lock.
    """

    def __init__(self, number: int, context: Context, watch: Watch, observing: Observing) -> None:
        self.context = context
        self.watch = watch
        self.id = PassId(context.maker, number)
        self._observing = observing
        self.plans: dict[str, Plan] = {}  # by the worker's name
        self.running: set[int] = set()  # the workers on which it runs, by incarnation
        self._batches: dict[int, int] = {}  # by worker: those that the watch must await
        self._error = ""

    def join(self, worker: int) -> Head:
        """Add the share of a worker that begins now; return what it needs to observe the share."""
        self.running.add(worker)
        return self._head()

    def show(self, plan: Plan) -> None:
        """Add the plan of a share."""
        self.plans.update(dict.fromkeys(plan.trace.nodes, plan))

    def mark(self, worker: str, numbers: Collection[int], note: Note) -> None:
        """Add a note to these nodes of a worker."""
        nodes = self.plans[worker].trace.nodes
        nodes[worker] = [
            msgspec.structs.replace(node, notes=(*node.notes, note)) if node.number in numbers else node
            for node in nodes[worker]
        ]

    @property
    def lacks_plans(self) -> bool:
        """True if the plan of a share has not come yet."""
        return len(self.plans) < len(self.running | self._batches.keys())

    def backward(self, order: list[str]) -> Backward:
        """Return the plan of all shares, with the workers in this order."""
        plans = {name: self.plans[name] for name in order if name in self.plans}
        trace = Trace(self.context.id, {name: plan.trace.nodes[name] for name, plan in plans.items()})
        roots = [key for plan in plans.values() for key in plan.roots]
        waits_for = {key: count for plan in plans.values() for key, count in plan.waits_for.items()}
        return Backward(Plan(trace, roots, waits_for, [], []))

    def _head(self) -> Head:
        return Head(self.id, self.context.id, True, False, False, self.id.number, self.watch.watching)

    def leave(self, worker: int, error: str, batches: int) -> None:
        """Note that a worker's share has ended, and how; the pass is over when no share runs."""
        if worker not in self.running:
            return
        self.running.discard(worker)
        if batches:  # else the share has never begun
            self._batches[worker] = batches
        self._error = self._error or error
        if not self.running:
            head = self._head()
            self._observing.tell_over(head, self.context, self._error, self._batches)
