"""Joins the tensors of a recorded message to the receiver's graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Attach", "with_history"]

Attach = Callable[[list[torch.Tensor]], list[torch.Tensor]] | None
"""Gives recorded tensors their history, and returns them. None: each tensor begins a history of its own."""


def with_history(tensors: list[torch.Tensor], attach: Attach) -> list[torch.Tensor]:
    """Return recorded ``tensors`` as tensors that require grad, with the history that ``attach`` gives them.

    ``attach`` is None for a message that came without a context, or whose context is over.
    """
    return attach(tensors) if attach is not None else [tensor.requires_grad_() for tensor in tensors]
