"""Collects what a context has recorded on all workers, as plain data that draws itself: `trace` and `plan`.

Nothing is recorded for this while programs run. Each worker walks its autograd graph when it is asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist import registry
from nbdist.autograd import api
from nbdist.autograd.contexts import Context
from nbdist.autograd.graph.edges import RECEIVE, EdgeSlot, Node
from nbdist.autograd.graph.origins import NodeOrigin, origin_of
from nbdist.autograd.graph.parameters import ParameterName, names_of
from nbdist.autograd.graph.walk import ACCUMULATE
from nbdist.autograd.watching.records import Key, Pass
from nbdist.errors import WorkerLost
from nbdist.rpc import api as rpc

__all__ = ["Edge", "NodeInfo", "Plan", "Trace", "local_nodes", "plan", "plan_from", "trace"]


_NOWHERE = NodeOrigin()


@dataclass(frozen=True)
class NodeInfo:
    """One node of a worker's autograd graph."""

    number: int
    """The node's number on its worker; `Event.node` and `Watch.run` use it too."""
    name: str
    kind: str
    """``operation``, ``leaf`` or ``receive``."""
    shape: tuple[int, ...] | None
    """The shape of the tensor that the node made (its first output), or None if it is not known."""
    dtype: str | None
    inputs: tuple[int, ...]
    """The numbers of the nodes that made the inputs of this one; its gradients go to them."""
    message: int | None = None
    """For a receive: the ``autograd_message_id`` of the edge that ends here."""
    tensors: tuple[int, ...] = ()
    """For a receive: the positions, among the edge's tensors, of those that this node made."""
    origin: NodeOrigin = _NOWHERE
    """The module and the line that made the node, if the context notes lines."""
    label: str | None = None
    """For a leaf: the parameter's path in its outermost module, `fc1.weight`, or a variable's name in `__main__`."""
    parameter_of: str | None = None
    """For a parameter: its module, as the class of the outermost module and a path, `Net.fc1`."""

    @property
    def module(self) -> str | None:
        """The module whose forward made the node, or None."""
        return self.origin.module

    @property
    def line(self) -> str | None:
        """The line of the user's code that made the node, or None."""
        return self.origin.line


@dataclass(frozen=True)
class Edge:
    """An edge from one worker to another: the tensors of one message, and the nodes that made them."""

    autograd_message_id: int
    sender: str
    receiver: str
    function: str
    tensors: tuple[tuple[tuple[int, ...], str, int], ...]
    """The shape, dtype and size in bytes of each tensor."""
    sources: tuple[int, ...]
    """The number of the sender's node that made each tensor."""

    @property
    def nbytes(self) -> int:
        """The size in bytes of all tensors of the edge."""
        return sum(size for _, _, size in self.tensors)


