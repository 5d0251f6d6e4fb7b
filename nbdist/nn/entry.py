"""Cuts what enters a stage off from the graph of the stage before, and catches its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from nbdist.nn.batches import Values

__all__ = ["enter"]


class _Entry(Function):
    """The node by which a tensor enters a stage: so it has a history, and a module may change it in place."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, gradients: list[torch.Tensor | None], index: int, tensor: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the tensor as it has come."""
        ctx.gradients, ctx.index = gradients, index
        return tensor[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        """Keep the gradient here, to be sent back."""
        ctx.gradients[ctx.index] = gradient
        return None, None, None, None


_anchor = torch.zeros((), device="cpu", requires_grad=True)
_entered: Any = _Entry.apply


def enter(values: Values, wanted: int) -> tuple[Values, list[torch.Tensor | None]]:
    """Return what a stage is called with, and a list in which the gradients of the ``wanted`` ones appear.

    ``wanted`` is a bit mask by index.
    """
    gradients: list[torch.Tensor | None] = [None] * len(values)
    entered: dict[Any, torch.Tensor] = {}
    found = list(values)
    for index, value in enumerate(values):
        if wanted >> index & 1:
            # One tensor that was returned twice is one: what changes it in place changes both.
            place = value.data_ptr(), value.shape, value.stride(), value.dtype
            if place not in entered or not value.numel():
                entered[place] = _entered(_anchor, gradients, index, [value])
            found[index] = entered[place]
    return tuple(found), gradients
