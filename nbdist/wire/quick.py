"""Encodes the usual arguments and results without a pickler: atoms, with a few tensors and references among them.

A pickler that looks for tensors calls Python for every object that it meets, and it is itself an object with a buffer
and a memo, made anew for each message. That is most of the cost of a small call. Here, tensors and references are taken
out of the places where they usually are: the whole value, an item of it, or an argument of a call. Each such place
becomes a *hole*. The rest are atoms, which one call of C pickle encodes. In the message of a call of ``f``::

    ("module:f", (1, tensor, rref), {"scale": 2})             the value
    ("module:f", [1, None, None, 2], ("scale",))              the body, a pickle of atoms
    [(1, TENSOR, 0), (2, REFERENCE, 0)]                       the holes: place, kind, which one of that kind

The usual call and the usual result, with at most one small tensor, are encoded in one function each.
"""

from __future__ import annotations

import os
import pickle
import types
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from nbdist.errors import DecodeError, EncodeError
from nbdist.wire.devices import Devices
from nbdist.wire.encoded import NO_TENSORS, Encoded
from nbdist.wire.history import Attach, with_history
from nbdist.wire.messages import Fork, Hole, Payload
from nbdist.wire.pickling import definitions
from nbdist.wire.pickling.registered import Forker, reference_types
from nbdist.wire.tensors import Buffer, Lent, Space, TensorPacker, is_packable, pack_alone, unpack_alone, unpack_tensors

# The types that plain pickle carries, and that cannot refer to anything else.
ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_MOST_ITEMS = 64  # of a value or of a container in it; one with more is left to the general way

# The forms of values. `Payload.form` is one of them if the body has holes, else 0.
PLAIN, WHOLE, TUPLE, LIST, CALL, OTHER = range(6)

TENSOR, RECORDED, REFERENCE = 0, 1, 2  # the kinds of objects that belong in a hole
_WHOLE_TENSOR: Hole = (0, TENSOR, 0)  # the hole of a value that is one tensor

# ``NBDIST_USUAL=0`` turns `encode_usual_call`, `encode_usual_result` and `nbdist.wire.decoding.decode_early` off: tests
# use it to show that the general way gives the same results.
USUAL_IS_ON = os.environ.get("NBDIST_USUAL") != "0"


def form_of(value: Any, references: Collection[type]) -> int:
    """Return the form of ``value``: `PLAIN` if it has only atoms, `OTHER` if this module cannot encode it.

    A value that is itself a tensor or a reference is `WHOLE`. A tuple or list with tensors or references among atoms is
    `TUPLE` or `LIST`. A tuple of a name, a tuple and a dict, which are a call's function, arguments and keyword
    arguments, is `CALL`. ``references`` are the types that travel as forks. Only the first level is searched: a list
    within a list is `OTHER`, and so is a value of more than 64 items.
    """
    # The exact type everywhere: an instance of a subclass, such as a namedtuple, is more than its items.
    kind = type(value)
    if kind in ATOMS:
        return PLAIN
    if kind is tuple and len(value) == 3 and type(value[2]) is dict and type(value[1]) is tuple:
        name, items, kwargs = value
        if type(name) is not str or (kwargs and not all(type(key) is str for key in kwargs)):
            return OTHER
        if kwargs:
            items = (*items, *kwargs.values())
        form = CALL
    elif kind is tuple or kind is list:
        items, form = value, TUPLE if kind is tuple else LIST
    else:
        return WHOLE if kind in references or is_packable(value) else OTHER
    if len(items) > _MOST_ITEMS:
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
    """Return the items of ``value``, of the given `form_of`. A hole's place is an index into them.

    For a call, the items are its arguments, and then the values of its keyword arguments.
    """
    if form == CALL:
        return (*value[1], *value[2].values()) if value[2] else value[1]
    return (value,) if form == WHOLE else value


def leave_holes(value: Any, form: int, holes: Sequence[Hole]) -> bytes:
    """Return the pickle of ``value`` with None in place of each tensor and reference, which ``holes`` names."""
    if form == WHOLE:
        return b""
    rest = [*value[1], *value[2].values()] if form == CALL else list(value)
    for at, _, _ in holes:
        rest[at] = None
    # The keywords' names go separately, so that one number tells which argument a hole is.
    return pickle.dumps((value[0], rest, tuple(value[2])) if form == CALL else rest, 5)


