"""Makes the diagram of a recorded graph: the boxes and lines to draw. Folds too many nodes into fewer boxes.

===================== ==============================================================================================
nodes                 one box stands for
===================== ==============================================================================================
up to 150             one node
more                  consecutive nodes of a module on a worker (`context(lines=True)` notes modules), down to the
                      depth of modules at which there are at most 60 boxes; nodes of no known module are cut into runs
still over 60 boxes   the nodes of a worker that are about as far from the start of the graph
===================== ==============================================================================================

A pipeline step of up to 300 operations is drawn box by box, and a larger one in ranges. Pure: data in, data out.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from nbdist.autograd.graph.events import Key
from nbdist.autograd.graph.traces import Edge, NodeInfo, Trace
from nbdist.cluster.output.arranger import grouped

TIMES = "\N{MULTIPLICATION SIGN}"
_MOST_NODES = 150  # with up to this many, each node has its own box; in a step of a pipeline, with twice as many
_MOST_BOXES = 60  # that folding by modules may leave
_MOST_RANGES = 16  # of distance, into which a graph is cut


@dataclass(frozen=True)
class Box:
    """One box of the drawing: a node, or several nodes of one worker that are folded into it."""

    worker: str
    keys: tuple[Key, ...]
    kind: str  # the node's, ``operation``, ``leaf`` or ``receive``; ``group`` if several nodes are folded
    name: str

    @property
    def key(self) -> Key:
        """The first node of the box; lines name the box by it."""
        return self.keys[0]


@dataclass(frozen=True)
class DrawnLine:
    """A line between two boxes, in the direction of the forward pass."""

    source: Key
    target: Key
    ways: tuple[tuple[Key, Key], ...]  # the pairs of nodes, from and to, that the line connects
    edges: tuple[Edge, ...] = ()  # the edges that the line stands for, if it goes from worker to worker


@dataclass(frozen=True)
class Diagram:
    """The lines; and the boxes of each worker, each after the boxes from which lines lead to it where possible."""

    boxes: dict[str, list[Box]]
    lines: list[DrawnLine]
    ranks: dict[Key, int] | None = None
    """The column of each box, if boxes are folded by distance; such boxes may have lines in both directions."""
    in_order: bool = False  # for a pipeline step: each worker does its boxes one after the other


def name_of(node: NodeInfo) -> str:
    """Return a node's name as shown: the parameter's, ``receive``, or the operation's without torch's suffix."""
    if node.label is not None:
        return node.label
    if node.kind == "receive":
        return "receive"
    return node.name.rsplit("::", 1)[-1].removesuffix("Backward0").removesuffix("Backward")


def nodes_of(trace: Trace) -> dict[Key, NodeInfo]:
    """Return the nodes of a trace by worker and number."""
    return {(worker, node.number): node for worker, nodes in trace.nodes.items() for node in nodes}


def crossings(trace: Trace) -> Iterator[tuple[Edge, Key, Key]]:
    """Yield each edge, once for each tensor sent on it, with the node that made the tensor and the receive node."""
    received: dict[tuple[int | None, int], list[Key]] = {}  # by message, and the tensor's index in it
    for worker, nodes in trace.nodes.items():
        for node in nodes:
            for index in node.tensors:  # of a receive; other nodes have none
                received.setdefault((node.message, index), []).append((worker, node.number))
    for edge in trace.edges:
        for index, source in enumerate(edge.sources):
            for target in received.get((edge.autograd_message_id, index), ()):
                yield edge, (edge.sender, source), target


def diagram_of(trace: Trace) -> Diagram:
    """Return the boxes and lines to draw for a trace; the table above says which nodes share a box."""
    graph = _Graph(trace)
    most = _MOST_NODES * (2 if trace.of_step else 1)  # the boxes of a step are small: F0, B0
    if len(graph.nodes) <= most:
        return graph.diagram([[key] for key in graph.order])
    for depth in range(graph.depth, -1, -1) if not trace.of_step else ():
        runs = graph.runs(partial(graph.module, depth=depth))
        if len(runs) <= _MOST_BOXES:
            return graph.diagram(runs)
    return graph.in_ranges()


class _Graph:
    """A trace's nodes; `order` has each after the nodes that it was computed from."""

    def __init__(self, trace: Trace) -> None:
        self.workers = list(trace.nodes)
        self.in_order = trace.of_step
        self.nodes = nodes_of(trace)
        self.crossings = list(crossings(trace))
        self.before: dict[Key, list[Key]] = {
            key: [(key[0], source) for source in dict.fromkeys(node.inputs)] for key, node in self.nodes.items()
        }
        for _, source, target in self.crossings:
            if source not in self.before[target]:
                self.before[target].append(source)
        self.after: dict[Key, list[Key]] = {key: [] for key in self.nodes}
        # By node: the nodes that it was computed from; in a step also the operation before it on its worker.
        self.earlier = self.before
        if self.in_order:
            self.earlier = {key: list(sources) for key, sources in self.before.items()}
            for worker, nodes in trace.nodes.items():
                for one, other in itertools.pairwise(sorted(node.number for node in nodes)):
                    self.earlier[worker, other].append((worker, one))
        self.order = self._sorted()
        for key in self.order:
            for source in self.before[key]:
                self.after[source].append(key)
        self.sent = {source for _, source, _ in self.crossings}
        paths = {key: (node.module or "").split(".") for key, node in self.nodes.items() if node.kind == "operation"}
        self._paths = paths
        self.depth = max(map(len, paths.values()), default=0)

    def _sorted(self) -> list[Key]:
        """Return the nodes depth first, each after the nodes of `earlier`."""
        order: dict[Key, None] = {}
        for start in self.nodes:
            stack = [start]
            while stack:  # not by recursion: graphs are deeper than Python's stack
                key = stack[-1]
                missing = [other for other in self.earlier[key] if other not in order] if key not in order else []
                stack += reversed(missing)
                if not missing:
                    order[stack.pop()] = None  # a node that is there already keeps its place
        return list(order)

    def module(self, key: Key, depth: int) -> str:
        """Return the first ``depth`` names of the path of an operation's module, ``encoder.0``; "" if it has none."""
        return ".".join(self._paths[key][:depth])

    # -- folding ------------------------------------------------------------------------------

    def runs(self, group: Callable[[Key], str]) -> list[list[Key]]:
        """Return the nodes of each box: consecutive operations of a worker with the same ``group(key)``."""
        # Operations whose group is "" are cut into runs of at most 2 / `_MOST_BOXES` of all nodes, or of 2 nodes if
        # that is more. Leaves, and operations on one parameter alone, join the run that uses them if only one does.
        aside = {key for key in self.order if self._is_aside(key)}
        longest = max(2, math.ceil(len(self.order) / _MOST_BOXES * 2))
        numbers = itertools.count()
        of: dict[Key, int] = {}  # the number of each node's run
        sizes = Counter[int]()
        last: dict[str, tuple[str | None, int]] = {}  # the group and the number of each worker's last run
        for key in self.order:
            if key in aside:
                continue
            # None for other nodes: each ends a run, so that no run depends on itself through another worker.
            name = group(key) if self.nodes[key].kind == "operation" else None
            before, run = last.get(key[0], (None, -1))
            if name is None or before != name or (not name and sizes[run] >= longest):
                run = next(numbers)
            last[key[0]] = name, run
            of[key] = run
            sizes[run] += 1
        for key in reversed(self.order):  # the users of a node come later in the order, so they are placed already
            if key in aside:
                users = {of[other] for other in self.after[key]}
                of[key] = users.pop() if len(users) == 1 else next(numbers)
        return list(grouped(of, of.__getitem__).values())

    def _is_aside(self, key: Key) -> bool:
        """Return whether a node is a leaf, or made from one leaf alone, and is used on its own worker only."""
        if key in self.sent or not self.after[key]:
            return False
        node = self.nodes[key]
        if node.kind == "leaf":
            return True
        before = self.before[key]
        return node.kind == "operation" and len(before) == 1 and self.nodes[before[0]].kind == "leaf"

    def in_ranges(self) -> Diagram:
        """Return a diagram with a box for all nodes of a worker that are about as far from the start of the graph."""
        distance: dict[Key, int] = {}
        for key in self.order:
            distance[key] = max((distance[other] + 1 for other in self.earlier[key]), default=0)
        for key in reversed(self.order):  # parameters are beside the operations that use them, not all at the start
            if self._is_aside(key):
                distance[key] = min(distance[other] for other in self.after[key])
        ranges = min(_MOST_RANGES, max(1, 2 * _MOST_BOXES // len(self.workers)))
        size = (max(distance.values()) + 1) / ranges
        found = grouped(self.order, lambda key: (key[0], int(distance[key] / size)))
        diagram = self.diagram(found.values())
        return Diagram(diagram.boxes, diagram.lines, {keys[0]: number for (_, number), keys in found.items()})

    def diagram(self, groups: Iterable[list[Key]]) -> Diagram:
        """Return a diagram with a box for each group of nodes, which are of one worker, and the lines between boxes."""
        place = {key: number for number, key in enumerate(self.order)}
        boxes: dict[str, list[Box]] = {worker: [] for worker in self.workers}
        first: dict[Key, Key] = {}
        for group in groups:
            keys = tuple(sorted(group, key=place.__getitem__))
            first.update((key, keys[0]) for key in keys)
            boxes[keys[0][0]].append(self._box(keys))
        for each in boxes.values():
            each.sort(key=lambda box: place[box.key])
        ways: list[tuple[Key, Key, Edge | None]] = [(source, target, edge) for edge, source, target in self.crossings]
        between = {(source, target) for source, target, _ in ways}
        for target in self.order:  # pairs that a message connects have their line already
            for source in self.before[target]:
                if first[source] != first[target] and (source, target) not in between:
                    ways.append((source, target, None))
        lines = []
        for alike in grouped(ways, lambda way: (first[way[0]], first[way[1]], way[2] is not None)).values():
            source, target, _ = alike[0]
            edges = {edge.autograd_message_id: edge for _, _, edge in alike if edge is not None}
            pairs = tuple((one, other) for one, other, _ in alike)
            lines.append(DrawnLine(first[source], first[target], pairs, tuple(edges.values())))
        return Diagram(boxes, lines, in_order=self.in_order)

    def _box(self, keys: tuple[Key, ...]) -> Box:
        node = self.nodes[keys[0]]
        if len(keys) == 1:
            return Box(keys[0][0], keys, node.kind, name_of(node))
        operations = [self.nodes[key] for key in keys if self.nodes[key].kind == "operation"]
        modules = [each.module.split(".") if each.module else [] for each in operations]
        alike = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*modules, strict=False))
        shared = [names[0] for names in alike]
        names = [name_of(each) for each in operations]
        if shared:  # the innermost module that all operations share, without the outermost one's class
            name = ".".join(shared[1:]) or shared[0]
        elif len(set(names)) > 1:
            name = f"{names[0][:5]}…{names[-1][:5]}"
        else:
            name = names[0] if names else name_of(node)
        return Box(keys[0][0], keys, "group", f"{name} {TIMES}{len(keys)}")
