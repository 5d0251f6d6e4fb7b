"""Combines the plan of a backward pass with its events, into the data that views draw. Pure.

The state of a node, as `Backward.state_of` returns it::

    unused       the node takes no part in the pass
    waiting ──> ready ──┬─────────────────> running ──> done
                        └──> halted ───────────┘
    waiting      some of its gradients have not arrived: `got` is less than the plan's `waits_for`
    ready        all have arrived
    halted       the watcher holds the pass before this node

A step of a pipeline is drawn in the same way: its nodes are operations, its gradients the inputs of the operations.
"""

from __future__ import annotations

import copy
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

from nbdist.autograd.graph.events import Event, Key
from nbdist.autograd.graph.inherited import Inherited
from nbdist.autograd.graph.traces import Plan
from nbdist.cluster.output.arranger import grouped
from nbdist.rpc.references.peeking import Histogram
from nbdist.views.drawing.folding import crossings, name_of, nodes_of
from nbdist.views.passes.intervals import Interval, uncovered


@dataclass
class WorkerShare:
    """One worker's share of a pass, in numbers."""

    worker: str
    nodes: int = 0  # that take part
    done: int = 0  # that have run
    busy: float = 0.0  # seconds in which nodes ran
    idle: float = 0.0
    """Seconds between the worker's first node and its last in which it ran nothing and no worker was halted."""
    on_gpu: float | None = None  # seconds that GPUs took for the nodes; None if no node is known to have run on one
    waits_for: list[str] = field(default_factory=list)  # other workers whose gradients this worker still waits for


