"""The history of tensors that a recorded message carried: how they join the receiver's graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Attach", "with_history"]

Attach = Callable[[list[torch.Tensor]], list[torch.Tensor]] | None
"""Gives tensors that were recorded their history; without one they begin one of their own."""


def with_history(tensors: list[torch.Tensor], attach: Attach) -> list[torch.Tensor]:
    """Return the recorded ``tensors`` as tensors that require grad, with the history that ``attach`` gives."""
    return attach(tensors) if attach is not None else [tensor.requires_grad_() for tensor in tensors]
