"""Collects the record of a context from all workers, as the data of `graph.traces`: `trace` and `plan`.

Nothing is recorded for this while programs run. Each worker walks its autograd graph when it is asked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from nbdist.autograd import api
from nbdist.autograd.graph.edges import RECEIVE, EdgeSlot, GraphEdge, Node
from nbdist.autograd.graph.hooks import notes_on
from nbdist.autograd.graph.messages import Mode
from nbdist.autograd.graph.noting import may_have_hooks, why_no_line
from nbdist.autograd.graph.numbers import NodeNumbers
from nbdist.autograd.graph.origins import NodeOrigin, origin_of
from nbdist.autograd.graph.parameters import ParameterName, names_of
from nbdist.autograd.graph.traces import Edge, NodeInfo, Plan, Trace, planned
from nbdist.autograd.graph.walk import ACCUMULATE, walk
from nbdist.autograd.passes.context import Context
from nbdist.autograd.passes.engine import edge_of
from nbdist.errors import WorkerLost
from nbdist.rpc import api as rpc
from nbdist.rpc.asking import ask_each


def plan(context_id: int | None, roots: torch.Tensor | Sequence[torch.Tensor], mode: Mode = "smart") -> Plan:
    """Return the plan of a `backward` from these roots, without running anything.

    Asks all workers of the context, and waits for their answers. The plan lacks the nodes of workers that are lost, and
    what lies behind them. A graph that a pass has freed is planned all the same.

    Args:
        context_id: The context; None means the one that the calling thread is in.
        roots: The tensors from which the pass would begin, of any size; a leaf may be one.
        mode: The mode of the pass, ``"smart"`` or ``"fast"``.

    Raises:
        UsageError: The context has ended or never came to this worker, the thread is in none, ``mode`` is another word,
            or there is no root.
        NotInitialized: RPC does not run here.
        TypeError: The roots are not tensors.
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
    api.check_mode(mode)
    edges = list(map(edge_of, api.check_tensors(roots)))
    context = api.recorder().contexts.get(api.current_id() if context_id is None else int(context_id))
    return plan_from(context, edges, mode)


def plan_from(context: Context, starts: Sequence[GraphEdge], mode: Mode) -> Plan:
    """Return the plan of a pass that begins at ``starts``, nodes of this worker, each with the number of an output.

    Asks all workers of the context, and waits for their answers. Nothing runs, and no gradient changes.
    """
    here = api.recorder()
    found = _collect(context, starts)
    numbers = context.number_all(starts)
    return planned(found, [(here.transport.name, numbers[node]) for node, _ in starts], mode)


def plan_local(numbers: NodeNumbers, starts: Sequence[GraphEdge]) -> Plan:
    """Return the plan of a local pass that begins at ``starts`` on this worker, with these numbers for its nodes."""
    name = api.recorder().transport.name
    found = walk(starts)
    numbered = numbers.of([*found.leaves, *found.nodes.difference(found.leaves)])
    nodes = _describe_all(numbered, own=True)
    if why := why_no_line():
        nodes = list(map(functools.partial(_without_line, {node.number: node for node in nodes}, why), nodes))
    return planned(Trace(0, {name: nodes}), [(name, numbered[node]) for node, _ in starts])


def _without_line(nodes: dict[int, NodeInfo], why: str, node: NodeInfo) -> NodeInfo:
    """Return a node, if it was made where no lines were noted, with the module of its parameter, and ``why``."""
    if node.kind != "operation" or node.origin != NodeOrigin():
        return node
    near = [nodes[number] for number in node.inputs]
    near += [nodes[number] for other in near for number in other.inputs if other.name == "TBackward0"]
    module = next((other.parameter_of for other in near if other.parameter_of), None)
    return msgspec.structs.replace(node, origin=NodeOrigin(module, text=why))


