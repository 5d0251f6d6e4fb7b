"""What a watched node's gradients look like, in numbers: cheap enough to be had for each node of a pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nbdist.rpc.peeking import Histogram

__all__ = ["is_finite", "measure"]

_BINS = 24
_SAMPLE = 1 << 12
"""Of so many values the shape can be seen; the norm is of all."""


def measure(gradients: Sequence[torch.Tensor | None]) -> tuple[float, Histogram | None]:
    """The 2-norm of all of these together, and how their finite values are distributed."""
    with torch.no_grad():
        values = [_values(gradient) for gradient in gradients if gradient is not None]
        norm = math.hypot(*(float(torch.linalg.vector_norm(each)) for each in values))
        return norm, _histogram(values)


def is_finite(gradient: torch.Tensor | None) -> bool:
    """Whether there is no NaN and no Inf in it."""
    if gradient is None:
        return True
    values = _values(gradient.detach())
    # A sum is finite only if all values are, and costs a tenth of looking at each; of finite ones it may be too large.
    return math.isfinite(abs(values.sum().item())) or bool(torch.isfinite(values).all())


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _histogram(values: Sequence[torch.Tensor]) -> Histogram | None:
    samples = [_sample(each) for each in values if not each.is_complex() and each.numel()]
    if not samples:
        return None
    sample = samples[0] if len(samples) == 1 else torch.cat(samples)
    low, high = map(float, torch.aminmax(sample))
    if not (abs(low) < torch.inf and abs(high) < torch.inf):  # there is an Inf, or a NaN, which is never less
        sample = sample[torch.isfinite(sample)]
        if not sample.numel():
            return None
        low, high = map(float, torch.aminmax(sample))
    if low == high or not math.isfinite((high - low) * _BINS):  # which torch computes with
        return Histogram(low, high, [sample.numel()])
    return Histogram(low, high, [int(count) for count in torch.histc(sample, _BINS, low, high).tolist()])


def _sample(values: torch.Tensor) -> torch.Tensor:
    """Some of the values, evenly spread, as numbers that can be counted."""
    flat = values.detach().reshape(-1)
    return flat[:: -(-flat.numel() // _SAMPLE)].cpu().double()
