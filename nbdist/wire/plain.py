"""Encodes values that cannot carry code: plain data and tensors, for messages of strangers. Nothing here pickles.

::

    4 bytes   the length of the head
    head      msgpack: (the value as msgpack, with a number in place of each tensor; the dtype and shape of each tensor)
    rest      the bytes of the tensors, one right after the other

The receiver names the type that it wants, such as a NamedTuple, and gets exactly that. In `Any`, tuples arrive as
lists, and enums as their values. A tensor that occurs several times in a value is sent once.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch

from nbdist.errors import EncodeError, ProtocolError

_MOST_DIMENSIONS = 64  # of a tensor
_MOST_TENSORS = 10_000  # of a message
_LARGEST_HEAD = 1 << 26  # bytes: as objects, they may need twenty times as much memory
_ALL = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64"
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _ALL.split()}
_Head = tuple[bytes, list[tuple[str, tuple[int, ...]]]]


def encode(value: Any) -> bytes:
    """Return a value as bytes. Raises EncodeError, which names the type, if a part of it is not plain."""
    tensors: dict[int, torch.Tensor] = {}  # by id: the value keeps them alive meanwhile

    def number_of(part: Any) -> msgspec.msgpack.Ext:
        if not isinstance(part, torch.Tensor) or str(part.dtype).removeprefix("torch.") not in _DTYPES:
            kind = part.dtype if isinstance(part, torch.Tensor) else type(part).__name__
            raise EncodeError(f"a {kind} cannot be sent to or by a client: only plain data and tensors can")
        tensors.setdefault(id(part), part)
        return msgspec.msgpack.Ext(0, list(tensors).index(id(part)).to_bytes(4))

    try:
        whole = msgspec.msgpack.encode(value, enc_hook=number_of)
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise EncodeError(f"a value cannot be sent to or by a client: {error}") from None
    dense = [each.detach().cpu().contiguous() for each in tensors.values()]
    kinds = [(str(each.dtype).removeprefix("torch."), tuple(each.shape)) for each in dense]
    head = msgspec.msgpack.encode((whole, kinds))
    return b"".join((len(head).to_bytes(4), head, *map(_bytes_of, dense)))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def decode(data: bytes, kind: Any, largest: int = _LARGEST_HEAD) -> Any:
    """Return the value of a type in bytes that anybody may have made. Raises ProtocolError for any other bytes."""
    try:
        end = 4 + int.from_bytes(data[:4])
        if end > largest:
            raise ProtocolError(f"its head has {end} bytes, more than {largest}")
        whole, kinds = msgspec.msgpack.decode(data[4:end], type=_Head)
        tensors = _tensors(memoryview(data)[end:], kinds)
        return msgspec.msgpack.decode(
            whole, type=kind, ext_hook=lambda _, number: tensors[int.from_bytes(number)], dec_hook=_checked
        )
    except Exception as error:  # bytes of strangers may cause any, also MemoryError and RecursionError
        raise ProtocolError(f"a message has something else than it must: {error}") from None


def _checked(kind: type, value: Any) -> Any:
    """Return a value that must be a tensor."""
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} is no {kind.__name__}")
    return value


def _tensors(data: memoryview, kinds: list[tuple[str, tuple[int, ...]]]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for name, shape in kinds:
        dtype = _DTYPES[name]
        if len(shape) > _MOST_DIMENSIONS or any(each < 0 for each in shape):  # first: the product may take hours
            raise ProtocolError("its tensors have shapes of no tensors")
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > len(data) or len(kinds) > _MOST_TENSORS:
            raise ProtocolError("its tensors are not in it")
        # Into memory of torch's own, which is aligned: elsewhere, sums may have other last bits.
        tensor = torch.empty(shape, dtype=torch.uint8 if dtype is torch.bool else dtype)
        _bytes_of(tensor)[:] = data[:nbytes]
        found.append(tensor.bool() if dtype is torch.bool else tensor)  # a bool has no third value
        data = data[nbytes:]
    if len(data):
        raise ProtocolError(f"{len(data)} bytes are left over")
    return found
