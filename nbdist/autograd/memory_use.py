"""Measures the memory that a context uses on this worker: tensors saved for backward passes, and gradients."""

from __future__ import annotations

import torch

from nbdist.autograd.graph.saved import saved_by
from nbdist.autograd.graph.walk import ACCUMULATE
from nbdist.autograd.passes.context import Context
from nbdist.torch_private import no_torch_function

Place = tuple[str, int]  # of a buffer in memory: its device and its address


def storage_of(tensor: torch.Tensor) -> tuple[Place, int] | None:
    """Return the place and the size in bytes of a tensor's storage; None without an address.

    Call it inside of `no_torch_function`, so that no code of a tensor subclass is called.
    """
    try:
        storage = torch.Tensor.untyped_storage(tensor)
        address, nbytes, device = storage.data_ptr(), storage.nbytes(), storage.device
    except Exception:  # of sparse and lazy tensors, and of subclasses without memory of their own, of any class
        return None
    place = "cpu" if device.type == "cpu" else str(device), address
    return (place, nbytes) if address else None  # None for an empty tensor, or one without memory


def kept_by(context: Context) -> dict[Place, int]:
    """Return the size in bytes, by place, of each buffer on this worker that would be freed with the context.

    These are the tensors saved for backward passes, and the gradients; leaves are not counted. A buffer that several
    tensors share counts once.
    """
    leaves, kept = [], context.stored()
    with no_torch_function():
        # While `Context.runs` holds a pass, torch's engine may be freeing the saved tensors. (On workers other than its
        # root, a pass stays there for a while after its end.)
        for node in context.nodes() if not context.runs else ():
            if type(node) is ACCUMULATE:
                leaves.append(node.variable)
            else:  # not unpacked, which might compute a tensor anew
                kept += [saved.tensor for saved in saved_by(node) if saved.tensor is not None]
        of_leaves = dict(filter(None, map(storage_of, leaves)))
        found = dict(filter(None, map(storage_of, kept)))
    return {place: nbytes for place, nbytes in found.items() if place not in of_leaves}
