"""What a context keeps in memory on this worker: what its graph has saved for backward passes, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from nbdist.autograd.contexts import Context
from nbdist.autograd.graph import ACCUMULATE
from nbdist.autograd.saved import saved_by

__all__ = ["kept_by", "storage_of"]


def storage_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Where a tensor's memory is, and how many bytes it has; None where that is not to be had."""
    try:
        storage = tensor.untyped_storage()
        place, nbytes = storage.data_ptr(), storage.nbytes()
    except Exception:  # of sparse ones, lazy ones, and subclasses without memory of their own
        return None
    return (place, nbytes) if place else None  # there is nothing, or it has no address


def kept_by(context: Context) -> dict[int, int]:
    """The memory that would go with the context, parameters aside: bytes by address.

    While a pass runs here, the engine lets go of what the graph has saved, and it is not looked at.
    """
    found: dict[int, int] = {}
    leaves: set[int] = set()
    for node in context.nodes() if not context.runs else ():
        kind: Any = type(node)
        if kind is ACCUMULATE:
            at = storage_of(node.variable)
            leaves.update([at[0]] if at is not None else [])
            continue
        for saved in saved_by(node):  # as it is kept: to unpack it may compute it anew
            at = storage_of(saved.tensor) if saved.tensor is not None else None
            found.update([at] if at is not None else [])
    for gradient in context.stored():
        at = storage_of(gradient)
        found.update([at] if at is not None else [])
    return {place: nbytes for place, nbytes in found.items() if place not in leaves}