def trace(context_id: int | None = None) -> Trace:
    """Return the graph that a context has recorded, on all workers that it reaches.

    This asks the workers, and waits for their answers. Lost workers are left out, without an error. Nodes after a
    worker's last send or receive, such as the loss's nodes, are in the trace once a pass has begun from them.

    Args:
        context_id: The context; None means the one that the calling thread is in.

    Raises:
        UsageError: The context has ended or never came to this worker, or the thread is in none.
        NotInitialized: RPC does not run here.

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


def _collect(context: Context, starts: Sequence[GraphEdge] = ()) -> Trace:
    """Return the trace of a context. With ``starts``, it also has the nodes behind them, and no ``Trace.passes``."""
    here = api.recorder()
    found = Trace(context.id, passes=context.watch.passes if context.watch is not None and not starts else [])
    members = {record.incarnation: record for record in here.membership.members()}
    found.nodes[here.transport.name], found.edges, touched = local_nodes(context.id, starts)
    known = {here.me}
    # In rounds: each worker names those that it exchanged messages with, until there is no new one.
    while new := [member for member in touched if member in members and member not in known]:
        known.update(new)
        touched = []
        names = [members[to].name for to in new]
        answers = ask_each(rpc.current_agent(), local_nodes, dict.fromkeys(names, (context.id,))).or_raise(WorkerLost)
        found.unreachable += [name for name in names if name not in answers]
        for name, (nodes, edges, more) in answers.items():
            found.nodes[name] = nodes
            found.edges += edges
            touched += more
    looking = _who_only_looks(context, here.me)  # it has the context only for its watch: no row without a node
    found.nodes = {
        record.name: nodes
        for record in members.values()
        if (nodes := found.nodes.get(record.name)) is not None and (nodes or record.incarnation != looking)
    }
    found.edges.sort(key=lambda edge: edge.autograd_message_id)
    return found


def _who_only_looks(context: Context, me: int) -> int | None:
    """Return the incarnation of the worker that watches a context; None if no worker or its maker does."""
    watcher = me if context.watch is not None else context.watching.watcher if context.watching is not None else None
    return watcher if watcher != context.maker else None


def local_nodes(context_id: int, starts: Sequence[GraphEdge] = ()) -> tuple[list[NodeInfo], list[Edge], list[int]]:
    """Return this worker's nodes and outgoing edges in a context, and the incarnations of workers it knows there."""
    # Each worker of the context runs this, by RPC.
    here = api.recorder()
    context = here.contexts.find(context_id)
    if context is None:
        return [], [], []
    numbers = context.number_all(starts)
    nodes = _describe_all(numbers)
    edges = []
    for sent in list(context.sends.values()):
        tensors, sources = tuple(map(_tensor, sent.slots)), tuple(numbers[slot.edge[0]] for slot in sent.slots)
        peer = here.transport.name_of(sent.peer)
        edges.append(Edge(sent.message, here.transport.name, peer, sent.function, tensors, sources))
    touched = {context.maker, *context.workers, *(end.peer for end in list(context.receives.values()))}
    return nodes, edges, sorted(touched)


def _describe_all(numbers: dict[Node, int], *, own: bool = False) -> list[NodeInfo]:
    names = names_of(node.variable for node in numbers if type(node) is ACCUMULATE)
    return [
        _describe(node, numbers, names, own and may_have_hooks(node))
        for node in sorted(numbers, key=numbers.__getitem__)
    ]


def _describe(node: Node, numbers: dict[Node, int], names: dict[int, ParameterName], own: bool) -> NodeInfo:
    kind, number = type(node), numbers[node]
    if kind is ACCUMULATE:
        leaf = node.variable
        label, holder = names.get(id(leaf), (None, None))
        kept = type(leaf).__name__, "leaf", *_shape_and_dtype(leaf)
        return NodeInfo(number, *kept, inputs=(), label=label, parameter_of=holder, notes=notes_on(node, own=own))
    name = kind.name(node)
    outputs = node._input_metadata  # torch makes the list anew each time
    shape, dtype = _shape_and_dtype(outputs[0]) if outputs else (None, None)
    if kind is RECEIVE:
        made = range(node.first, node.first + len(outputs))  # the indices of its tensors in the message
        return NodeInfo(number, name, "receive", shape, dtype, (), node.end.message, tuple(made))
    inputs = tuple(numbers[to] for to, _ in node.next_functions if to is not None)
    notes = notes_on(node, own=own)
    return NodeInfo(number, name, "operation", shape, dtype, inputs, origin=origin_of(node), notes=notes)


def _shape_and_dtype(tensor: Any) -> tuple[tuple[int, ...], str]:
    return tuple(map(int, tensor.shape)), _name_of(tensor.dtype)


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(slot: EdgeSlot) -> tuple[tuple[int, ...], str, int]:
    node, output = slot.edge
    tensor = node.variable if type(node) is ACCUMULATE else node._input_metadata[output]
    return *_shape_and_dtype(tensor), math.prod(tensor.shape) * tensor.dtype.itemsize
