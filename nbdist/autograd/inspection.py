"""What a context has recorded, on all workers that it touches, as plain data that shows itself.

Nothing is kept for this while programs run: the graph is there anyway, and is walked when somebody asks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from nbdist.autograd import api
from nbdist.autograd.contexts import Context
from nbdist.autograd.drawing import as_svg, as_text
from nbdist.autograd.edges import RECEIVE, Node, Slot
from nbdist.autograd.graph import ACCUMULATE, walk
from nbdist.errors import WorkerLost
from nbdist.rpc import api as rpc

__all__ = ["Edge", "NodeInfo", "Trace", "local_nodes", "trace"]


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


@dataclass
class Trace:
    """The graph of a context: nodes by worker, and the edges between workers."""

    context_id: int
    nodes: dict[str, list[NodeInfo]] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    """Workers that belong to it and could not be asked."""

    @property
    def workers(self) -> list[str]:
        """The workers that the context touches."""
        return list(self.nodes)

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": as_text(self), "image/svg+xml": as_svg(self)}


def trace(context_id: int | None = None) -> Trace:
    """What a context has recorded, the current one if none is given; asked for on the worker that made it."""
    here = api.recorder()
    context = here.contexts.get(api.current_id() if context_id is None else int(context_id))
    found = Trace(context.id)
    members = {here.me} | context.workers
    records = [record for record in here.membership.members() if record.incarnation in members]
    answers = []
    for record in records:
        try:
            answers.append((record.name, rpc.rpc_async(record.id, local_nodes, args=(context.id,))))
        except WorkerLost:
            found.unreachable.append(record.name)
    for name, answer in answers:
        try:
            nodes, edges = answer.wait()
        except WorkerLost:
            found.unreachable.append(name)
        else:
            found.nodes[name] = nodes
            found.edges += edges
    found.edges.sort(key=lambda edge: edge.autograd_message_id)
    return found


def local_nodes(context_id: int) -> tuple[list[NodeInfo], list[Edge]]:
    """This worker's part of a trace."""
    here = api.recorder()
    context = here.contexts.find(context_id)
    if context is None:
        return [], []
    numbers = _numbered(context)
    nodes = [_describe(node, number, numbers) for node, number in numbers.items()]
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
    return nodes, edges


def _numbered(context: Context) -> dict[Node, int]:
    """All nodes that are known: behind what was sent, behind the roots of passes, and what was received."""
    starts = [slot.edge for sent in list(context.sends.values()) for slot in sent.slots]
    starts += context.roots
    starts += [(node, 0) for end in list(context.receives.values()) for node in end.nodes]
    region = walk(starts)
    return {node: number for number, node in enumerate(sorted(region.nodes, key=lambda node: node._sequence_nr()))}


def _describe(node: Node, number: int, numbers: dict[Node, int]) -> NodeInfo:
    kind: Any = type(node)
    if kind is ACCUMULATE:
        return NodeInfo(number, type(node.variable).__name__, "leaf", *_like(node.variable), inputs=())
    shape, dtype = _like(node._input_metadata[0]) if node._input_metadata else (None, None)
    if kind is RECEIVE:
        return NodeInfo(number, node.name(), "receive", shape, dtype, (), node.end.message)
    inputs = tuple(numbers[to] for to, _ in node.next_functions if to is not None)
    return NodeInfo(number, node.name(), "operation", shape, dtype, inputs)


def _like(tensor: Any) -> tuple[tuple[int, ...], str]:
    """Shape and type, of a tensor or of what a node remembers of one."""
    return tuple(int(n) for n in tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _tensor(slot: Slot) -> tuple[tuple[int, ...], str, int]:
    node, output = slot.edge
    kind: Any = type(node)
    tensor = node.variable if kind is ACCUMULATE else node._input_metadata[output]
    return *_like(tensor), math.prod(tensor.shape) * tensor.dtype.itemsize
