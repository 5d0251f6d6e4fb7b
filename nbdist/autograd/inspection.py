"""What a context has recorded, on all workers that it touches, as plain data that shows itself.

Nothing is kept for this while programs run: the graph is there anyway, and is walked when somebody asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist.autograd import api
from nbdist.autograd.contexts import Context
from nbdist.autograd.drawing import as_svg, as_text, plan_as_svg, plan_as_text
from nbdist.autograd.edges import RECEIVE, Node, Slot
from nbdist.autograd.graph import ACCUMULATE
from nbdist.autograd.origins import Origin, origin_of
from nbdist.autograd.parameters import ParameterName, names_of
from nbdist.autograd.seen import Key, Pass
from nbdist.errors import WorkerLost
from nbdist.pictures import as_image
from nbdist.rpc import api as rpc

__all__ = ["Edge", "NodeInfo", "Plan", "Trace", "local_nodes", "plan", "plan_from", "trace"]


_NOWHERE = Origin()


@dataclass(frozen=True)
class NodeInfo:
    """One node of a worker's graph."""

    number: int
    name: str
    kind: str
    """``operation``, ``leaf`` or ``receive``."""
    shape: tuple[int, ...] | None
    dtype: str | None
    inputs: tuple[int, ...]
    """The nodes that made what this one was computed from: those to which its gradients go."""
    message: int | None = None
    """Of a receive: the edge whose end it is."""
    tensors: tuple[int, ...] = ()
    """Of a receive: which of the edge's tensors it made."""
    origin: Origin = _NOWHERE
    """Where it was made, in a context whose lines are noted."""
    label: str | None = None
    """Of a leaf: the parameter's name within its outermost module, `fc1.weight`, or a variable's in `__main__`."""
    parameter_of: str | None = None
    """Of a parameter: the module that holds it, by its path from the class of the outermost one, `Net.fc1`."""

    @property
    def module(self) -> str | None:
        """The module whose forward made it."""
        return self.origin.module

    @property
    def line(self) -> str | None:
        """The line of the user's code that made it."""
        return self.origin.line


@dataclass(frozen=True)
class Edge:
    """What went from one worker to another: where it left the one graph, and where it came into the other."""

    autograd_message_id: int
    sender: str
    receiver: str
    function: str
    tensors: tuple[tuple[tuple[int, ...], str, int], ...]
    """Shape, type and bytes of each."""
    sources: tuple[int, ...]
    """The nodes of the sender that had made them."""

    @property
    def nbytes(self) -> int:
        """Of all tensors together."""
        return sum(size for _, _, size in self.tensors)


@dataclass(repr=False)
class Trace:
    """The graph of a context: nodes by worker, and the edges between workers."""

    context_id: int
    nodes: dict[str, list[NodeInfo]] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    """Workers that belong to it and could not be asked."""
    of_step: bool = False
    """Whether these are the operations of a pipeline's step. They are done in this order; a pass goes against it."""
    passes: list[Pass] = field(default_factory=list)
    """The backward passes in it, as far as they were seen by a `watch` of this worker's."""

    @property
    def workers(self) -> list[str]:
        """The workers that the context touches."""
        return list(self.nodes)

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        picture = as_svg(self)
        return {"text/plain": as_text(self), "text/html": as_image(picture), "image/svg+xml": picture}


@dataclass(repr=False)
class Plan:
    """What a pass would do: which nodes run, and for how many gradients each waits."""

    trace: Trace
    roots: list[Key]
    waits_for: dict[Key, int]
    """The nodes that take part, and how many gradients come to each from other nodes and other workers."""
    edges: list[Edge]
    """The edges along which gradients go, all of their tensors or some."""
    unused: list[Edge]
    """Those along which none goes; in FAST mode the pass would fail for them."""
    mode: api.Mode = "smart"

    @property
    def workers(self) -> list[str]:
        """The workers that take part."""
        return [worker for worker in self.trace.workers if any(worker == name for name, _ in self.waits_for)]

    def __repr__(self) -> str:
        return plan_as_text(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        picture = plan_as_svg(self)
        return {"text/plain": plan_as_text(self), "text/html": as_image(picture), "image/svg+xml": picture}


def plan(context_id: int | None, roots: torch.Tensor | Sequence[torch.Tensor], mode: api.Mode = "smart") -> Plan:
    """What `backward` from these roots would do in that mode, without doing it."""
    tensors = [roots] if isinstance(roots, torch.Tensor) else list(roots)
    edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in tensors]
    context = api.recorder().contexts.get(api.current_id() if context_id is None else int(context_id))
    return plan_from(context, [(edge.node, edge.output_nr) for edge in edges], mode)


def plan_from(context: Context, starts: Sequence[tuple[Node, int]], mode: api.Mode) -> Plan:
    """The same from edges of the graph."""
    here = api.recorder()
    found = _collect(context, starts)
    numbers = context.number_all(starts)
    return planned(found, [(here.name, numbers[node]) for node, _ in starts], mode)


