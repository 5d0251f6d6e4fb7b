"""Walks over torch's graph, which has no other way of being looked at than from node to node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from nbdist.autograd.edges import RECEIVE, Node, Received

__all__ = ["ACCUMULATE", "Region", "walk"]

_expanded: Node = torch.zeros((), device="cpu", requires_grad=True).expand(1).grad_fn
ACCUMULATE: type = type(_expanded.next_functions[0][0])
"""The class of the nodes that stand for leaves."""


class Region(msgspec.Struct, eq=False):
    """What can be reached from some edges, along the graph of one worker."""

    nodes: set[Node] = msgspec.field(default_factory=set)
    leaves: list[Node] = msgspec.field(default_factory=list)
    receives: dict[Received, set[int]] = msgspec.field(default_factory=dict)
    """Which tensors of each message are reached."""


def walk(edges: Iterable[tuple[Node, int]], region: Region | None = None) -> Region:
    """All that lies behind ``edges``; what a ``region`` has already is not walked again, but for receives' outputs."""
    found = region if region is not None else Region()
    seen, leaves, receives = found.nodes, found.leaves, found.receives
    accumulate: Any = ACCUMULATE
    receive: Any = RECEIVE
    stack: list[Any] = [tuple(edges)]
    while stack:
        for node, output in stack.pop():
            if node in seen:
                if type(node) is receive:
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