class Backward:
    """One pass at one moment: its plan, and its progress by the events seen until then.

    `Backward(plan)` has no events; `after` returns the pass with events. Keys are a worker and a node's number there.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.nodes = nodes_of(plan.trace)
        self._after = self._find_next()
        # By node: the nodes, on any worker, whose gradients go to it.
        self.before: dict[Key, list[Key]] = {key: [] for key in self.nodes}
        self._targets: dict[int, list[Key]] = {}
        for key, target, message in self.links():
            self.before[target].append(key)
            if message is not None and key in plan.waits_for:
                self._targets.setdefault(message, []).append(target)
        self._clear()
        self._over = False

    def _clear(self) -> None:
        self.state: dict[Key, str] = {}
        self.got: dict[Key, int] = dict.fromkeys(self.nodes, 0)  # in the order of `nodes`, which `page` relies on
        self.seconds: dict[Key, float] = {}
        self.on_gpu: dict[Key, float] = {}  # seconds, of the nodes that ran on a GPU
        self.norm: dict[Key, float] = {}
        self.histogram: dict[Key, Histogram] = {}
        self.ended: dict[Key, float] = {}
        self._ran: dict[str, list[Key]] = {}  # the nodes that have ended on each worker, in this order
        self._came: dict[Key, float] = {}  # when each node's last gradient arrived, on the clock of the node's worker
        self.halts: list[Interval] = []  # the times of halts that are over
        self._halted: dict[Key, float] = {}  # the start of each present halt, by the node; -1 for a collective
        self.messages: dict[int, str] = {}  # the last event of each message: "marked", "sent" or "arrived"
        self.failed: Key | None = None  # the node that has raised the first error
        self.bad: Key | None = None  # the node at which the first NaN or Inf was found
        self.inherited: Inherited | None = None  # where the forward pass made it, if the node `bad` was given it

    def _find_next(self) -> dict[Key, list[tuple[Key, int | None]]]:
        """Return for each node the nodes to which its gradients go, each with the message that takes them, or None."""
        trace = self.plan.trace
        within = (((key[0], source), key, None) for key, node in self.nodes.items() for source in node.inputs)
        across = ((source, target, edge.autograd_message_id) for edge, source, target in crossings(trace))
        found: dict[Key, list[tuple[Key, int | None]]] = {key: [] for key in self.nodes}
        for source, target, message in itertools.chain(within, across):
            # A backward pass runs against the order of the graph; a step of a pipeline runs in it.
            first, then = (source, target) if trace.of_step else (target, source)
            found[first].append((then, message))
        return found

    def links(self) -> Iterator[tuple[Key, Key, int | None]]:
        """Return each gradient that goes from node to node: node, target, and the message, None within a worker."""
        return ((key, target, message) for key, targets in self._after.items() for target, message in targets)

    # -- events -------------------------------------------------------------------------------

    def after(self, events: Sequence[Event], halted: Sequence[Event] = (), *, over: bool = False) -> Backward:
        """Return a copy of this pass, with these events in any order instead of its own, and halted at ``halted``."""
        found = copy.copy(self)  # the copy shares everything that follows from the plan alone
        found._clear()
        found._over = over  # then no node waits
        for event in sorted(events, key=lambda event: event.time):
            found._enter(event)
        for event in halted:
            if event.key is not None and event.key in self.nodes:
                found.state[event.key] = "halted"
                found._measured(event.key, event)
        return found

    def _enter(self, event: Event) -> None:
        """Update states, counts, times and messages by one event. Call this in the order of the events' times."""
        key = event.key
        if event.what in ("marked", "arrived", "sent") and event.message is not None:
            # By the clocks of two workers, "sent" may come after "arrived". An arrival counts once.
            new = self.messages.get(event.message) != "arrived"
            self.messages[event.message] = event.what if new else "arrived"
            if event.what == "arrived" and new:
                for target in self._targets.get(event.message, ()):
                    self.got[target] += 1
                    self._came[target] = event.time
        before = key or (event.worker, -1)  # of a collective
        if event.what == "halted":
            self._halted.setdefault(before, event.time)
        elif event.what in ("running", "issued") and before in self._halted:
            self.halts.append((self._halted.pop(before), event.time))
        if key is None or key not in self.nodes:
            return
        self._measured(key, event)
        if event.what == "running":
            self.state[key] = "running"
        elif event.what == "done":
            self.state[key] = "done"
            self.seconds[key] = event.seconds or 0.0
            self.ended[key] = event.time
            self._ran.setdefault(key[0], []).append(key)
            for target, message in self._after[key]:
                if message is None:  # else it counts when the message arrives
                    self.got[target] += 1
                    self._came[target] = event.time
        elif event.what == "timed":
            self.on_gpu[key] = event.seconds or 0.0
        elif event.what == "failed" and self.failed is None:
            self.failed = key
        elif event.what == "nan" and self.bad is None:
            self.bad, self.inherited = key, event.inherited

    def _measured(self, key: Key, event: Event) -> None:
        if event.norm is not None:
            self.norm[key] = event.norm
        if event.histogram is not None:
            self.histogram[key] = event.histogram

    # -- conclusions ----------------------------------------------------------------------------

    def state_of(self, key: Key) -> str:
        """Return the state of a node: unused, waiting, ready, halted, running or done."""
        if key in self.state:
            return self.state[key]
        if key not in self.plan.waits_for:
            return "unused"
        return "ready" if self.got[key] >= self.plan.waits_for[key] else "waiting"

    def waits(self, key: Key) -> list[str]:
        """Return the names of the other workers whose gradients a node waits for; empty if it does not wait."""
        if self._over or self.state_of(key) != "waiting":
            return []
        # The nodes whose gradients the node has not got have not run, or their message is under way.
        awaited = (
            other
            for other in self.before[key]
            if other in self.plan.waits_for and (other not in self.ended or self._is_on_its_way(other, key))
        )
        return sorted({worker for worker, _ in awaited if worker != key[0]})

    def _is_on_its_way(self, receive: Key, to: Key) -> bool:
        """Return whether the node ``receive`` sends the node ``to`` gradients in a message that has not arrived."""
        return any(
            target == to and message is not None and self.messages.get(message) != "arrived"
            for target, message in self._after[receive]
        )

    def shares(self) -> list[WorkerShare]:
        """Return the shares of the workers that have nodes in the graph, also of those whose nodes take no part."""
        keys = grouped(self.plan.waits_for, lambda key: key[0])
        return [self._share(worker, keys.get(worker, [])) for worker, nodes in self.plan.trace.nodes.items() if nodes]

    def _share(self, worker: str, keys: Sequence[Key]) -> WorkerShare:
        """Return the share of a worker; ``keys`` are its nodes that take part."""
        done = [key for key in keys if key in self.ended]
        on_gpu = [self.on_gpu[key] for key in done if key in self.on_gpu]
        share = WorkerShare(worker, len(keys), len(done), math.fsum(self.seconds[key] for key in done))
        share.on_gpu = math.fsum(on_gpu) if on_gpu else None
        share.waits_for = sorted({other for key in keys for other in self.waits(key)})
        if done:
            ran = [(self.ended[key] - self.seconds[key], self.ended[key]) for key in done]
            # A worker that waits for the gradients of a halted worker waits for the user: that is not idle time.
            halts = [*self.halts, *((begun, math.inf) for begun in self._halted.values())]
            share.idle = uncovered((min(ran)[0], max(end for _, end in ran)), ran + halts)
        return share

    def critical_path(self) -> list[Key]:
        """Return a chain of nodes, from the first that ran to the last; each node waited for the one before it."""
        # A node waits for its last gradient, and then for its worker if that runs another node.
        if not self.ended:
            return []
        ends = self._end_times()
        # The path ends with a node whose gradients no other node has used yet. The time alone cannot tell this node: a
        # node that sends gradients to another worker often ends after the nodes that these start there, as the send
        # returns late and clocks differ.
        key: Key | None = max(
            (key for key in ends if not any(target in ends for target, _ in self._after[key])), key=ends.__getitem__
        )
        path: dict[Key, None] = {}
        while key is not None and key not in path:  # incomplete events could form a circle
            path[key] = None
            before = max((one for one in self.before[key] if one in ends), key=ends.__getitem__, default=None)
            # In a halted pass a busy worker holds up no node: the user does.
            key = before if ends is not self.ended else self._ran_before(key, before)
        return list(path)[::-1]

    def _ran_before(self, key: Key, before: Key | None) -> Key | None:
        """Return the node that a node's worker ran while the gradients of ``key`` were there; else ``before``."""
        came = self._came.get(key, self.ended[before] if before is not None else -math.inf)
        ran = self._ran[key[0]]
        index = bisect_right(ran, self.ended[key] - self.seconds[key], key=self.ended.__getitem__) - 1
        return ran[index] if index >= 0 and self.ended[ran[index]] > came else before

    def _end_times(self) -> dict[Key, float]:
        """Return when each node that has ended did so; for a pass that was halted, when it would have ended."""
        if not self.halts and not self._halted:
            return self.ended
        # The user decides in which order the nodes of a halted pass run. So only their own times count, and each begins
        # as soon as the nodes before it in the graph have ended.
        before = {key: [other for other in self.before[key] if other in self.ended] for key in self.ended}
        ends: dict[Key, float] = {}
        for key in TopologicalSorter(before).static_order():
            ends[key] = max((ends[other] for other in before[key]), default=0.0) + self.seconds[key]
        return ends

    def slowest(self) -> tuple[str, str, float, list[Key]] | None:
        """Return worker, line (or name of nodes, without lines), seconds and nodes of what took the most time."""
        spent = grouped(self.seconds, lambda key: (key[0], self.nodes[key].line or name_of(self.nodes[key])))
        if not spent:
            return None
        totals = {place: sum(map(self.seconds.__getitem__, keys)) for place, keys in spent.items()}
        place = max(totals, key=totals.__getitem__)
        return *place, totals[place], spent[place]

    def blamed(self) -> Key | None:
        """Return the node at which the first NaN or Inf arose in the forward pass, or else `bad`."""
        found = self.inherited
        if found is not None and (found.worker, found.node) in self.nodes:  # else it was not recorded
            return found.worker, found.node
        return self.bad

    def largest(self) -> Key | None:
        """Return the node that was given the gradient of the largest finite norm; None if no norms were measured."""
        found = {key: norm for key, norm in self.norm.items() if math.isfinite(norm)}
        return max(found, key=found.__getitem__, default=None)
