"""A backward pass as data to draw: what it would do, what has been seen of it, and what that says together.

Pure: a plan and events in, one JSON value out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any

from nbdist.autograd.drawing import name_of
from nbdist.autograd.inherited import Inherited
from nbdist.autograd.inspection import NodeInfo, Plan
from nbdist.autograd.seen import Event, Key
from nbdist.rpc.peeking import Histogram
from nbdist.views.intervals import Interval, uncovered
from nbdist.views.remarks import remarks

__all__ = ["Backward", "Share"]


@dataclass
class Share:
    """One worker's share of a pass."""

    worker: str
    nodes: int = 0
    done: int = 0
    busy: float = 0.0
    idle: float = 0.0
    """Seconds between its first node and its last in which it ran nothing and no worker was halted."""
    waits_for: list[str] = field(default_factory=list)
    """The workers whose gradients it has still to get."""


class Backward:
    """One pass: its plan, and what has happened of it until now."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.nodes: dict[Key, NodeInfo] = {
            (worker, node.number): node for worker, each in plan.trace.nodes.items() for node in each
        }
        self._after = self._find_next()
        self._before: dict[Key, list[Key]] = {key: [] for key in self.nodes}
        for key, targets in self._after.items():
            for target, _ in targets:
                self._before[target].append(key)
        self._targets: dict[int, list[Key]] = {}
        for key, targets in self._after.items():
            for target, message in targets:
                if message is not None and key in plan.waits_for:
                    self._targets.setdefault(message, []).append(target)
        self._clear()

    def _clear(self) -> None:
        self.state: dict[Key, str] = {}
        self.got: dict[Key, int] = dict.fromkeys(self.nodes, 0)
        self.seconds: dict[Key, float] = {}
        self.norm: dict[Key, float] = {}
        self.histogram: dict[Key, Histogram] = {}
        self.ended: dict[Key, float] = {}
        self.halts: list[Interval] = []
        """When workers were halted, and went on again."""
        self._halted: dict[Key, float] = {}
        """When workers were halted that have not gone on, by the node before which they are."""
        self.messages: dict[int, str] = {}
        self.bad: Key | None = None
        """Where a NaN or Inf was found first,"""
        self.inherited: Inherited | None = None
        """and where it is from, if the forward pass gave it to that node."""

    def _find_next(self) -> dict[Key, list[tuple[Key, int | None]]]:
        """Where the gradients of each node go, and by which message."""
        sources = {
            (e.autograd_message_id, i): (e.sender, s) for e in self.plan.trace.edges for i, s in enumerate(e.sources)
        }
        found: dict[Key, list[tuple[Key, int | None]]] = {}
        if self.plan.trace.of_step:
            return self._find_next_of_step()
        for (worker, number), node in self.nodes.items():
            targets: list[tuple[Key, int | None]] = [((worker, to), None) for to in node.inputs]
            if node.message is not None:
                known = [(node.message, index) for index in node.tensors if (node.message, index) in sources]
                targets += [(sources[each], node.message) for each in known]
            found[worker, number] = targets
        return found

    def _find_next_of_step(self) -> dict[Key, list[tuple[Key, int | None]]]:
        found: dict[Key, list[tuple[Key, int | None]]] = {key: [] for key in self.nodes}
        sources = {edge.autograd_message_id: (edge.sender, edge.sources[0]) for edge in self.plan.trace.edges}
        for (worker, number), node in self.nodes.items():
            for source in node.inputs:
                found[worker, source].append(((worker, number), None))
            if node.message is not None:
                found[sources[node.message]].append(((worker, number), node.message))
        return found

    def before(self, key: Key) -> list[Key]:
        """The nodes whose gradients go to this one."""
        return self._before[key]

    # -- what happens -------------------------------------------------------------------------

    def after(self, events: Sequence[Event], halted: Sequence[Event] = ()) -> Backward:
        """The same pass when these events have happened, and halted there."""
        found = copy.copy(self)  # what follows from the plan is theirs together
        found._clear()
        for event in sorted(events, key=lambda event: event.time):
            found._enter(event)
        for event in halted:
            if event.key is not None and event.key in self.nodes:
                found.state[event.key] = "halted"
                found._measured(event.key, event)
        return found

    def _enter(self, event: Event) -> None:
        key = event.key
        if event.what in ("marked", "arrived", "sent") and event.message is not None:
            new = self.messages.get(event.message) != "arrived"
            self.messages[event.message] = event.what if new else "arrived"
            if event.what == "arrived" and new:
                for target in self._targets.get(event.message, ()):
                    self.got[target] += 1
        if key is None or key not in self.nodes:
            return
        self._measured(key, event)
        if event.what == "halted":
            self._halted.setdefault(key, event.time)
        elif event.what == "running":
            self.state[key] = "running"
            if key in self._halted:
                self.halts.append((self._halted.pop(key), event.time))
        elif event.what == "done":
            self.state[key] = "done"
            self.seconds[key] = event.seconds or 0.0
            self.ended[key] = event.time
            for target, message in self._after[key]:
                if message is None:
                    self.got[target] += 1
        elif event.what == "nan" and self.bad is None:
            self.bad, self.inherited = key, event.inherited

    def _measured(self, key: Key, event: Event) -> None:
        if event.norm is not None:
            self.norm[key] = event.norm
        if event.histogram is not None:
            self.histogram[key] = event.histogram

    # -- what that says -----------------------------------------------------------------------

    def detail(self, key: Key) -> dict[str, Any]:
        """What is told of one node that somebody has chosen: how the gradients that it was given are distributed."""
        found = self.histogram.get(key)
        if found is None:
            return {}
        return {"node": list(key), "low": found.low, "high": found.high, "counts": found.counts}

    def state_of(self, key: Key) -> str:
        """How far a node is."""
        known = self.state.get(key)
        if known is not None:
            return known
        if key not in self.plan.waits_for:
            return "unused"
        return "ready" if self.got[key] >= self.plan.waits_for[key] else "waiting"

    def waits(self, key: Key) -> list[str]:
        """For which workers' gradients a node waits."""
        if self.state_of(key) != "waiting":
            return []
        return sorted({worker for worker, _ in self._missing(key) if worker != key[0]})

    def _missing(self, key: Key) -> list[Key]:
        return [
            other
            for other in self._before[key]
            if other in self.plan.waits_for and (other not in self.ended or self._is_on_its_way(other, key))
        ]

    def _is_on_its_way(self, receive: Key, to: Key) -> bool:
        return any(
            target == to and message is not None and self.messages.get(message) != "arrived"
            for target, message in self._after[receive]
        )

    def shares(self) -> list[Share]:
        """Return the workers' shares.

        A pause is no wait: of the time in which any worker was halted nothing counts, for those that wait for a halted
        worker's gradients wait for the user.
        """
        found = {worker: Share(worker) for worker in self.plan.trace.nodes}
        ran: dict[str, list[Interval]] = {worker: [] for worker in found}
        for key in self.plan.waits_for:
            share = found[key[0]]
            share.nodes += 1
            if key in self.ended:
                share.done += 1
                share.busy += self.seconds[key]
                ran[key[0]].append((self.ended[key] - self.seconds[key], self.ended[key]))
            share.waits_for = sorted({*share.waits_for, *self.waits(key)})
        halts = [*self.halts, *((begun, math.inf) for begun in self._halted.values())]
        for worker, times in ran.items():
            if times:
                span = min(times)[0], max(end for _, end in times)
                found[worker].idle = uncovered(span, times + halts)
        return [share for share in found.values() if share.nodes or self.plan.trace.nodes[share.worker]]

    def critical_path(self) -> list[Key]:
        """Return the nodes of which each waited for the one before it: from the first that ran to the last.

        The path ends with a node whose gradients no other node has used yet. The time alone cannot tell the last node:
        a node that sends gradients to another worker often ends after the nodes that these gradients start there,
        because the send returns late and the clocks of two workers differ.
        """
        if not self.ended:
            return []
        ends = self._ends()
        last = [key for key in ends if not any(target in ends for target, _ in self._after[key])]
        path = [max(last, key=lambda key: ends[key])]
        while before := [key for key in self._before[path[-1]] if key in ends]:
            path.append(max(before, key=lambda key: ends[key]))
        return path[::-1]

    def _ends(self) -> dict[Key, float]:
        """Return when each node ended, or for a pass that was halted, when it would have ended.

        The user decides in which order the nodes of a halted pass run. So there only the nodes' own times count: each
        begins as soon as those before it have ended. The graph says which nodes are before it, not the clock: see
        `critical_path`.
        """
        if not self.halts and not self._halted:
            return self.ended
        before = {key: [other for other in self._before[key] if other in self.ended] for key in self.ended}
        ends: dict[Key, float] = {}
        for key in TopologicalSorter(before).static_order():
            ends[key] = max((ends[other] for other in before[key]), default=0.0) + self.seconds[key]
        return ends

    def slowest(self) -> tuple[str, str, float, list[Key]] | None:
        """The worker and the line of code, or the kind of node, that has taken the most time: which, and its nodes."""
        spent: dict[tuple[str, str], list[Key]] = {}
        for key in self.seconds:
            node = self.nodes[key]
            spent.setdefault((key[0], node.line or name_of(node)), []).append(key)
        if not spent:
            return None
        (worker, where), keys = max(spent.items(), key=lambda each: sum(self.seconds[key] for key in each[1]))
        return worker, where, sum(self.seconds[key] for key in keys), keys

    def blamed(self) -> Key | None:
        """The node that made the first NaN or Inf, backward or forward, as far as that is known."""
        found = self.inherited
        if found is not None and (found.worker, found.node) in self.nodes:
            return found.worker, found.node
        return self.bad

    def largest(self) -> Key | None:
        """The node that was given the gradient of the largest norm that is one, where norms were asked for."""
        found = {key: norm for key, norm in self.norm.items() if math.isfinite(norm)}
        return max(found, key=lambda key: found[key]) if found else None

    # -- for a page ---------------------------------------------------------------------------

    def outline(self) -> dict[str, Any]:
        """What it consists of, which is the same from its beginning to its end, and mostly that of the next pass."""
        trace = self.plan.trace
        workers = {worker: number for number, worker in enumerate(trace.nodes)}
        nodes = [
            {
                "w": workers[key[0]],
                "n": key[1],
                "name": name_of(node),
                "label": node.label or "",
                "kind": node.kind,
                "module": node.module or "",
                "line": node.line or "",
                "shape": f"{node.dtype}{list(node.shape)}" if node.shape is not None else "",
                "waits": self.plan.waits_for.get(key, 0),
            }
            for key, node in self.nodes.items()
        ]
        index = {key: number for number, key in enumerate(self.nodes)}
        edges = {edge.autograd_message_id: edge for edge in trace.edges}
        return {
            "workers": list(trace.nodes),
            "nodes": nodes,
            "links": [
                [index[key], index[target]]
                for key, targets in self._after.items()
                for target, message in targets
                if message is None
            ],
            "messages": [
                {"from": index[key], "to": index[to], "bytes": edges[message].nbytes, "call": edges[message].function}
                for key, to, message in self._crossings()
            ],
            "unreachable": trace.unreachable,
        }

    def snapshot(self) -> dict[str, Any]:
        """How far that is: of the nodes and messages of the outline, in their order."""
        used = {edge.autograd_message_id for edge in self.plan.edges}
        index = {key: number for number, key in enumerate(self.nodes)}
        return {
            "states": "".join(_CODES[self.state_of(key)] for key in self.nodes),
            "got": list(self.got.values()),
            "ms": [_ms(self.seconds.get(key)) for key in self.nodes],
            "norms": [_number(self.norm.get(key)) for key in self.nodes],
            "for": {index[key]: waits for key in self.nodes if (waits := self.waits(key))},
            "path": [index[key] for key in self.critical_path()],
            "bad": index[blamed] if (blamed := self.blamed()) is not None else None,
            "messages": [
                [message, self.messages.get(message, "expected" if message in used else "unused")]
                for _, _, message in self._crossings()
            ],
            "shares": [
                {
                    "worker": share.worker,
                    "nodes": share.nodes,
                    "done": share.done,
                    "busy": _ms(share.busy),
                    "idle": _ms(share.idle),
                    "for": share.waits_for,
                }
                for share in self.shares()
            ],
            "remarks": [
                [part.text if part.node is None else [part.text, index[part.node]] for part in remark]
                for remark in remarks(self)
            ],
        }

    def _crossings(self) -> Iterator[tuple[Key, Key, int]]:
        for key, targets in self._after.items():
            yield from ((key, target, message) for target, message in targets if message is not None)


_CODES = {"unused": "u", "waiting": "w", "ready": "r", "running": "g", "halted": "h", "done": "d"}
"""The states, as a page gets them."""


def _number(norm: float | None) -> float | str | None:
    """As JSON has it, which knows no NaN."""
    if norm is None:
        return None
    return float(f"{norm:.5g}") if math.isfinite(norm) else str(norm)


def _ms(seconds: float | None) -> float | None:
    return round(seconds * 1000, 4) if seconds is not None else None
