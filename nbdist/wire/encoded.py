"""A value as frames, and the header that describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nbdist.wire.messages import Payload
from nbdist.wire.tensors import Buffer, Slot

__all__ = ["NO_TENSORS", "Encoded"]

NO_TENSORS = Payload()
"""Describes a body that is a pickle of atoms, with nothing beside it."""


class Encoded(NamedTuple):
    """A value as it travels: the header's part, and the frames behind it."""

    payload: Payload
    frames: list[Buffer]
    recorded: Sequence[torch.Tensor] = ()
    """The tensors, in order, whose gradients are to come back."""
    requires_grad: bool = False
    """Whether there are tensors that require grad, and are not recorded."""
    slots: Sequence[Slot] = ()
    """What lies in shared memory: to be kept until it is sent."""
    named: Sequence[tuple[str, str]] = ()
    """The definitions of ``__main__`` that the receiver has to have; others have been put in."""
