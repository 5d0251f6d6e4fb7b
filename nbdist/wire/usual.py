"""Encodes the usual call and the usual result, each in one function: atoms, and one small tensor at most.

What comes out is decoded like any other value (`nbdist.wire.quick`).
"""

from __future__ import annotations

import os
import pickle
import types
from collections.abc import Collection
from typing import Any

import torch

from nbdist.wire import definitions, quick
from nbdist.wire.encoded import NO_TENSORS
from nbdist.wire.messages import Hole, Payload
from nbdist.wire.quick import ATOMS
from nbdist.wire.tensors import Buffer, Space, pack_alone

__all__ = ["IS_ON", "encode_usual_call", "encode_usual_result"]

IS_ON = os.environ.get("NBDIST_USUAL") != "0"
"""Whether usual messages are encoded and decoded in the short way. ``NBDIST_USUAL=0`` has all take the general one:
with it the tests show that both ways do the same."""

_WHOLE: Hole = (0, quick.TENSOR, 0)


def encode_usual_call(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    space: Space | None,
    known: Collection[str] = (),
    lacking: Collection[str] = (),
) -> tuple[Payload, list[Buffer]] | None:
    """Return the payload and frames of a call as most are, with atoms and one small tensor.

    ``function`` is a name, or a function of ``__main__`` whose digest is ``known`` to the receiver, and not
    ``lacking`` there. Such a function is not in the body, which has None in its place: the payload names it.

    Returns None where the call needs `encode`. What comes out of a call by name is what `encode` would make of it.
    """
    if not IS_ON:
        return None
    name, needed = function, list[tuple[str, str]]()
    if type(function) is not str:
        if type(function) is not types.FunctionType or not known:
            return None
        own = definitions.name_and_digest(function)
        if own is None or own[1] not in known or own[1] in lacking:
            return None
        name, needed = None, [own]
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
        payload = Payload(definitions=needed) if needed else NO_TENSORS
        return payload, [pickle.dumps((name, args, kwargs), 5)]
    if tensor.requires_grad or (alone := pack_alone(tensor, False, space)) is None:
        return None
    meta, data = alone
    rest = [*args, *kwargs.values()]
    rest[place] = None
    holes = [(place, quick.TENSOR, 0)]
    payload = Payload([(0, 0, len(data))], [meta], definitions=needed, form=quick.CALL, holes=holes)
    return payload, [pickle.dumps((name, rest, tuple(kwargs)), 5), data]


def encode_usual_result(value: Any, space: Space | None) -> tuple[Payload, list[Buffer]] | None:
    """Return the payload and frames of a result as most are, an atom or one small tensor, else None.

    What comes out is what `encode` would make of the value.
    """
    if not IS_ON:
        return None
    if type(value) in ATOMS:
        return NO_TENSORS, [pickle.dumps(value, 5)]
    if type(value) is not torch.Tensor or value.requires_grad or (alone := pack_alone(value, False, space)) is None:
        return None
    meta, data = alone
    return Payload([(0, 0, len(data))], [meta], form=quick.WHOLE, holes=[_WHOLE]), [b"", data]
