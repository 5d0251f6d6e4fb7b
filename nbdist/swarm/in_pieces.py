"""Sends large hidden states and gradients in pieces, so that other messages can pass them on a slow connection.

Hidden states that are pushed go in `pieces` of some tokens each. A large tensor in a request or in its answer stays
with its sender (`leave`), which sends a `Left` instead; the receiver fetches the tensor piece by piece (`fetch`).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import torch

from nbdist.rpc.futures import Future
from nbdist.rpc.references.rref import RRef

__all__ = ["Left", "fetch", "leave", "pieces"]

_PIECE_BYTES = 4 << 20
"""Bytes of a tensor that one message may have."""
_PIECES_REQUESTED = 2
"""The number of pieces that are requested at a time."""


class Left(NamedTuple):
    """A tensor that has stayed with its sender: its shape and type, and a reference to its values in one dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    flat: RRef[torch.Tensor]


def leave(value: Any) -> Any:
    """Return what to send for a value: a `Left` for a large tensor, else the value; for a tuple, one by one.

    A tensor of more than 4 MiB is large. The receiver fetches the values of a `Left` in pieces (`fetch`); the tensor is
    kept as long as the `Left` lives.
    """
    if type(value) is tuple:
        return tuple(map(leave, value))
    if not isinstance(value, torch.Tensor):
        return value
    if (
        min(value.nbytes, value.untyped_storage().nbytes()) <= _PIECE_BYTES
    ):  # an expanded tensor has the smaller storage
        return value
    flat: RRef[torch.Tensor] = RRef(value.detach().reshape(-1))
    return Left(tuple(value.shape), value.dtype, flat)


def fetch(value: Any, timeout: float) -> Any:
    """Return the value for which `leave` returned ``value``, fetching a large tensor from its sender in pieces.

    Raises RpcTimeout if a piece takes longer than ``timeout`` seconds, WorkerLost or RRefError if the sender is gone.
    """
    if type(value) is tuple:
        return tuple(fetch(each, timeout) for each in value)
    if not isinstance(value, Left):
        return value
    found = torch.empty(math.prod(value.shape), dtype=value.dtype)
    size = max(1, _PIECE_BYTES // found.element_size())  # elements in one piece
    asked: deque[tuple[torch.Tensor, Future[torch.Tensor]]] = deque()
    for place in found.split(size):
        begin = place.storage_offset()
        asked.append((place, value.flat.rpc_async(timeout).narrow(0, begin, len(place))))
        if len(asked) == _PIECES_REQUESTED:
            _put_in_place(*asked.popleft())
    while asked:
        _put_in_place(*asked.popleft())
    return found.view(value.shape)


def _put_in_place(place: torch.Tensor, piece: Future[torch.Tensor]) -> None:
    """Wait for a piece and copy it to its place in the whole tensor. Raises the error of the call for the piece."""
    try:
        place.copy_(piece.wait())
    finally:
        del piece  # otherwise its error, whose traceback has this frame, would refer to itself


def pieces(hidden: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Split hidden states by tokens into parts that are small enough for one message; return (first token, part)s.

    Each part goes in a message of its own; a small tensor is one part, with first token 0.
    """
    count = hidden.shape[1]
    # Tokens in one piece. A piece has all sequences of the batch, so one token may exceed the limit: it goes alone.
    size = max(1, _PIECE_BYTES * count // max(1, hidden.nbytes))
    return [(at, hidden[:, at : at + size]) for at in range(0, count, size)] if count > size else [(0, hidden)]
