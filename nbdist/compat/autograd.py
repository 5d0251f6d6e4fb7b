"""Replaces torch.distributed.autograd."""

from __future__ import annotations

from nbdist.autograd.api import backward, context, get_gradients, recorder

__all__ = ["backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Return True, because nbdist has distributed autograd."""
    return True


def _is_valid_context(context_id: int) -> None:
    """Raise UsageError if this worker has no context with this id; else do nothing."""
    # torch's `DistributedOptimizer` calls this, and so do the optimizers that were copied from it.
    recorder().contexts.get(context_id)
