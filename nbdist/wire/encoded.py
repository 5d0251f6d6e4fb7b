"""An encoded value: its frames, and the header that describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nbdist.wire.messages import Payload
from nbdist.wire.tensors import Buffer, Slot

# Describes a body that is one plain pickle of atoms and built-in containers, with no frames after it.
NO_TENSORS = Payload()


class Encoded(NamedTuple):
    """A value in the form in which it travels: its part of the header, and the frames after the envelope."""

    payload: Payload
    frames: list[Buffer]
    recorded: Sequence[torch.Tensor] = ()  # the tensors whose gradients will come back, in the order of their gradients
    requires_grad: bool = False  # True if there are tensors that require grad and are not recorded
    slots: Sequence[Slot] = ()  # copies of storages in shared memory, to be kept until the message is sent
    # The definitions of ``__main__`` that the receiver needs, by name and digest; the body has only their names.
    named: Sequence[tuple[str, str]] = ()
