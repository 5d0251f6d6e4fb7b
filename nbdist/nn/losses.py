"""The loss of a batch from those of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from nbdist.errors import UsageError
from nbdist.nn.batches import Values

__all__ = ["Reduction", "loss_of", "total"]

Reduction = Literal["mean", "sum"]
"""What a loss function does with the rows that it is given."""


def loss_of(
    loss_fn: Callable[..., torch.Tensor], output: Any, targets: Values, rows: int, all_rows: int, reduction: Reduction
) -> torch.Tensor:
    """A micro-batch's share of the batch's loss."""
    loss = loss_fn(output, *targets)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(f"a loss function returns a scalar, not {what}")
    if not loss.requires_grad and torch.is_grad_enabled():
        raise UsageError("the loss does not require grad: nothing that it depends on does, or it was detached")
    return loss if reduction == "sum" or rows == all_rows else loss * (rows / all_rows)


def total(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, in the order of the micro-batches."""
    found = losses[0]
    for loss in losses[1:]:
        found = found + loss
    return found
