"""What is too large for one message: it goes in pieces, so that a slow line does not keep all else from passing.

That holds for hidden states and their gradients. What is pushed goes in `pieces` of some tokens each. What comes along
with a request, or with its answer, is left where it is, and whoever is told of it fetches it (`leave`, `fetch`).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import torch

from nbdist.rpc.futures import Future
from nbdist.rpc.rref import RRef

__all__ = ["Left", "fetch", "leave", "pieces"]

_PIECE = 4 << 20
"""Bytes of a tensor in one message."""
_AHEAD = 2
"""So many pieces are asked for at a time."""


class Left(NamedTuple):
    """A tensor that is still where it was made."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    flat: RRef[torch.Tensor]


def leave(value: Any) -> Any:
    """What to send for a value: it, or, if it is a large tensor, where that is; of a tuple, for each of it."""
    if type(value) is tuple:
        return tuple(map(leave, value))
    if not isinstance(value, torch.Tensor):
        return value
    if min(value.nbytes, value.untyped_storage().nbytes()) <= _PIECE:  # the latter, of one that is expanded
        return value
    flat: RRef[torch.Tensor] = RRef(value.detach().reshape(-1))
    return Left(tuple(value.shape), value.dtype, flat)


def fetch(value: Any, timeout: float) -> Any:
    """The value, if that was sent; else what has been left, each piece of which must come in time."""
    if type(value) is tuple:
        return tuple(fetch(each, timeout) for each in value)
    if not isinstance(value, Left):
        return value
    found = torch.empty(math.prod(value.shape), dtype=value.dtype)
    size = max(1, _PIECE // found.element_size())
    asked: deque[tuple[torch.Tensor, Future[torch.Tensor]]] = deque()
    for place in found.split(size):
        begin = place.storage_offset()
        asked.append((place, value.flat.rpc_async(timeout).narrow(0, begin, len(place))))
        if len(asked) == _AHEAD:
            _enter(*asked.popleft())
    while asked:
        _enter(*asked.popleft())
    return found.view(value.shape)


def _enter(place: torch.Tensor, piece: Future[torch.Tensor]) -> None:
    try:
        place.copy_(piece.wait())
    finally:
        del piece  # or its error, by its traceback and this frame, would hold itself


def pieces(hidden: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Hidden states in parts that are small enough for a message each, with the first token of each part."""
    count = hidden.shape[1]
    size = max(1, _PIECE * count // max(1, hidden.nbytes))
    return [(at, hidden[:, at : at + size]) for at in range(0, count, size)] if count > size else [(0, hidden)]
