"""What a context keeps in memory on this worker: what its graph has saved for backward passes, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from nbdist.autograd.contexts import Context
from nbdist.autograd.graph import ACCUMULATE
from nbdist.autograd.saved import saved_by
from nbdist.torch_private import no_torch_function

__all__ = ["Place", "kept_by", "storage_of"]

Place = tuple[str, int]
"""Where a buffer is: the device and the address."""


def storage_of(tensor: torch.Tensor) -> tuple[Place, int] | None:
    """Return where a tensor's memory is, and how many bytes it has; None where that is not to be had.

    Call it inside of `no_torch_function`, where no code of a subclass is called.
    """
    try:
        storage = torch.Tensor.untyped_storage(tensor)
        address, nbytes, device = storage.data_ptr(), storage.nbytes(), storage.device
    except Exception:  # of sparse ones, lazy ones, and subclasses without memory of their own
        return None
    if not address:  # there is nothing, or it has no address
        return None
    return ("cpu" if device.type == "cpu" else str(device), address), nbytes


def kept_by(context: Context) -> dict[Place, int]:
    """Return the memory that would go with the context, parameters aside: bytes by place.

    While a pass runs here, the engine lets go of what the graph has saved, and it is not looked at.
    """
    found: dict[Place, int] = {}
    leaves: set[Place] = set()
    with no_torch_function():
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
