"""Gradients that are to be summed in a fixed order, though they may arrive in any.

Where several tensors that were made with the same parameters leave a worker, their gradients come back as they come,
and so do the parts of the parameters' sums; rounding shows in which order. Tensors that are *ordered* are let in one
after the other, the last one first: as a local pass does it with what was made first and last.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import Function

from nbdist.autograd.edges import Node, Slot

__all__ = ["Lines", "ordered"]


def _forward(ctx: Any, tensor: torch.Tensor, group: object, index: int) -> torch.Tensor:
    ctx.group = group
    ctx.index = index
    return tensor.view_as(tensor)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return gradient, None, None


_Ordered: Any = type(
    "Ordered",
    (Function,),
    {"forward": staticmethod(_forward), "backward": staticmethod(_backward), "__module__": __name__},
)
_ORDERED: Any = _Ordered._backward_cls


def ordered(tensor: torch.Tensor, group: object, index: int) -> torch.Tensor:
    """The tensor to send: its gradient enters after those of the group's that have a higher index."""
    found: torch.Tensor = _Ordered.apply(tensor, group, index)
    return found


class Lines:
    """Who waits for whom among the gates of one worker."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.places: dict[Slot, tuple[object, int]] = {}
        """The group and the place in it of each gate that has to wait for its turn; nearly always there are none."""
        self._left: dict[object, dict[int, set[Slot]]] = {}
        for slot in slots:
            node: Node = slot.edge[0]
            if type(node) is _ORDERED:
                self.places[slot] = place = node.group, node.index
                self._left.setdefault(place[0], {}).setdefault(place[1], set()).add(slot)

    def has_turn(self, slot: Slot) -> bool:
        """Whether nobody is left that is to go in before."""
        place = self.places.get(slot)
        if place is None:
            return True
        group = self._left[place[0]]
        return slot not in group.get(place[1], ()) or place[1] == max(group)

    def leave(self, slot: Slot) -> None:
        """It has gone in, or never will."""
        place = self.places.get(slot)
        if place is not None:
            group = self._left[place[0]]
            left = group.get(place[1], set())
            left.discard(slot)
            if not left:
                group.pop(place[1], None)
