"""The usual arguments and results, without a pickler's machinery: atoms, and some tensors and references among them.

A pickler that looks for tensors calls Python for every object that it meets, and is itself an object with a buffer
and a memo, to be made for each message; of a small call that is the larger part. Here what needs more than a pickle is
taken out of the places where it usually is: it is the whole value, or an item of it, or an argument of a call. What
is left, with a hole in each of these places, are atoms, which one call of C pickles.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from nbdist.errors import DecodeError
from nbdist.wire.messages import Hole
from nbdist.wire.tensors import is_packable

__all__ = [
    "ATOMS",
    "CALL",
    "LIST",
    "OTHER",
    "PLAIN",
    "RECORDED",
    "REFERENCE",
    "TENSOR",
    "TUPLE",
    "WHOLE",
    "fill",
    "form_of",
    "is_tensor",
    "leave_holes",
]

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_FEW = 64


PLAIN, WHOLE, TUPLE, LIST, CALL, OTHER = range(6)
"""The forms of values. A payload has one of them if there are holes in its body, and else 0."""

TENSOR, RECORDED, REFERENCE = 0, 1, 2
"""What belongs in a hole."""


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a plain tensor, or a parameter."""
    kind = type(value)
    return kind is torch.Tensor or kind is torch.nn.Parameter


def form_of(value: Any, references: Collection[type]) -> int:
    """How to look at ``value``: `PLAIN` where there are atoms only, `OTHER` where it is not of the usual kind."""
    kind = type(value)
    if kind in ATOMS:
        return PLAIN
    if kind is tuple and len(value) == 3 and type(value[2]) is dict and type(value[1]) is tuple:
        name, items, kwargs = value
        if type(name) is not str:
            return OTHER
        if kwargs:
            if not all(type(key) is str for key in kwargs):
                return OTHER
            items = (*items, *kwargs.values())
        form = CALL
    elif kind is tuple or kind is list:
        items, form = value, TUPLE if kind is tuple else LIST
    else:
        return WHOLE if kind in references or is_packable(value) else OTHER
    if len(items) > _FEW:
        return OTHER
    found = PLAIN
    for item in items:
        kind = type(item)
        if kind not in ATOMS:
            if kind not in references and not is_packable(item):
                return OTHER
            found = form
    return found


def items_of(value: Any, form: int) -> Iterable[Any]:
    """What may have to be replaced in ``value``, in the order of the holes' numbers."""
    if form == CALL:
        return (*value[1], *value[2].values()) if value[2] else value[1]
    return (value,) if form == WHOLE else value


def leave_holes(value: Any, form: int, holes: Sequence[Hole]) -> bytes:
    """The pickle of ``value`` with nothing in the places of the holes."""
    if form == WHOLE:
        return b""
    if form == CALL:
        name, args, kwargs = value
        rest = [*args, *kwargs.values()] if kwargs else [*args]
        for at, _, _ in holes:
            rest[at] = None
        return pickle.dumps((name, rest, tuple(kwargs)), 5)
    rest = list(value)
    for at, _, _ in holes:
        rest[at] = None
    return pickle.dumps(rest, 5)


def fill(body: bytes, form: int, holes: Sequence[Hole], found: Sequence[Sequence[Any]]) -> Any:
    """The value whose pickle is ``body``; what belongs in its holes is in ``found``, by kind."""
    if form == WHOLE:
        _, kind, index = holes[0]
        return found[kind][index]
    if form == CALL:
        name, rest, keys = pickle.loads(body)
    else:
        rest = pickle.loads(body)
    for at, kind, index in holes:
        rest[at] = found[kind][index]
    if form == CALL:
        if not keys:
            return name, tuple(rest), {}
        count = len(rest) - len(keys)
        return name, tuple(rest[:count]), dict(zip(keys, rest[count:], strict=True))
    if form == TUPLE:
        return tuple(rest)
    if form == LIST:
        return rest
    raise DecodeError(f"there are no values of form {form}")
