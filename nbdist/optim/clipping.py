"""The norm of all gradients of a context together, and keeping it small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from nbdist.autograd.api import recorder
from nbdist.errors import UsageError
from nbdist.optim.local import ask_all, by_owner
from nbdist.rpc.rref import RRef

__all__ = ["clip_grad_norm_"]

_EPSILON = 1e-6


def clip_grad_norm_(
    context_id: int,
    params_rref: Sequence[RRef[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of these parameters in the context so that their norm is at most ``max_norm``.

    The norm is that of all of them as one vector, wherever they are; it is returned, as it was before. As
    `torch.nn.utils.clip_grad_norm_`, which does this in one process.
    """
    owners = by_owner(params_rref)
    id, kind = int(context_id), float(norm_type)
    answers = ask_all([(owner, local_norms, (id, rrefs, kind)) for owner, rrefs in owners.items()])
    norms = torch.tensor([norm for answer in answers for norm in answer], dtype=torch.float64)
    if not norms.numel():  # no gradients: nothing to clip, and of nothing torch has no largest
        return norms.sum()
    total: torch.Tensor = torch.linalg.vector_norm(norms, kind)
    if error_if_nonfinite and not math.isfinite(total):
        raise UsageError(f"the total norm of order {norm_type} of the gradients is {total.item()}: nothing was clipped")
    factor = min(1.0, max_norm / (total.item() + _EPSILON))
    if factor < 1.0 or math.isnan(factor):
        ask_all([(owner, scale_local, (id, rrefs, factor)) for owner, rrefs in owners.items()])
    return total


def local_norms(context_id: int, rrefs: Sequence[RRef[Any]], kind: float) -> list[float]:
    """The norm of each parameter's gradient."""
    gradients = recorder().contexts.get(context_id).gradients()
    found = [gradients.get(rref.local_value()) for rref in rrefs]
    return [torch.linalg.vector_norm(gradient, kind).item() for gradient in found if gradient is not None]


def scale_local(context_id: int, rrefs: Sequence[RRef[Any]], factor: float) -> None:
    """Multiply each parameter's gradient in the context."""
    recorder().contexts.get(context_id).scale([rref.local_value() for rref in rrefs], factor)
