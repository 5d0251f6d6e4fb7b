"""Encodes the usual call and the usual result, each in one function: atoms, and at most one small tensor.

The frames are decoded like those of any other value (`nbdist.wire.quick`).
"""

from __future__ import annotations

import os
import pickle
import types
from collections.abc import Collection
from typing import Any

import torch

from nbdist.wire import quick
from nbdist.wire.encoded import NO_TENSORS
from nbdist.wire.messages import Hole, Payload
from nbdist.wire.pickling import definitions
from nbdist.wire.quick import ATOMS
from nbdist.wire.tensors import Buffer, Space, pack_alone

# ``NBDIST_USUAL=0`` turns these functions off: tests use it to show that the general way gives the same results.
IS_ON = os.environ.get("NBDIST_USUAL") != "0"

_WHOLE: Hole = (0, quick.TENSOR, 0)  # the hole of a result that is one tensor


def encode_usual_call(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    space: Space | None,
    known: Collection[str] = (),
    lacking: Collection[str] = (),
) -> tuple[Payload, list[Buffer]] | None:
    """Return the payload and frames of a usual call: atoms and at most one small tensor. None if it needs `encode`.

    The tensor is a positional argument, does not require grad, and is too small for shared memory (``space``).
    ``function`` is a name, or a function of ``__main__`` whose digest is ``known`` to the receiver, and not ``lacking``
    there.
    """
    # For a call by name with up to 64 arguments, the bytes must be those of `encode` (`tests/wire/test_codec.py`).
    if not IS_ON:
        return None
    name, needed = function, list[tuple[str, str]]()
    if type(function) is not str:
        if type(function) is not types.FunctionType or not known:
            return None
        own = definitions.name_and_digest(function)
        if own is None or own[1] not in known or own[1] in lacking:
            return None
        name, needed = None, [own]  # the body has None in the function's place, and the payload names it
    # Find the one argument that is not an atom, if there is one.
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
    # Take the tensor out, and leave a hole in its place (`nbdist.wire.quick`).
    meta, data = alone
    rest = [*args, *kwargs.values()]
    rest[place] = None
    holes = [(place, quick.TENSOR, 0)]
    payload = Payload([(0, 0, len(data))], [meta], definitions=needed, form=quick.CALL, holes=holes)
    return payload, [pickle.dumps((name, rest, tuple(kwargs)), 5), data]


def encode_usual_result(value: Any, space: Space | None) -> tuple[Payload, list[Buffer]] | None:
    """Return the payload and frames of a usual result: an atom or one small tensor. None if it needs `encode`.

    The tensor does not require grad, and is too small for shared memory (``space``).
    """
    if not IS_ON:
        return None
    if type(value) in ATOMS:
        return NO_TENSORS, [pickle.dumps(value, 5)]
    if type(value) is not torch.Tensor or value.requires_grad or (alone := pack_alone(value, False, space)) is None:
        return None
    meta, data = alone
    return Payload([(0, 0, len(data))], [meta], form=quick.WHOLE, holes=[_WHOLE]), [b"", data]
