"""Measures a watched node's gradients: norm, histogram, and whether they are finite; cheap enough for every node."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from nbdist.rpc.references.peeking import Histogram

Gradients = Sequence[torch.Tensor | None]  # None where a node gives or gets no gradient

_BINS = 24
_SAMPLE = 1 << 8  # values of a tensor that are enough for a histogram; the norm is of all values

# The dtypes in which to compute the norms of narrow ones: that of a few scaled float16 gradients is beyond 65504.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


class Norms:
    """The norms of gradients that nodes have made, until a node is given them: so each gradient is read once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, float]] = {}  # by id, with the tensor's version

    def note(self, made: Gradients) -> bool:
        """Note the norms of gradients that a node has made; return whether all are finite, as `are_finite` does."""
        others = []
        for each in made:
            norm = math.nan
            if each is not None and _is_usual(each):
                with suppress(RuntimeError):  # a tensor of inference mode has no version
                    self._known[id(each)] = weakref.ref(each), each._version, (norm := _norm(each))
            if not math.isfinite(norm):  # nor may be the norm of finite values
                others.append(each)
        return not others or are_finite(others)

    def of(self, gradient: torch.Tensor) -> float:
        """Return the norm of a gradient that `_is_usual`, and forget it."""
        # The engine adds gradients up in place, or in memory that another one has left.
        ref, version, norm = self._known.pop(id(gradient), (None, 0, 0.0))
        return norm if ref is not None and ref() is gradient and version == gradient._version else _norm(gradient)


def measure(gradients: Gradients, norms: Norms | None = None) -> tuple[float, torch.Tensor | None]:
    """Return the 2-norm of all these gradients together, and a sample of their values for `histograms`, or None."""
    if len(gradients) == 1 and (only := gradients[0]) is not None and _is_usual(only):
        norm = _norm(only) if norms is None else norms.of(only)
        return norm, _sample(only).clone() if only.numel() else None
    with torch.no_grad():
        values = [_values(gradient) for gradient in gradients if gradient is not None]
        sampled = [_sample(each) for each in values if not each.is_complex() and each.numel()]
        lengths = [torch.linalg.vector_norm(each, dtype=_WIDER.get(each.dtype)).reshape(1) for each in values]
        found = _as_doubles([*lengths, *sampled])  # norms and samples in one copy, so the GPU is waited for once
        samples = found[len(values) :]
        return math.hypot(*map(float, found[: len(values)])), torch.cat(samples) if samples else None


def histograms(samples: list[torch.Tensor]) -> list[Histogram | None]:
    """Return the histogram of each sample's finite values, None without any. Cheaper than one by one."""
    if not samples:
        return []
    with torch.device("cpu"):
        values = torch.cat(samples).double()
        of = torch.arange(len(samples)).repeat_interleave(torch.tensor([each.numel() for each in samples]))
        finite = values.isfinite()
        if not finite.all():
            values, of = values[finite], of[finite]
        low, high = (
            torch.full((len(samples),), first, dtype=torch.float64).scatter_reduce_(0, of, values, how)
            for first, how in ((torch.inf, "amin"), (-torch.inf, "amax"))
        )
        # Of one value, the bin is NaN; of a range too wide for doubles, it is 0.
        at = ((values - low[of]) * (_BINS / (high - low))[of]).nan_to_num_(0).clamp_(0, _BINS - 1).long()
        counts = torch.bincount(of * _BINS + at, minlength=len(samples) * _BINS).view(-1, _BINS)
        return [
            None
            if first > last
            else Histogram(first, last, each if first < last and math.isfinite(last - first) else [sum(each)])
            for first, last, each in zip(low.tolist(), high.tolist(), counts.tolist(), strict=True)
        ]


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


def _norm(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient.detach() if gradient.requires_grad else gradient))


def _is_usual(gradient: torch.Tensor) -> bool:
    if type(gradient) is not torch.Tensor:
        return False
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


def _sample(values: torch.Tensor) -> torch.Tensor:
    flat = (values.detach() if values.requires_grad else values).reshape(-1)
    if flat.numel() <= _SAMPLE:
        return flat
    return flat[:: -(-flat.numel() // _SAMPLE)]  # rounded up: at most _SAMPLE values