def planned(recorded: Trace, roots: Sequence[Key], mode: api.Mode = "smart") -> Plan:
    """The same, of data."""
    nodes = {(worker, node.number): node for worker, each in recorded.nodes.items() for node in each}
    sources = {(edge.autograd_message_id, i): (edge, s) for edge in recorded.edges for i, s in enumerate(edge.sources)}
    waits_for: dict[Key, int] = dict.fromkeys(roots, 0)
    used = set[int]()
    if mode == "fast":  # a gradient is waited for wherever something was sent
        for edge in recorded.edges:
            for source in edge.sources:
                waits_for[edge.sender, source] = waits_for.get((edge.sender, source), 0) + 1
    stack = list(waits_for)
    while stack:
        key = stack.pop()
        node = nodes[key]
        behind: list[Key] = [(key[0], number) for number in node.inputs]
        if node.message is not None:
            for index in node.tensors:
                if (node.message, index) not in sources:  # its sender could not be asked
                    continue
                edge, source = sources[node.message, index]
                used.add(edge.autograd_message_id)
                if mode == "smart":
                    behind.append((edge.sender, source))
        for other in behind:
            if other not in waits_for:
                waits_for[other] = 0
                stack.append(other)
            waits_for[other] += 1
    taken = [edge for edge in recorded.edges if edge.autograd_message_id in used]
    unused = [edge for edge in recorded.edges if edge.autograd_message_id not in used]
    return Plan(recorded, list(roots), waits_for, taken, unused, mode)


def trace(context_id: int | None = None) -> Trace:
    """What a context has recorded, the current one if none is given; asked for on the worker that made it."""
    context = api.recorder().contexts.get(api.current_id() if context_id is None else int(context_id))
    return _collect(context)


def _collect(context: Context, starts: Sequence[tuple[Node, int]] = ()) -> Trace:
    here = api.recorder()
    found = Trace(context.id, passes=context.watch.passes if context.watch is not None and not starts else [])
    members = {record.incarnation: record for record in here.membership.members()}
    found.nodes[here.name], found.edges, touched = local_nodes(context.id, starts)
    known = {here.me}
    while new := [member for member in touched if member in members and member not in known]:
        known.update(new)
        touched = []
        answers = [(members[to], rpc.rpc_async(members[to].id, local_nodes, args=(context.id,))) for to in new]
        for record, answer in answers:
            try:
                found.nodes[record.name], edges, more = answer.wait()
            except WorkerLost:
                found.unreachable.append(record.name)
            else:
                found.edges += edges
                touched += more
    looking = _who_only_looks(context, here.me)
    found.nodes = {
        record.name: nodes
        for record in members.values()
        if (nodes := found.nodes.get(record.name)) is not None and (nodes or record.incarnation != looking)
    }
    found.edges.sort(key=lambda edge: edge.autograd_message_id)
    return found


def _who_only_looks(context: Context, me: int) -> int | None:
    """Return who watches a context of another worker; it may be in that context for nothing else."""
    watcher = me if context.watch is not None else context.watching.watcher if context.watching is not None else None
    return watcher if watcher != context.maker else None


def local_nodes(
    context_id: int, starts: Sequence[tuple[Node, int]] = ()
) -> tuple[list[NodeInfo], list[Edge], list[int]]:
    """This worker's part of a trace, and the workers that it knows to have others."""
    here = api.recorder()
    context = here.contexts.find(context_id)
    if context is None:
        return [], [], []
    numbers = context.number_all(starts)
    accumulate: Any = ACCUMULATE
    names = names_of(node.variable for node in numbers if type(node) is accumulate)
    nodes = [
        _describe(node, number, numbers, names) for node, number in sorted(numbers.items(), key=lambda item: item[1])
    ]
    edges = [
        Edge(
            sent.message,
            here.name,
            here.name_of(sent.peer),
            sent.function,
            tuple(_tensor(slot) for slot in sent.slots),
            tuple(numbers[slot.edge[0]] for slot in sent.slots),
        )
        for sent in list(context.sends.values())
    ]
    touched = {context.maker, *context.workers, *(end.peer for end in list(context.receives.values()))}
    return nodes, edges, sorted(touched)


def _describe(node: Node, number: int, numbers: dict[Node, int], names: dict[int, ParameterName]) -> NodeInfo:
    kind: Any = type(node)
    if kind is ACCUMULATE:
        leaf = node.variable
        label, holder = names.get(id(leaf), (None, None))
        return NodeInfo(number, type(leaf).__name__, "leaf", *_like(leaf), inputs=(), label=label, parameter_of=holder)
    shape, dtype = _like(node._input_metadata[0]) if node._input_metadata else (None, None)
    if kind is RECEIVE:
        return NodeInfo(number, node.name(), "receive", shape, dtype, (), node.end.message, _tensors_of(node))
    inputs = tuple(numbers[to] for to, _ in node.next_functions if to is not None)
    return NodeInfo(number, node.name(), "operation", shape, dtype, inputs, origin=origin_of(node))


def _tensors_of(node: Node) -> tuple[int, ...]:
    return tuple(range(node.first, node.first + len(node._input_metadata)))


def _like(tensor: Any) -> tuple[tuple[int, ...], str]:
    """Shape and type, of a tensor or of what a node remembers of one."""
    return tuple(int(n) for n in tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _tensor(slot: Slot) -> tuple[tuple[int, ...], str, int]:
    node, output = slot.edge
    kind: Any = type(node)
    tensor = node.variable if kind is ACCUMULATE else node._input_metadata[output]
    return *_like(tensor), math.prod(tensor.shape) * tensor.dtype.itemsize
