"""Walks over torch's graph on one worker, from node to node: torch has no list of a graph's nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from nbdist.autograd.graph.edges import RECEIVE, GraphEdge, Node, Received

_expanded: Node = torch.zeros((), device="cpu", requires_grad=True).expand(1).grad_fn
# The class of the nodes that accumulate into leaves. Typed as Any, like `RECEIVE`.
ACCUMULATE: Any = type(_expanded.next_functions[0][0])


class Region(msgspec.Struct, eq=False):
    """The nodes that can be reached from given graph edges on one worker."""

    nodes: set[Node] = msgspec.field(default_factory=set)
    leaves: list[Node] = msgspec.field(default_factory=list)
    receives: dict[Received, set[int]] = msgspec.field(default_factory=dict)  # the indices of the tensors reached


def walk(edges: Iterable[GraphEdge], region: Region | None = None) -> Region:
    """Return all nodes that can be reached from graph edges on this worker; with ``region``, add them to it."""
    # 1.4 microseconds for each node. Local names are faster than attributes; and a stack, since a graph may be much
    # deeper than Python's recursion may go.
    found = region if region is not None else Region()
    seen, leaves, receives = found.nodes, found.leaves, found.receives
    accumulate, receive = ACCUMULATE, RECEIVE
    stack: list[Any] = [tuple(edges)]
    while stack:
        for node, output in stack.pop():
            if node in seen:
                if type(node) is receive:  # seen, but reached by another one of its tensors (`one_node_a_message`)
                    receives[node.end].add(node.first + output)
                continue
            if node is None:
                continue
            seen.add(node)
            kind = type(node)
            if kind is accumulate:
                leaves.append(node)
            elif kind is receive:
                receives.setdefault(node.end, set()).add(node.first + output)
            else:
                stack.append(node.next_functions)
    return found
