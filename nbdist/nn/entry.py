"""Starts a new autograd graph at the input of a stage, and catches the gradients of that input.

::

    stage 0's graph ── output ── detached, sent ──> _Entry ── stage 1's graph ── output
                          ^                            │
                          └── gradient, sent back <────┘  backward of stage 1 stores it in a list

Each stage runs backward by itself, so a stage's graph must end where the values enter it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from nbdist.nn.batches import Values

__all__ = ["enter"]


class _Entry(Function):
    """The autograd node by which a tensor enters a stage.

    The node gives the tensor a history. So a module may change it in place; autograd forbids this for a leaf that
    requires grad.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, gradients: list[torch.Tensor | None], index: int, tensor: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the one tensor of the list ``tensor`` unchanged, as the output of this node.

        The list hides the tensor from autograd, which would make a view of an input that is returned unchanged. The
        ``anchor`` is the input that requires grad. `backward` stores the tensor's gradient in ``gradients[index]``.
        """
        ctx.gradients, ctx.index = gradients, index
        return tensor[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        """Store the gradient in the list that `enter` returned; nothing flows further back.

        torch calls this in the stage's backward pass.
        """
        ctx.gradients[ctx.index] = gradient
        return None, None, None, None


_anchor = torch.zeros((), device="cpu", requires_grad=True)
_entered: Any = _Entry.apply


def enter(values: Values, wanted: int) -> tuple[Values, list[torch.Tensor | None]]:
    """Return the arguments to call a stage with, and a list that the backward pass fills with their gradients.

    Bit ``i`` of ``wanted`` says whether value ``i`` gets a gradient; the list has None for the other values. If the
    same tensor occurs twice, the list has the sum at its first place, and None at the second.
    """
    gradients: list[torch.Tensor | None] = [None] * len(values)
    entered: dict[Any, torch.Tensor] = {}
    found = list(values)
    for index, value in enumerate(values):
        if wanted >> index & 1:
            # A tensor that the previous stage returned twice enters once: an in-place change must be seen in both
            # places. Its gradient, the sum of both, is stored at the first place; the second place has None.
            place = value.data_ptr(), value.shape, value.stride(), value.dtype
            if place not in entered or not value.numel():
                entered[place] = _entered(_anchor, gradients, index, [value])
            found[index] = entered[place]
    return tuple(found), gradients
