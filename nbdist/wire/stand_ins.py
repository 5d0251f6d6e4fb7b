"""The names that a pickled body refers to, beside those in `nbdist.wire.definitions`.

`nbdist.wire.unpickler` binds the first three to what came with the message. A name that is changed here, or moved,
changes what goes over the wire.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from nbdist.errors import DecodeError

__all__ = ["exception", "recorded", "reference", "script", "script_function", "tensor"]


def tensor(index: int) -> Any:
    """Return tensor number ``index`` of the message."""
    raise DecodeError("only nbdist.wire.decoding.decode can read this")


def recorded(index: int) -> Any:
    """Return recorded tensor number ``index``, attached to the receiver's graph."""
    return tensor(index)


def reference(index: int) -> Any:
    """Return the receiver's reference for fork number ``index``."""
    return tensor(index)


def exception(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Return an error made without its ``__init__``, which may take other arguments than ``args``."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def script(data: bytes) -> Any:
    """Return a module of TorchScript."""
    return torch.jit.load(io.BytesIO(data))


def script_function(data: bytes) -> Any:
    """Return a function of TorchScript."""
    return torch.jit.load(io.BytesIO(data)).forward
