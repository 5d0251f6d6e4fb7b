"""Rebuilds values from frames: early, in the reading thread, if that is quick and runs no user code; else in a job.

Decoding runs code, as unpickling does; callers authenticate the sender first.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from nbdist.errors import DecodeError, NbdistError
from nbdist.wire import quick
from nbdist.wire.history import Attach, with_history
from nbdist.wire.messages import Payload, TensorMeta
from nbdist.wire.pickling import culprit
from nbdist.wire.pickling.unpickler import Unpickler
from nbdist.wire.tensors import unpack_tensors

_QUICK_BYTES = 1 << 16  # the bytes up to which decoding takes no longer than waking another thread for it


def decodes_quickly(payload: Payload, frames: Sequence[bytes]) -> bool:
    """Return whether the reading thread may decode a value: it is small, and needs no user code and no GPU.

    Otherwise a *job* decodes it, a function that a thread of the agent's pool runs, while another thread reads on.
    """
    if not payload.plain:
        return False
    for meta in payload.tensors:
        if meta.device is not None and _is_copied(meta, payload, frames):
            return False
    # Tensors in shared memory are not copied, so their size does not count.
    if payload.places:
        frames = frames[: len(frames) - len(payload.places)]
    return sum(map(len, frames)) < _QUICK_BYTES


def _is_copied(meta: TensorMeta, payload: Payload, frames: Sequence[bytes]) -> bool:
    """Return whether a tensor for another device must be copied there. One in shared memory of a GPU need not."""
    # Such a copy waits for earlier work of the GPU, whatever its size, and no thread would read messages meanwhile.
    place = payload.buffers[meta.buffer][0] if 0 <= meta.buffer < len(payload.buffers) else 0
    count = len(payload.places)
    return place >= 0 or -place > count or isinstance(frames[len(frames) - count - place - 1], bytes | memoryview)


NOT_DECODED = object()  # the result of `decode_early` for a value that a job must decode


def decode_early(payload: Payload, frames: Sequence[bytes], references: Sequence[Any] = ()) -> Any:
    """Return the value in ``frames`` if the reading thread may decode it (`decodes_quickly`), else `NOT_DECODED`."""
    if not payload.plain or not quick.USUAL_IS_ON:
        return NOT_DECODED
    try:
        if not payload.places and sum(map(len, frames)) < _QUICK_BYTES:
            # Only atoms: one call of C pickle.
            if len(frames) == 1 and not payload.form and not payload.tensors:
                return pickle.loads(frames[0])
            # A few small tensors or references as well.
            if payload.form and not payload.recorded:
                for meta in payload.tensors:
                    if meta.device is not None and _is_copied(meta, payload, frames):
                        return NOT_DECODED
                return quick.decode(payload, frames, (), references, None)
        return decode(payload, frames, references) if decodes_quickly(payload, frames) else NOT_DECODED
    except Exception:  # whatever it is: the reading thread goes on, and the job that decodes the value again raises it
        return NOT_DECODED


def decode(payload: Payload, frames: Sequence[bytes], references: Sequence[Any] = (), attach: Attach = None) -> Any:
    """Return the value in ``frames``; the last of these are its storages in shared memory (``payload.places``).

    ``references`` are the receiver's references for ``payload.forks``, in that order. ``attach`` joins tensors that
    were sent in an autograd context to the receiver's graph. Without it, they become leaves that require grad.

    Raises DecodeError if the value cannot be rebuilt (MissingDefinition if ``__main__`` here lacks a definition), and
    ProtocolError if the frames contradict their description.
    """
    if not frames:
        raise DecodeError(
            "the message has no body: it is damaged, or its sender has another version of nbdist. Install the same "
            "version everywhere"
        )
    try:
        # The frames have the order in which `encode` puts them: body, tensors, odd tensors, large buffers, shared
        # memory.
        leased = frames[len(frames) - len(payload.places) :]
        frames = frames[: len(frames) - len(payload.places)]
        if payload.form:
            return quick.decode(payload, frames, leased, references, attach)
        behind = 1 + max((-1, *(frame for frame, _, _ in payload.buffers))) + 1
        tensors = unpack_tensors(payload.tensors, payload.buffers, frames[1:behind], leased)
        odd: list[torch.Tensor] = []
        # Recorded tensors that could not be packed are a pickle in a frame of their own.
        if min(payload.recorded, default=0) < 0:
            odd = Unpickler(frames[behind], (), tensors, ()).read()
            behind += 1
        recorded = [tensors[place] if place >= 0 else odd[-1 - place] for place in payload.recorded]
        recorded = with_history(recorded, attach) if recorded else recorded
        return Unpickler(frames[0], frames[behind:], tensors, references, recorded).read()
    except NbdistError:
        raise
    except Exception as error:  # whatever the user's classes and the sender's bytes cause: the caller must learn it
        if "Default process group has not been initialized" in str(error):  # a module wrapped by DDP asks for it
            raise DecodeError(f"a value cannot be sent: {culprit.HOLDS_GROUP}") from error
        raise DecodeError(
            f"a value that another worker sent cannot be rebuilt in this process: {type(error).__name__}: {error}\n"
            "If a class or module is missing here, install it in the sender's version."
        ) from error
