"""Starts a new autograd graph at the input of a stage, and catches the gradients of that input.

::

    stage 0's graph ── output ── detached, sent ──> _Entry ── stage 1's graph ── output
                          ^                            │
                          └── gradient, sent back <────┘  backward of stage 1 stores it in a list

Each stage runs backward by itself, so a stage's graph must end where the values enter it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd import Function

from nbdist.errors import UsageError
from nbdist.nn.batches import Values, wants_grad


class _Entry(Function):
    """The autograd node by which a tensor enters a stage."""

    # It gives the tensor a history. So a module may change it in place; autograd forbids this for a leaf that
    # requires grad.
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, gradients: list[torch.Tensor | None], index: int, tensor: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the one tensor of the list ``tensor`` unchanged; `backward` stores its gradient in ``gradients``."""
        # The list hides the tensor from autograd, which would make a view of an input that is returned unchanged. The
        # anchor is the input that requires grad.
        ctx.gradients, ctx.index = gradients, index
        return tensor[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        ctx.gradients[ctx.index] = gradient
        return None, None, None, None


_anchor = torch.zeros((), device="cpu", requires_grad=True)  # also where torch has another default device
_entered: Any = _Entry.apply


def enter(values: Values, wanted: int) -> tuple[Values, list[torch.Tensor | None]]:
    """Return the arguments to call a stage with, and a list that the backward pass fills with their gradients."""
    # Bit ``i`` of ``wanted`` says whether value ``i`` gets a gradient; the list has None for the other values. If the
    # same tensor object occurs twice, the list has the sum at its first place, and None at the second.
    gradients: list[torch.Tensor | None] = [None] * len(values)
    entered: dict[int, torch.Tensor] = {}
    found = list(values)
    for index, value in enumerate(values):
        if wanted >> index & 1:
            # A tensor that the previous stage returned twice enters once: an in-place change must be seen in both
            # places. Two tensors that share memory are different nodes of the previous stage's graph, such as the
            # input and the output of a gradient reversal, and have gradients of their own.
            if id(value) not in entered:
                entered[id(value)] = _entered(_anchor, gradients, index, [value])
            found[index] = entered[id(value)]
    return tuple(found), gradients


class SharedInputs:
    """The inputs of a stage that share memory with another input, and get gradients. No stage may change these.

    After such a change autograd would have to compute the gradient of the one from that of the other. In one process
    it can; here each input begins a graph of its own.
    """

    def __init__(self, values: Values, copies: Mapping[int, torch.Tensor] | None = None) -> None:
        """Find such inputs; ``copies``, by the ids of the values, are what the stage gets in place of the values."""
        by_storage: dict[int, dict[int, torch.Tensor]] = {}
        for value in values:
            if wants_grad(value) and value.layout == torch.strided and not value.is_nested and value.numel():
                by_storage.setdefault(value.untyped_storage().data_ptr(), {})[id(value)] = value
        self._groups: list[list[tuple[torch.Tensor, torch.Tensor, int]]] = []
        for group in by_storage.values():
            if len(group) > 1:
                given = [(value, value if copies is None else copies[id(value)]) for value in group.values()]
                self._groups.append([(value, each, each._version) for value, each in given])

    def check(self) -> None:
        """Raise UsageError if one of them has been changed in place since this object was made."""
        for group in self._groups:
            is_changed = any(given._version != version for _, given, version in group)
            pairs = itertools.combinations((value for value, _, _ in group), 2)
            if is_changed and any(itertools.starmap(_overlap, pairs)):  # two columns of a matrix share no element
                raise UsageError(
                    "this stage changes one of its inputs in place, and the stage before it returned another tensor "
                    "that shares its memory (such as a view). Return a clone() of one of the two"
                )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common."""
    if one.dtype != other.dtype:  # not compared: it counts as an overlap
        return True
    taken = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())
