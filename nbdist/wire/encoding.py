"""Encodes values as frames, in the cheapest way that can carry the value.

====================================  ======================================================
value                                 way
====================================  ======================================================
atoms, also in containers             one call of C pickle
tensors, references, atoms            `nbdist.wire.quick`: a pickle of atoms, with holes
tensors and atoms in containers       `_TensorPickler`: a pickler that looks for tensors only
any other value                       `nbdist.wire.pickling.pickler`
====================================  ======================================================
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Sequence
from typing import Any

import torch

from nbdist import torch_private
from nbdist.errors import EncodeError, NbdistError
from nbdist.wire import quick
from nbdist.wire.devices import CPU_ONLY, Devices
from nbdist.wire.encoded import NO_TENSORS, Encoded
from nbdist.wire.messages import Payload
from nbdist.wire.pickling import culprit
from nbdist.wire.pickling.pickler import Pickler, ValueWanted
from nbdist.wire.pickling.registered import Forker, reference_types
from nbdist.wire.quick import ATOMS, MOST_ITEMS
from nbdist.wire.tensors import Buffer, Space, TensorPacker, is_packable

torch_private.load_layouts()


def encode(
    value: Any,
    *,
    by_value: bool = False,
    lacking: Collection[str] = (),
    known: Collection[str] = (),
    forker: Forker | None = None,
    devices: Devices = CPU_ONLY,
    record: bool = False,
    space: Space | None = None,
) -> Encoded:
    """Return the frames that carry ``value`` to another agent, and the header that describes them.

    If there is a ``space``, shared memory that the receiver can read, large storages go there. ``by_value`` puts the
    definitions of ``__main__`` into the message along with their names, except those whose digests are ``known`` to the
    receiver. If the receiver is ``lacking`` a definition that the value names, the whole message is encoded by value.
    Without a ``forker``, a reference cannot be sent. With ``record``, tensors that require grad are marked, so that
    `decode` joins them to the receiver's graph.

    Raises EncodeError for a value that cannot be sent. Its text begins with a verb; callers put a noun before it.
    """
    # The cheapest way first. Each check inspects the value only as far as it must.
    form = quick.form_of(value, reference_types)
    simplicity = _simplicity(value, record) if form == quick.OTHER else _TENSORS
    if form == quick.PLAIN or simplicity == _PLAIN:
        return Encoded(NO_TENSORS, [pickle.dumps(value, 5)])
    body, out_of_band = io.BytesIO(), list[Buffer]()
    places: list[int] = []
    odd: list[Buffer] = []
    try:
        if form != quick.OTHER:
            return quick.encode(value, form, forker, record, devices, space)
        packer = TensorPacker(devices, space)
        if simplicity == _TENSORS:
            # Tensors in containers, and nothing else that needs care.
            few = _TensorPickler(body, packer, record)
            few.dump(value)
            tensors, where, frames = packer.pack()
            payload = Payload(where, tensors, recorded=few.places, places=packer.places)
            return Encoded(payload, [body.getvalue(), *frames], few.recorded, slots=packer.slots)
        # Anything else.
        pickler = Pickler(body, out_of_band, packer, forker, by_value, record)
        pickler.lacking, pickler.known = lacking, known
        pickler.dump(value)
        if pickler.recorded:
            places = _pack_recorded(pickler.recorded, packer, odd)
        tensors, where, frames = packer.pack()
    except ValueWanted:
        if forker is not None:
            forker.take_back()  # the second attempt may find other references, if reducers make them
        return encode(value, by_value=True, forker=forker, devices=devices, record=record, space=space)
    except NbdistError:
        raise
    except Exception as error:  # whatever a reducer raises, the user's or a library's: the value cannot be sent
        raise EncodeError(f"cannot be sent: {culprit.reason(error)}") from error
    payload = Payload(where, tensors, pickler.forks, pickler.plain, pickler.definitions, places, packer.places)
    # `decode` relies on this order of the frames. On arrival, the storages in shared memory are added at the end.
    all_frames = [body.getvalue(), *frames, *odd, *out_of_band]
    warn = pickler.requires_grad and not record
    return Encoded(payload, all_frames, pickler.recorded, warn, packer.slots, pickler.named)


# The answers of `_simplicity`: a value needs `Pickler`, `_TensorPickler`, or plain pickle.
_COMPLEX, _TENSORS, _PLAIN = range(3)


def _simplicity(value: Any, record: bool, depth: int = 4) -> int:
    """Return which pickler ``value`` needs: `_PLAIN`, `_TENSORS` or `_COMPLEX`.

    `_PLAIN` values are atoms (None, bool, int, float, str, bytes) in tuples, lists and dicts. `_TENSORS` values have
    tensors among these. Containers of more than 64 items, or more than ``depth`` deep, are `_COMPLEX`, and so is a
    tensor that requires grad, unless ``record``.
    """
    kind = type(value)
    if kind in ATOMS:
        return _PLAIN
    if kind is torch.Tensor:
        return _TENSORS if is_packable(value) and (record or not value.requires_grad) else _COMPLEX
    if kind is dict:
        value = [*value, *value.values()]
    elif kind is not tuple and kind is not list:
        return _COMPLEX
    if not depth or len(value) > MOST_ITEMS:  # the depth also ends the search in a list that contains itself
        return _COMPLEX
    simplest = _PLAIN
    for item in value:
        if type(item) not in ATOMS:
            simplest = min(simplest, _simplicity(item, record, depth - 1))
    return simplest


class _TensorPickler(pickle.Pickler):
    """Pickles tensors and atoms in containers, with fewer checks than `nbdist.wire.pickling.pickler`."""

    def __init__(self, file: io.BytesIO, packer: TensorPacker, record: bool) -> None:
        """Pickle into ``file``; tensors go to ``packer``. With ``record``, those that require grad go to `recorded`."""
        super().__init__(file, protocol=5)
        self.recorded: list[torch.Tensor] = []
        self.places: list[int] = []  # the index of each recorded tensor among the message's tensors
        self._recorded_at: dict[int, int] = {}  # by ``id``: `recorded` keeps the tensors alive
        self._packer = packer
        self._record = record

    def persistent_id(self, obj: Any) -> int | None:
        """Return a tensor's index in the message, for tensors in `recorded` -1, -2, …; None for other objects."""
        if type(obj) is not torch.Tensor:
            return None
        if not self._record or not obj.requires_grad:
            return self._packer.add(obj)
        if (index := self._recorded_at.get(id(obj))) is None:
            index = self._recorded_at[id(obj)] = len(self.recorded)
            self.recorded.append(obj)
            self.places.append(self._packer.add(obj.detach()))
        return -1 - index


def _pack_recorded(tensors: Sequence[torch.Tensor], packer: TensorPacker, frames: list[Buffer]) -> list[int]:
    """Add the data of tensors that are sent in an autograd context to the message; return their indices in it.

    Tensors that cannot be packed, such as sparse ones, go together into the *odd* frame, a pickle that is added to
    ``frames``. Their indices are -1, -2, …
    """
    places: list[int] = []
    odd: list[torch.Tensor] = []
    for tensor in tensors:
        # Without its history, which the receiver makes anew.
        data = tensor.detach()
        if is_packable(data):
            places.append(packer.add(data))
        else:
            odd.append(data)
            places.append(-len(odd))
    if odd:
        body = io.BytesIO()
        Pickler(body, [], packer, None, False).dump(odd)
        frames.append(body.getvalue())
    return places
