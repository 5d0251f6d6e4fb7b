"""Joins the tensors of a recorded message to the receiver's graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Gives recorded tensors their history, and returns them. None if the message has no context, or its context is over.
Attach = Callable[[list[torch.Tensor]], list[torch.Tensor]] | None


def with_history(tensors: list[torch.Tensor], attach: Attach) -> list[torch.Tensor]:
    """Return ``tensors`` with the history that ``attach`` gives them; without it, as leaves that require grad."""
    return attach(tensors) if attach is not None else [tensor.requires_grad_() for tensor in tensors]
