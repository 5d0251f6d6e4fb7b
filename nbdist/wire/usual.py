"""Encodes the usual call and the usual result, each in one function: atoms, and one small tensor at most.

What comes out is decoded like any other value (`nbdist.wire.quick`).
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from nbdist.wire import quick
from nbdist.wire.encoded import NO_TENSORS
from nbdist.wire.messages import Hole, Payload
from nbdist.wire.quick import ATOMS
from nbdist.wire.tensors import Buffer, Space, is_packable, pack_alone

__all__ = ["encode_usual_call", "encode_usual_result"]

_WHOLE: Hole = (0, quick.TENSOR, 0)


def encode_usual_call(
    name: Any, args: tuple[Any, ...], kwargs: dict[str, Any], space: Space | None
) -> tuple[Payload, list[Buffer]] | None:
    """Return the payload and frames of a call as most are, by the function's name, with atoms and one small tensor.

    Returns None where the call needs `encode`. What comes out is what `encode` would make of the call.
    """
    if type(name) is not str:
        return None
    tensor, place = None, 0
    for at, value in enumerate(args):
        if type(value) not in ATOMS:
            if tensor is not None or type(value) is not torch.Tensor:
                return None
            tensor, place = value, at
    for value in kwargs.values():
        if type(value) not in ATOMS:
            return None
    if tensor is None:
        return NO_TENSORS, [pickle.dumps((name, args, kwargs), 5)]
    if tensor.requires_grad or not is_packable(tensor) or (alone := pack_alone(tensor, False, space)) is None:
        return None
    meta, data = alone
    rest = [*args, *kwargs.values()]
    rest[place] = None
    payload = Payload([(0, 0, len(data))], [meta], form=quick.CALL, holes=[(place, quick.TENSOR, 0)])
    return payload, [pickle.dumps((name, rest, tuple(kwargs)), 5), data]


def encode_usual_result(value: Any, space: Space | None) -> tuple[Payload, list[Buffer]] | None:
    """Return the payload and frames of a result as most are, an atom or one small tensor, else None.

    What comes out is what `encode` would make of the value.
    """
    if type(value) in ATOMS:
        return NO_TENSORS, [pickle.dumps(value, 5)]
    if type(value) is not torch.Tensor or value.requires_grad or not is_packable(value):
        return None
    alone = pack_alone(value, False, space)
    if alone is None:
        return None
    meta, data = alone
    return Payload([(0, 0, len(data))], [meta], form=quick.WHOLE, holes=[_WHOLE]), [b"", data]
