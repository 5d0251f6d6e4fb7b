"""Tells whether a tensor differs from another by more than rounding. Pure.

Each operation rounds, and a worker may sum in another order. So a value of the output number ``calls`` of a forward
pass, whose sums have up to ``terms`` terms, may be this far from its reference, a value of ``one``::

    ((2 + 2 √calls) eps + √(calls · terms) wide) · (|reference| + root mean square of ``one``) + smallest

``eps`` is of the coarsest dtype so far, ``wide`` of the dtype of sums: float32 for all smaller ones. ``smallest`` is
for values that cancel. Chains and transformers of up to 65 modules, in float16 to float64, whose sums were split in two
used up to 0.8 of this. Parameters and inputs are not computed: with 0 calls, there is only ``2 eps``.
"""

from __future__ import annotations

import math

import torch

from nbdist.cluster.inspection.comparing import compare


def kind_of(tensor: torch.Tensor) -> str:
    """Return the dtype and the shape of a tensor, such as ``float32(4, 8)``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}"


def eps_of(tensor: torch.Tensor) -> float:
    """Return the distance from 1 to the next number of the tensor's dtype; 0 for integers."""
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0


def difference(one: torch.Tensor, other: torch.Tensor, calls: int, terms: int, eps: float, *, exact: bool) -> str:
    """Return in words how ``other`` differs from ``one``, both dense and on the CPU; "" if rounding explains it."""
    is_rounded = not exact and eps_of(one) > 0 and eps_of(other) > 0
    if one.shape != other.shape or (one.dtype != other.dtype and not is_rounded):
        return f"{kind_of(other)} instead of {kind_of(one)}"
    if is_rounded:
        share = (2 + 2 * math.sqrt(calls)) * eps + math.sqrt(calls * terms) * min(eps, torch.finfo(torch.float32).eps)
        smallest = 0.0 if not calls else 1e-7 if eps < 1e-8 else 1e-5  # as in `torch.testing`
        dtype = torch.promote_types(one.dtype, other.dtype)
        one, other = (each.to(torch.promote_types(each.dtype, torch.float64)) for each in (one, other))
        typical = float(one[one.isfinite()].abs().square().mean().nan_to_num().sqrt())
        is_near = torch.isclose(other, one, share, share * typical + smallest, equal_nan=True)
        other = torch.where(is_near, one, other)  # `compare` counts only what rounding does not explain
        one, other = one.to(dtype), other.to(dtype)
    bits, others = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return "" if torch.equal(bits, others) else compare(one, other)


def nearest_slice(one: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return the slice of ``one`` that has the shape of ``part`` and is nearest to it; ``one`` if there is none."""
    # A worker of a tensor-parallel model may hold a slice along one dimension, such as between two of its layers.
    odd = [at for at, (size, own) in enumerate(zip(one.shape, part.shape, strict=False)) if size != own]
    if one.dim() != part.dim() or len(odd) != 1 or not 0 < (size := part.shape[odd[0]]) < one.shape[odd[0]]:
        return one
    # The last worker's slice may be smaller than the others, so its place is also counted from the end.
    starts = [*range(0, one.shape[odd[0]] - size + 1, size), one.shape[odd[0]] - size]
    wide = part.to(torch.complex128)  # which takes every dtype
    return min((one.narrow(odd[0], at, size) for at in starts), key=lambda each: float((each - wide).abs().sum()))
