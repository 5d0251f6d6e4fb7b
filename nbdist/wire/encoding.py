"""Encodes values as frames: by the shortest way that can carry the value.

=============================  ======================================================
value                          way
=============================  ======================================================
atoms                          one call of C pickle
tensors, references, atoms     `nbdist.wire.quick`: a pickle of atoms, with holes
the same in containers         `nbdist.wire.few_tensors`: a pickler that sees tensors
anything else                  `nbdist.wire.pickler`
=============================  ======================================================
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from nbdist import torch_private
from nbdist.errors import EncodeError, NbdistError
from nbdist.wire import few_tensors, quick
from nbdist.wire.encoded import NO_TENSORS, Encoded
from nbdist.wire.few_tensors import TensorPickler
from nbdist.wire.messages import Payload
from nbdist.wire.pickler import Pickler, ValueWanted
from nbdist.wire.registered import Forker, reference_types
from nbdist.wire.tensors import Buffer, Space, TensorPacker, is_packable

__all__ = ["encode"]

torch_private.load_layouts()


def encode(
    value: Any,
    *,
    by_value: bool = False,
    lacking: Collection[str] = (),
    known: Collection[str] = (),
    forker: Forker | None = None,
    devices: Mapping[str, str] | None = None,
    receiver: str = "",
    record: bool = False,
    space: Space | None = None,
) -> Encoded:
    """Frames for ``value``, but for what goes into ``space``, shared memory that the receiver can read.

    ``by_value`` sends the definitions of ``__main__`` along with their names, but for those whose digests are
    ``known`` to the receiver; one that is ``lacking`` there makes it so for the whole message. With ``record``,
    tensors that require grad are marked, for `decode` to have them attached to the receiver's graph.
    """
    form = quick.form_of(value, reference_types)
    simplicity = few_tensors.simplicity(value, record) if form == quick.OTHER else few_tensors.TENSORS
    if form == quick.PLAIN or simplicity == few_tensors.PLAIN:
        return Encoded(NO_TENSORS, [pickle.dumps(value, 5)])
    body, out_of_band = io.BytesIO(), list[Buffer]()
    places: list[int] = []
    odd: list[Buffer] = []
    try:
        if form != quick.OTHER:
            return quick.encode(value, form, forker, record, devices, receiver, space)
        packer = TensorPacker(devices, receiver, space)
        if simplicity == few_tensors.TENSORS:
            few = TensorPickler(body, packer, record)
            few.dump(value)
            tensors, where, frames = packer.pack()
            payload = Payload(where, tensors, recorded=few.places, places=packer.places)
            return Encoded(payload, [body.getvalue(), *frames], few.recorded, slots=packer.slots)
        pickler = Pickler(body, out_of_band, packer, forker, by_value, record)
        pickler.lacking, pickler.known = lacking, known
        pickler.dump(value)
        if pickler.recorded:
            places = _pack_recorded(pickler.recorded, packer, odd)
        tensors, where, frames = packer.pack()
    except ValueWanted:
        if forker is not None:
            forker.take_back()  # a second attempt may meet other references, where reducers make them
        return encode(
            value, by_value=True, forker=forker, devices=devices, receiver=receiver, record=record, space=space
        )
    except NbdistError:
        raise
    except Exception as error:
        raise EncodeError(f"cannot be sent: {error}") from error
    payload = Payload(where, tensors, pickler.forks, pickler.plain, pickler.definitions, places, packer.places)
    all_frames = [body.getvalue(), *frames, *odd, *out_of_band]
    warn = pickler.requires_grad and not record
    return Encoded(payload, all_frames, pickler.recorded, warn, packer.slots, pickler.named)


def _pack_recorded(tensors: Sequence[torch.Tensor], packer: TensorPacker, frames: list[Buffer]) -> list[int]:
    """Have the data of recorded tensors packed; where it will be found."""
    places: list[int] = []
    odd: list[torch.Tensor] = []
    for tensor in tensors:
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
