"""Computes the loss of a batch from the losses of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch

from nbdist.errors import UsageError
from nbdist.nn.batches import Values

Reduction = Literal["mean", "sum"]  # the way in which a loss function combines the rows of a micro-batch


def check_reduction(reduction: Any) -> Reduction:
    """Return the reduction of a loss function. Raises UsageError if it is not one of `Reduction`."""
    if not isinstance(reduction, str) or reduction not in get_args(Reduction):
        raise UsageError(f'reduction is "mean" or "sum", as the loss function combines its rows, not {reduction!r}')
    return reduction  # type: ignore[return-value]


def check_loss_fn(loss_fn: Callable[..., torch.Tensor]) -> None:
    """Raise `UsageError` for a loss function with parameters that require grad: they would not learn."""
    if isinstance(loss_fn, torch.nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
        raise UsageError(
            "the loss function has parameters. A copy of it is sent to the last stage's worker, so its parameters "
            "would not learn: put it into the last stage"
        )


def loss_of(
    loss_fn: Callable[..., torch.Tensor], output: Any, targets: Values, rows: int, all_rows: int, reduction: Reduction
) -> torch.Tensor:
    """Return a micro-batch's share of the batch's loss; the shares of all micro-batches add up to that loss."""
    loss = loss_fn(output, *targets)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(
            f"a loss function must return a scalar, not {what}: return a tensor of one number, as mean() gives it"
        )
    if not loss.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            "the loss does not require grad, so nothing would be trained: all parameters are frozen, or the loss "
            "function detached the output"
        )
    return loss if reduction == "sum" or rows == all_rows else loss * (rows / all_rows)


def total(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the losses, added in the order given: equal losses give the same sum to the last bit."""
    return sum(losses[1:], losses[0])
