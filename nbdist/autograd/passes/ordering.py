"""Makes gradients enter a worker's graph in a fixed order, although they may arrive in any order.

If several tensors that were computed with the same parameters leave a worker, their gradients come back in any order,
and each adds to the parameters' gradients. Floating-point sums depend on the order. So tensors that are *ordered* let
their gradients in one after the other, the highest index first. A local pass does the same: it first runs the nodes
that were made last.

A pipeline that is called in a context, rather than trained by its own schedule, orders the tensors that leave a worker;
the index is the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from nbdist.autograd.graph.edges import EdgeSlot, Node, new_function


def _forward(ctx: Any, tensor: torch.Tensor, group: object, index: int) -> torch.Tensor:
    ctx.group = group
    ctx.index = index
    return tensor.view_as(tensor)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return gradient, None, None


_Ordered = new_function("Ordered", _forward, _backward)
_ORDERED: Any = _Ordered._backward_cls


def ordered(tensor: torch.Tensor, group: object, index: int) -> torch.Tensor:
    """Return a view of ``tensor`` to send in its place: backward passes take the gradients of a group in fixed order.

    Each gradient waits until all gradients of its ``group`` with a higher index have entered the graph.
    """
    found: torch.Tensor = _Ordered.apply(tensor, group, index)
    return found


class GateQueues:
    """The order in which the gates of `ordered` tensors let their gradients in, on one worker in one pass.

    The worker's `Part` calls the methods with its lock held.
    """

    def __init__(self, slots: Iterable[EdgeSlot]) -> None:
        self.places: dict[EdgeSlot, tuple[object, int]] = {}  # the group and index of each ordered gate; mostly none
        self._left: dict[object, set[EdgeSlot]] = {}  # by group, the gates that have not let their gradients in
        for slot in slots:
            node: Node = slot.edge[0]
            if type(node) is _ORDERED:
                self.places[slot] = node.group, node.index
                self._left.setdefault(node.group, set()).add(slot)

    def has_turn(self, slot: EdgeSlot) -> bool:
        """Return whether no gate of the same group and a higher index is left; True for a gate that is not ordered."""
        if slot not in self.places:
            return True
        group, index = self.places[slot]
        left = self._left[group]
        return slot not in left or index == max(self.places[other][1] for other in left)

    def leave(self, slot: EdgeSlot) -> None:
        """Take a gate out of its queue: its gradient has entered the graph, or never will."""
        if slot in self.places:
            self._left[self.places[slot][0]].discard(slot)
