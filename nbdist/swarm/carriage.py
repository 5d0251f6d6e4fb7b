"""Extends the time limits of a swarm's calls by the time that large tensors need on a slow connection."""

from __future__ import annotations

import torch

_SLOWEST = 1_000_000  # bytes per second of the slowest connection for which the extra time is enough


def seconds_for(size: int) -> float:
    """Return the seconds that ``size`` bytes may take in one direction: 1 s for each MB, 0 for less than 1 MB."""
    return size / _SLOWEST if size >= _SLOWEST else 0.0


def carriage(*values: object) -> float:
    """Return the seconds to add to a call's time limit for these tensors: 2 s for each MB, 0 for less than 1 MB.

    This is the time to the server and back, if the result has the same size. It keeps a slow connection from looking
    like a server that hangs. Values that are not tensors do not count.
    """
    return 2 * seconds_for(sum(value.nbytes for value in values if isinstance(value, torch.Tensor)))
