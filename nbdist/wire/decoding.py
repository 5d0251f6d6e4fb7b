"""Rebuilds values from frames, early and in the reading thread where that is quick and runs nobody's code.

Decoding runs code, as unpickling does; callers authenticate the sender first (G6).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from nbdist.errors import DecodeError, NbdistError
from nbdist.wire import quick, usual
from nbdist.wire.history import Attach, with_history
from nbdist.wire.messages import Payload
from nbdist.wire.tensors import unpack_tensors
from nbdist.wire.unpickler import Unpickler

__all__ = ["NOT_DECODED", "decode", "decode_early", "decodes_quickly"]

_QUICK = 1 << 16
"""Bytes up to which decoding takes no longer than waking another thread for it."""


def decodes_quickly(payload: Payload, frames: Sequence[bytes]) -> bool:
    """Whether the thread that reads may decode this: it is small, and runs nobody's code."""
    if not payload.plain:
        return False
    # What lies in shared memory is not copied: be it ever so large, it is quick.
    if payload.places:
        frames = frames[: len(frames) - len(payload.places)]
    return sum(map(len, frames)) < _QUICK


NOT_DECODED = object()
"""The result of `decode_early` for a value that a job has to decode."""


def decode_early(payload: Payload, frames: Sequence[bytes], references: Sequence[Any] = ()) -> Any:
    """Return the value in ``frames`` if the thread that reads may decode it, as `decodes_quickly` says.

    The value is `NOT_DECODED` where that is not so, and where it cannot be decoded: `decode` raises the error then.
    """
    if not payload.plain or not usual.IS_ON:
        return NOT_DECODED
    try:
        if not payload.places and sum(map(len, frames)) < _QUICK:
            if len(frames) == 1 and not payload.form and not payload.tensors:
                return pickle.loads(frames[0])
            if payload.form and not payload.recorded:
                return quick.decode(payload, frames, (), references, None)
        return decode(payload, frames, references) if decodes_quickly(payload, frames) else NOT_DECODED
    except Exception:
        return NOT_DECODED


def decode(
    payload: Payload,
    frames: Sequence[bytes],
    references: Sequence[Any] = (),
    attach: Attach = None,
) -> Any:
    """The value in ``frames``, the last of which are its places in shared memory; ``references`` are its forks here."""
    if not frames:
        raise DecodeError("the message has no body")
    try:
        if payload.plain and not payload.form and not payload.tensors and len(frames) == 1:
            return pickle.loads(frames[0])
        leased = frames[len(frames) - len(payload.places) :]
        frames = frames[: len(frames) - len(payload.places)]
        if payload.form:
            return quick.decode(payload, frames, leased, references, attach)
        behind = 1 + max((-1, *(frame for frame, _, _ in payload.buffers))) + 1
        tensors = unpack_tensors(payload.tensors, payload.buffers, frames[1:behind], leased)
        recorded: list[torch.Tensor] = []
        if payload.recorded:
            odd: list[torch.Tensor] = []
            if min(payload.recorded) < 0:
                odd = Unpickler(frames[behind], (), tensors, ()).read()
                behind += 1
            recorded = [tensors[place] if place >= 0 else odd[-1 - place] for place in payload.recorded]
            recorded = with_history(recorded, attach)
        return Unpickler(frames[0], frames[behind:], tensors, references, recorded).read()
    except NbdistError:
        raise
    except Exception as error:
        raise DecodeError(f"the value cannot be rebuilt here: {type(error).__name__}: {error}") from error