def encode(
    value: Any, form: int, forker: Forker | None, record: bool, devices: Devices, space: Space | None
) -> Encoded:
    """Encode a ``value`` of the given ``form``; the other arguments are those of `nbdist.wire.encoding.encode`.

    Raises EncodeError for a reference without a ``forker``, and for a GPU tensor that has no device on the receiver.
    """
    holes: list[Hole] = []
    taken: list[torch.Tensor] = []
    # By ``id``: what occurs twice travels once, and is one object for the receiver, too.
    seen: dict[int, tuple[int, int]] = {}
    recorded: list[torch.Tensor] = []
    recorded_at: list[int] = []
    forks: list[Fork] = []
    requires_grad = False
    for at, item in enumerate(items_of(value, form)):
        kind = type(item)
        if kind in ATOMS:
            continue
        if (found := seen.get(id(item))) is None:
            if kind in reference_types:
                if forker is None:
                    raise EncodeError("cannot be sent: an RRef can only be sent in a call or its result")
                found = REFERENCE, len(forks)
                forks.append(forker.fork(item))
            else:
                found = TENSOR, len(taken)
                if record and item.requires_grad:
                    found = RECORDED, len(recorded)  # the index among the recorded tensors
                    recorded.append(item)
                    recorded_at.append(len(taken))
                elif item.requires_grad:
                    requires_grad = True
                taken.append(item)
            seen[id(item)] = found
        holes.append((at, found[0], found[1]))
    body = leave_holes(value, form, holes)
    # Most messages have one small tensor, which needs no bookkeeping of storages.
    alone = pack_alone(taken[0], bool(recorded), space) if len(taken) == 1 and devices.leave_cpu else None
    if alone is not None:
        meta, data = alone
        payload = Payload([(0, 0, len(data))], [meta], forks, recorded=recorded_at, form=form, holes=holes)
        return Encoded(payload, [body, data], recorded, requires_grad)
    packer = TensorPacker(devices, space)
    for index, tensor in enumerate(taken):
        packer.add(tensor.detach() if index in recorded_at else tensor)
    metas, where, frames = packer.pack()
    payload = Payload(where, metas, forks, recorded=recorded_at, places=packer.places, form=form, holes=holes)
    return Encoded(payload, [body, *frames], recorded, requires_grad, packer.slots)


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
    if not USUAL_IS_ON:
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
    # Take the tensor out, and leave a hole in its place.
    meta, data = alone
    rest = [*args, *kwargs.values()]
    rest[place] = None
    holes = [(place, TENSOR, 0)]
    payload = Payload([(0, 0, len(data))], [meta], definitions=needed, form=CALL, holes=holes)
    return payload, [pickle.dumps((name, rest, tuple(kwargs)), 5), data]


def encode_usual_result(value: Any, space: Space | None) -> tuple[Payload, list[Buffer]] | None:
    """Return the payload and frames of a usual result: an atom or one small tensor. None if it needs `encode`.

    The tensor does not require grad, and is too small for shared memory (``space``).
    """
    if not USUAL_IS_ON:
        return None
    if type(value) in ATOMS:
        return NO_TENSORS, [pickle.dumps(value, 5)]
    if type(value) is not torch.Tensor or value.requires_grad or (alone := pack_alone(value, False, space)) is None:
        return None
    meta, data = alone
    return Payload([(0, 0, len(data))], [meta], form=WHOLE, holes=[_WHOLE_TENSOR]), [b"", data]


def decode(
    payload: Payload,
    frames: Sequence[bytes],
    leased: Sequence[Buffer | Lent],
    references: Sequence[Any],
    attach: Attach,
) -> Any:
    """Return the value in ``frames``, which `encode` made. ``leased`` is the shared memory that came with the message.

    Raises DecodeError for a form that this version does not know, and the errors of `unpack_tensors`.
    """
    metas, where, data = payload.tensors, payload.buffers, frames[1:]
    alone = unpack_alone(metas[0], where, data) if len(metas) == 1 else None
    tensors = [alone] if alone is not None else unpack_tensors(metas, where, data, leased)
    recorded = with_history([tensors[place] for place in payload.recorded], attach) if payload.recorded else ()
    # The kinds TENSOR, RECORDED, REFERENCE are the indices into this tuple.
    found = (tensors, recorded, references)
    form, holes = payload.form, payload.holes
    if form == WHOLE:
        _, kind, index = holes[0]
        return found[kind][index]
    if form == CALL:
        name, rest, keys = pickle.loads(frames[0])
    else:
        rest = pickle.loads(frames[0])
    for at, kind, index in holes:
        rest[at] = found[kind][index]
    if form == CALL:
        # The last values belong to the keywords.
        count = len(rest) - len(keys)
        return name, tuple(rest[:count]), dict(zip(keys, rest[count:], strict=True))
    if form == TUPLE:
        return tuple(rest)
    if form == LIST:
        return rest
    raise DecodeError(
        f"the message's body has form {form}, which this version of nbdist does not know: its sender has another "
        "version. Install the same version everywhere"
    )
