"""Joins the tensors of a recorded message to the receiver's graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

Attach = Callable[[list[torch.Tensor]], list[torch.Tensor]] | None
"""Gives recorded tensors their history, and returns them. None: each tensor becomes a leaf."""


def with_history(tensors: list[torch.Tensor], attach: Attach) -> list[torch.Tensor]:
    """Return ``tensors``, which required grad on the sender, with the history that ``attach`` gives them.

    ``attach`` is None if the message has no context, or its context is over. Then the tensors become leaves that
    require grad.
    """
    return attach(tensors) if attach is not None else [tensor.requires_grad_() for tensor in tensors]
