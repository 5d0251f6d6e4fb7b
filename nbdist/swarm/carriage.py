"""The time that large tensors may take on their way between a client and a server of a swarm, on a slow connection."""

from __future__ import annotations

import torch

__all__ = ["carriage", "seconds_for"]

_SLOWEST = 1_000_000
"""Bytes in a second on the slowest connection on which nobody is given up for being late."""


def seconds_for(size: int) -> float:
    """Return the seconds that ``size`` bytes may take one way: 1 s for each MB, 0 for less than 1 MB."""
    return size / _SLOWEST if size >= _SLOWEST else 0.0


def carriage(*values: object) -> float:
    """Return the seconds to add to a call's time limit for these tensors: 2 s for each MB, 0 for less than 1 MB.

    They are for the way to the server and, with a result of the same size, back. So a slow connection is not taken for
    a server that hangs. Values that are no tensors do not count.
    """
    return 2 * seconds_for(sum(value.nbytes for value in values if isinstance(value, torch.Tensor)))
