"""Measures a watched node's gradients: norm, histogram, and whether they are finite; cheap enough for every node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import torch

from nbdist.rpc.references.peeking import Histogram

Gradients = Sequence[torch.Tensor | None]  # None where a node gives or gets no gradient

_BINS = 24
_SAMPLE = 1 << 10  # values of a tensor that are enough for a histogram; the norm is of all values

# The dtypes in which to compute the norms of narrow ones: that of a few scaled float16 gradients is beyond 65504.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def measure(gradients: Gradients) -> tuple[float, Histogram | None]:
    """Return the 2-norm of all these gradients together, and a histogram of their finite values, or None."""
    if len(gradients) == 1 and (only := gradients[0]) is not None and type(only) is torch.Tensor and _is_usual(only):
        only = only.detach() if only.requires_grad else only
        return float(torch.linalg.vector_norm(only)), _histogram([_sample(only)] if only.numel() else [])
    with torch.no_grad():
        values = [_values(gradient) for gradient in gradients if gradient is not None]
        sampled = [_sample(each) for each in values if not each.is_complex() and each.numel()]
        norms = [torch.linalg.vector_norm(each, dtype=_WIDER.get(each.dtype)).reshape(1) for each in values]
        found = _as_doubles([*norms, *sampled])  # norms and samples in one copy, so the GPU is waited for once
        return math.hypot(*map(float, found[: len(values)])), _histogram(found[len(values) :])


def are_finite(gradients: Gradients) -> bool:
    """Return whether no gradient holds a NaN or Inf. None counts as finite, and so does what torch cannot search."""
    given = [gradient for gradient in gradients if gradient is not None]
    if len(given) > 1 and _are_on_one_gpu(given):
        with suppress(RuntimeError):
            # One wait for all of them. A sum may be Inf although all values are finite: `is_finite` has the last word.
            sums = [_values(gradient.detach()).sum().isfinite() for gradient in given]
            if torch.stack(sums).all():
                return True
    return all(map(is_finite, given))


def is_finite(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient holds no NaN and no Inf. None counts as finite. Waits for a GPU."""
    if gradient is None:
        return True
    try:
        values = _values(gradient.detach() if gradient.requires_grad else gradient)
        # A finite sum means that all values are finite, at a tenth of the cost of isfinite. Finite values may overflow
        # it.
        total = values.sum()
        return (not total.is_complex() and math.isfinite(total)) or bool(torch.isfinite(values).all())
    # Torch cannot search a tensor of the device "meta", say; its NotImplementedError is a RuntimeError, too. Such a
    # tensor counts as finite, since watching a pass must not fail the pass.
    except RuntimeError:
        return True


def _is_usual(gradient: torch.Tensor) -> bool:
    is_dense = gradient.layout is torch.strided and not gradient.is_nested
    return is_dense and gradient.is_cpu and gradient.dtype is torch.float32


def _as_doubles(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if not _are_on_one_gpu(tensors):
        return [each.cpu().double() for each in tensors]  # in this order: MPS has no doubles
    return list(torch.cat([each.double() for each in tensors]).cpu().split([each.numel() for each in tensors]))


def _are_on_one_gpu(tensors: list[torch.Tensor]) -> bool:
    return len({each.device for each in tensors}) == 1 and tensors[0].is_cuda


def _values(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.is_nested:
        return gradient.values()
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _histogram(samples: list[torch.Tensor]) -> Histogram | None:
    if not samples:
        return None
    sample = samples[0] if len(samples) == 1 else torch.cat(samples)
    low, high = map(float, torch.aminmax(sample))
    if not (abs(low) < torch.inf and abs(high) < torch.inf):  # an Inf, or a NaN, for which no comparison holds
        sample = sample[torch.isfinite(sample)]
        if not sample.numel():
            return None
        low, high = map(float, torch.aminmax(sample))
    if low == high or not math.isfinite((high - low) * _BINS):  # one value, or a range too wide for histc
        return Histogram(low, high, [sample.numel()])
    return Histogram(low, high, [int(count) for count in torch.histc(sample, _BINS, low, high).tolist()])


def _sample(values: torch.Tensor) -> torch.Tensor:
    flat = (values.detach() if values.requires_grad else values).reshape(-1)
    if flat.numel() <= _SAMPLE:
        return flat
    return flat[:: -(-flat.numel() // _SAMPLE)]  # rounded up: at most _SAMPLE values
