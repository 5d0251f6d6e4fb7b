"""Encodes values as frames, in the cheapest way that can carry the value.

====================================  ======================================================
value                                 way
====================================  ======================================================
atoms                                 one call of C pickle
tensors, references, atoms            `nbdist.wire.quick`: a pickle of atoms, with holes
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
    form = quick.form_of(value, reference_types)
    if form == quick.PLAIN:
        return Encoded(NO_TENSORS, [pickle.dumps(value, 5)])
    body, out_of_band = io.BytesIO(), list[Buffer]()
    odd: list[Buffer] = []
    try:
        if form != quick.OTHER:
            return quick.encode(value, form, forker, record, devices, space)
        packer = TensorPacker(devices, space)
        pickler = Pickler(body, out_of_band, packer, forker, by_value, record)
        pickler.lacking, pickler.known = lacking, known
        pickler.dump(value)
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
