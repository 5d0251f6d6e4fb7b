"""The time that large tensors may take on their way to a server of a swarm and back, on a slow connection."""

from __future__ import annotations

import torch

__all__ = ["carriage"]

_SLOWEST = 1_000_000
"""Bytes in a second on the slowest connection on which a server is not given up for being late."""


def carriage(*values: object) -> float:
    """Return the seconds to add to a call's time limit for these tensors: 2 s for each MB, 0 for less than 1 MB.

    They are for the way to the server and, with a result of the same size, back. So a slow connection is not taken for
    a server that hangs. Values that are no tensors do not count.
    """
    size = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    return 2 * size / _SLOWEST if size >= _SLOWEST else 0.0
