"""Clips the gradients of a context by their common norm, on all workers that hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from nbdist.autograd.api import recorder
from nbdist.errors import UsageError
from nbdist.optim.owners import ask_all, by_owner
from nbdist.optim.parameters import read_rrefs
from nbdist.rpc.references.rref import RRef

_EPSILON = 1e-6  # added to the norm before dividing by it, as torch does


def clip_grad_norm_(
    context_id: int,
    params_rref: Sequence[RRef[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of these parameters in the context so that their total norm is at most ``max_norm``.

    Like `torch.nn.utils.clip_grad_norm_`, but for gradients on several workers: each owner computes the norms of its
    own gradients, and scales them in the context. Parameters without a gradient in the context are skipped.

    Args:
        context_id: The context that holds the gradients; call this after `nbdist.autograd.backward`.
        params_rref: References to the parameters, local ones too.
        max_norm: The largest norm allowed.
        norm_type: The order of the norm; ``float("inf")`` takes the largest absolute value.
        error_if_nonfinite: Raise an error, and scale nothing, if the total norm is NaN or Inf.

    Returns:
        The total norm before clipping, as a float64 tensor; 0 if there are no gradients.

    Raises:
        UsageError: The context is not known on an owner, as after its end; ``error_if_nonfinite`` is set and the norm
            is not finite; or ``params_rref`` is no list of references.
        StepFailed: The call failed on several owners, as for an ended context. If it failed on one, that owner's error
            is raised: WorkerLost for a dead one. If that happens while gradients are scaled, some have been.
        NotInitialized: RPC is not running in this process.

    Example:
        >>> weight = rpc.remote("worker1", torch.nn.Parameter, args=(torch.ones(2),))
        >>> with dist_autograd.context() as context_id:
        ...     loss = weight.rpc_sync().mul(torch.tensor([3.0, 4.0])).sum()
        ...     dist_autograd.backward(context_id, [loss])
        ...     clip_grad_norm_(context_id, [weight], max_norm=1.0)
        tensor(5., dtype=torch.float64)
    """
    owners = by_owner(read_rrefs(params_rref))
    id, kind, most = int(context_id), float(norm_type), float(max_norm)
    answers = ask_all(local_norms, {owner: (id, rrefs, kind) for owner, rrefs in owners.items()})
    # In float64, as Python's floats are: float32 would round them.
    norms = torch.tensor([norm for answer in answers.values() for norm in answer], dtype=torch.float64)
    if not norms.numel():  # no gradients: vector_norm(inf) of an empty tensor would raise
        return norms.sum()
    total: torch.Tensor = torch.linalg.vector_norm(norms, kind)
    if error_if_nonfinite and not math.isfinite(total):
        raise UsageError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}: nothing was clipped. "
            'context(check="nan") finds a NaN of the forward pass, watch(norms=True) one of the backward pass'
        )
    factor = most / (total.item() + _EPSILON)
    if not factor >= 1.0:  # also for a NaN, which all gradients become then, as torch has it
        ask_all(scale_local, {owner: (id, rrefs, factor) for owner, rrefs in owners.items()})
    return total


def local_norms(context_id: int, rrefs: Sequence[RRef[Any]], kind: float) -> list[float]:
    """Return the norm of order ``kind`` of the gradient of each parameter that has one; runs on the owner."""
    gradients = recorder().contexts.get(context_id).gradients()
    found = [gradients.get(rref.local_value()) for rref in rrefs]
    return [torch.linalg.vector_norm(gradient, kind).item() for gradient in found if gradient is not None]


def scale_local(context_id: int, rrefs: Sequence[RRef[Any]], factor: float) -> None:
    """Multiply the context's gradients of these parameters by ``factor``; runs on the owner."""
    recorder().contexts.get(context_id).scale([rref.local_value() for rref in rrefs], factor)
