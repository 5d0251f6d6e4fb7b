"""Fill this process's table of open files, and free it again: what workers run for the tests of that."""

from __future__ import annotations

import os
import resource

import torch

from nbdist.rpc.api import current_agent

_LIMIT = 400
_held: list[int] = []
_limit_before: tuple[int, int] | None = None


def fill() -> int:
    """Open files until this process may open no more. Returns how many this took.

    Shared memory that this process has mapped is mapped anew when it is next needed, which takes a file.
    """
    global _limit_before
    current_agent().sharing._leases._segments.clear()
    _limit_before = _limit_before or resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_LIMIT, _limit_before[1]))
    try:
        while True:
            _held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    return len(_held)


def free() -> None:
    """Close what `fill` opened."""
    while _held:
        os.close(_held.pop())
    if _limit_before is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, _limit_before)


def total(tensor: torch.Tensor) -> float:
    """Return the sum of a tensor that came."""
    return float(tensor.sum())


def ones(count: int) -> torch.Tensor:
    """Return a tensor that may be large enough to travel in shared memory."""
    return torch.ones(count)


def grow(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor, made of the one that came."""
    return tensor * 2
