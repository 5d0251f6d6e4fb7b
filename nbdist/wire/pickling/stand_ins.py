"""The functions that a pickled body refers to by name, beside those in `nbdist.wire.pickling.definitions`.

`nbdist.wire.pickling.unpickler` replaces the first three by functions that know the message. Renaming or moving a
function here changes the bytes between agents, and needs a new `nbdist.wire.messages.VERSION`.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from nbdist.errors import DecodeError

__all__ = ["exception", "recorded", "reference", "script", "script_function", "tensor"]


def tensor(index: int) -> Any:
    """Return tensor number ``index`` of the message. Raises DecodeError outside of a decoder.

    The name stands in the pickle in the place of the tensor; a decoder resolves it itself, and plain ``pickle`` ends
    here.
    """
    raise DecodeError("this pickle is part of a message of nbdist: only nbdist.wire.decoding.decode can load it")


def recorded(index: int) -> Any:
    """Return recorded tensor number ``index``, joined to the receiver's graph.

    Raises DecodeError outside of a decoder.
    """
    return tensor(index)


def reference(index: int) -> Any:
    """Return the receiver's reference for fork number ``index``. Raises DecodeError outside of a decoder.

    The name stands in the pickle in the place of the reference; plain ``pickle`` ends here.
    """
    return tensor(index)


def exception(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Return an error that is made without its ``__init__``, which may take other arguments than ``args``."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def script(data: bytes) -> Any:
    """Return the module of TorchScript that ``torch.jit.save`` has written as ``data``."""
    return torch.jit.load(io.BytesIO(data))


def script_function(data: bytes) -> Any:
    """Return the function of TorchScript that ``torch.jit.save`` has written as ``data``."""
    return torch.jit.load(io.BytesIO(data)).forward