@dataclass(repr=False)
class Trace:
    """The graph of a context as plain data: nodes by worker, and the edges between workers. `trace` makes one.

    Its repr is text; in a notebook it shows itself as a picture, as in notebooks/02_distributed_autograd.ipynb.
    """

    context_id: int
    nodes: dict[str, list[NodeInfo]] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    """The workers of the context that were lost while they were asked. Those lost before are left out."""
    of_step: bool = False
    """True for a step of a pipeline: its nodes are operations of the schedule, and run in this order.

    The nodes of a graph are in the order of the forward pass, and a backward pass runs against it.
    """
    passes: list[Pass] = field(default_factory=list)
    """The backward passes in the context that the watch on this worker has seen."""

    @property
    def workers(self) -> list[str]:
        """The names of the workers that the context reaches."""
        return list(self.nodes)

    def __repr__(self) -> str:
        return registry.describe(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return registry.draw(self)


@dataclass(repr=False)
class Plan:
    """The plan of a pass as plain data: which nodes would run, and for how many gradients each waits. `plan` makes one.

    Its repr is text; in a notebook it shows itself as a picture.
    """

    trace: Trace
    roots: list[Key]
    waits_for: dict[Key, int]
    """By node that takes part: the number of gradients that come to it from other nodes and other workers."""
    edges: list[Edge]
    """The edges along which gradients go, for some of their tensors or all."""
    unused: list[Edge]
    """The edges along which no gradient goes. A FAST pass would fail because of them."""
    mode: api.Mode = "smart"

    @property
    def workers(self) -> list[str]:
        """The names of the workers that take part."""
        return [worker for worker in self.trace.workers if any(worker == name for name, _ in self.waits_for)]

    def __repr__(self) -> str:
        return registry.describe(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return registry.draw(self)


def plan(context_id: int | None, roots: torch.Tensor | Sequence[torch.Tensor], mode: api.Mode = "smart") -> Plan:
    """Return what `backward` from these roots would do, without running anything.

    Args:
        context_id: The context; None means the one that the calling thread is in.
        roots: The tensors from which the pass would begin.
        mode: The mode of the pass, ``"smart"`` or ``"fast"``.

    Raises:
        UsageError: This worker has no such context.
        RuntimeError: A root does not require grad.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.exp, args=(x,)).sum()
        ...     unused = rpc.rpc_sync("worker1", torch.exp, args=(x,))
        ...     planned = dist_autograd.plan(context_id, loss)
        >>> planned.workers, len(planned.edges), len(planned.unused)
        (['worker0', 'worker1'], 2, 2)
    """
    tensors = [roots] if isinstance(roots, torch.Tensor) else list(roots)
    edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in tensors]
    context = api.recorder().contexts.get(api.current_id() if context_id is None else int(context_id))
    return plan_from(context, [(edge.node, edge.output_nr) for edge in edges], mode)


def plan_from(context: Context, starts: Sequence[tuple[Node, int]], mode: api.Mode) -> Plan:
    """Return the plan of a pass from edges of this worker's graph; see `plan`.

    All workers of the context are asked; nothing runs, and no gradient changes.
    """
    here = api.recorder()
    found = _collect(context, starts)
    numbers = context.number_all(starts)
    return planned(found, [(here.name, numbers[node]) for node, _ in starts], mode)


def planned(recorded: Trace, roots: Sequence[Key], mode: api.Mode = "smart") -> Plan:
    """Return the plan of a pass from nodes of a recorded trace: pure, data in and data out.

    SMART reaches nodes of other workers through receives. FAST begins at the roots and at everything that was sent.
    """
    nodes = {(worker, node.number): node for worker, each in recorded.nodes.items() for node in each}
    sources = {(edge.autograd_message_id, i): (edge, s) for edge in recorded.edges for i, s in enumerate(edge.sources)}
    waits_for: dict[Key, int] = dict.fromkeys(roots, 0)
    used = set[int]()
    if mode == "fast":  # FAST waits for a gradient of everything that was sent
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
                if (node.message, index) not in sources:  # its sender was lost
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
    """Return what a context has recorded, on all workers that it reaches.

    This asks the workers, and waits for their answers. Nodes after a worker's last send or receive, such as those of
    the loss, are in the trace once a pass has begun from them.

    Args:
        context_id: The context; None means the one that the calling thread is in.

    Raises:
        UsageError: This worker has no such context.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     y = rpc.rpc_sync("worker1", torch.exp, args=(x,))
        ...     dist_autograd.trace(context_id)
        context 0: 2 workers, 2 edges
          worker0: 0 operations, 1 leaf, 1 receive
            -> worker1: float32[2] (exp)
          worker1: 1 operation, 0 leaves, 1 receive
            -> worker0: float32[2] (exp)
    """
    context = api.recorder().contexts.get(api.current_id() if context_id is None else int(context_id))
    return _collect(context)


def _collect(context: Context, starts: Sequence[tuple[Node, int]] = ()) -> Trace:
    """Return the trace of a context; with ``starts``, add what lies behind them here, and leave out the passes.

    Workers are asked in rounds: each names the workers that it exchanged messages with, until there is no new one.
    """
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
    """Return the worker that watches a context of another maker: without nodes it is left out of the trace."""
    watcher = me if context.watch is not None else context.watching.watcher if context.watching is not None else None
    return watcher if watcher != context.maker else None


def local_nodes(
    context_id: int, starts: Sequence[tuple[Node, int]] = ()
) -> tuple[list[NodeInfo], list[Edge], list[int]]:
    """Return this worker's nodes and outgoing edges in a context, and the incarnations of workers it knows there.

    Called on each worker of the context, by RPC. A worker that does not have the context returns three empty lists.
    """
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
    """Return a node as data; ``numbers`` has the numbers of all nodes, ``names`` the names of leaves by id."""
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
    """Return the positions of a receive's tensors in its message."""
    return tuple(range(node.first, node.first + len(node._input_metadata)))


def _like(tensor: Any) -> tuple[tuple[int, ...], str]:
    """Return the shape and dtype of a tensor, or of the metadata that a node keeps of one."""
    return tuple(int(n) for n in tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _tensor(slot: EdgeSlot) -> tuple[tuple[int, ...], str, int]:
    """Return the shape, dtype and size in bytes of a tensor that was sent."""
    node, output = slot.edge
    kind: Any = type(node)
    tensor = node.variable if kind is ACCUMULATE else node._input_metadata[output]
    return *_like(tensor), math.prod(tensor.shape) * tensor.dtype.itemsize
