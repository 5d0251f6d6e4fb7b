"""Tensors as raw bytes and a few integers, because torch's default pickle costs 300 µs each.

What is kept: dtype, shape, strides, requires_grad, ``nn.Parameter``, and which tensors of one
message share storage. Packing *copies* (the value sent is the value at the call): into frames, or, for a
receiver that can read it, into shared memory, which a `Space` gives. What comes in frames is copied into
memory that torch allocates, and what comes in shared memory stays there: either is the receiver's own, and
64-byte aligned, because vectorised arithmetic on misaligned memory differs in the last bit.

A storage in shared memory cannot be made larger, as none of torch's own shared memory can: ``resize_`` to
more elements than it has raises.

Tensors of other layouts (sparse, quantised, meta, subclasses) are left to torch's own reducers,
whose inner dense parts come back here.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from nbdist.errors import DecodeError, EncodeError, ProtocolError
from nbdist.wire.messages import Place, TensorMeta

__all__ = ["Buffer", "Slot", "Space", "TensorPacker", "Unreadable", "pack_alone", "unpack_tensors"]

Buffer = bytes | memoryview


class Unreadable(bytes):
    """Stands, without bytes, for a sender's shared memory that this process cannot map."""

    def __new__(cls, why: str) -> Unreadable:
        """``why`` is for the error that the message is answered with."""
        unreadable = super().__new__(cls)
        unreadable.why = why
        return unreadable

    why: str


LARGE = 256 * 1024
"""From here on a storage travels in a frame of its own, which ZeroMQ need not copy again."""

_ALIGN = 64
_COPY_HELD = 64 * 1024
_copy_held = ctypes.PyDLL(None).memmove
"""A copy that keeps the GIL: giving it up for a few bytes costs a change of threads."""
_copy_held.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_bytes_at = ctypes.pythonapi.PyBytes_FromStringAndSize
"""A copy as bytes, as ``ctypes.string_at`` makes it by way of a function in Python."""
_bytes_at.argtypes, _bytes_at.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object

_SPARSE_VIEW = 4
_DTYPE_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool"),
    *("complex64", "complex128", "complex32", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    "bcomplex32",
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
)
_DTYPES: list[torch.dtype | None] = [getattr(torch, name, None) for name in _DTYPE_NAMES]
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}
_FIRST_NARROW = _DTYPE_NAMES.index("int1")
"""From here on in the table: integers of fewer bits than a byte, each in a byte, which torch cannot copy."""

_REQUIRES_GRAD = 1
_PARAMETER = 2


class Slot(Protocol):
    """A copy in shared memory; unless it is sent, it goes when this goes."""

    @property
    def place(self) -> Place:
        """Where it is, for the receiver."""
        ...

    def send(self) -> None:
        """It is about to go out."""
        ...

    def take_back(self) -> None:
        """It certainly has not gone out."""
        ...


class Space(Protocol):
    """Shared memory that one receiver can read."""

    threshold: int
    """From how many bytes on it is worth while."""

    def put(self, pointer: int, length: int) -> Slot | None:
        """A copy of what is there; None where there is no room."""
        ...


def is_packable(tensor: torch.Tensor) -> bool:
    """Whether this module carries ``tensor``, rather than its own ``__reduce_ex__``."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    return (
        tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.dtype in _DTYPE_CODES
        and not tensor.is_nested
        and not tensor.__dict__
    )


def refuse_uncarried(tensor: torch.Tensor) -> None:
    """Raise EncodeError if torch's own pickling cannot carry ``tensor`` either, and say what to send instead."""
    if tensor.is_mkldnn:
        raise EncodeError(f"cannot be sent: a tensor of layout {tensor.layout} does not travel; send tensor.to_dense()")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype in _DTYPE_CODES:
        return
    try:
        tensor.qscheme()
    except RuntimeError:
        without = ", which has no scale," if "q" in str(tensor.dtype) else ""
        raise EncodeError(
            f"cannot be sent: a tensor of {tensor.dtype}{without} does not travel; send tensor.view(torch.uint8), and "
            "view that as the dtype again"
        ) from None


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as contiguous memory, also of dtypes that torch cannot copy."""
    if _DTYPE_CODES[tensor.dtype] < _FIRST_NARROW:
        return tensor.contiguous()
    return tensor.view(torch.uint8).contiguous().view(tensor.dtype)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that ``tensor`` can touch: start and end."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        start = min(start, tensor.untyped_storage().nbytes())  # where an empty view begins, nobody checks
        return start, start
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def _flags(tensor: torch.Tensor) -> int:
    flags = _REQUIRES_GRAD if tensor.requires_grad else 0
    return flags | _PARAMETER if type(tensor) is torch.nn.Parameter else flags


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """``tensor`` as contiguous memory of this process, if that is all that there is to it."""
    if not tensor.is_cpu or tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj()):
        return None
    if tensor.is_contiguous():
        return tensor
    if tensor.nbytes >= LARGE or any(tensor.stride()):
        return None
    return _contiguous(tensor.detach())  # one value, expanded, as gradients of sums are


def pack_alone(tensor: torch.Tensor, bare: bool, space: Space | None) -> tuple[TensorMeta, bytes] | None:
    """Return meta and bytes of a message's only tensor, if it is small; of a ``bare`` one no more than the data.

    Returns None for a tensor that `TensorPacker` or a pickler has to carry. ``tensor`` is no other subclass than a
    parameter.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in _DTYPE_CODES or tensor.is_nested or tensor.__dict__:
        return None
    length = tensor.nbytes
    if not 0 < length < (LARGE if space is None else min(LARGE, space.threshold)):
        return None
    if tensor.is_contiguous() and tensor.is_cpu and not tensor.is_neg() and not tensor.is_conj():
        plain = tensor  # as almost all are
    elif (found := _plain(tensor)) is not None:
        plain = found
    else:
        return None
    flags = 0 if bare or not (tensor.requires_grad or type(tensor) is torch.nn.Parameter) else _flags(tensor)
    meta = TensorMeta(0, _DTYPE_CODES[tensor.dtype], list(tensor.shape), None, 0, flags)
    return meta, _bytes_at(plain.data_ptr(), length)


class _Storage:
    """The part of one storage that the tensors of a message use."""

    __slots__ = ("end", "number", "pointer", "start")

    def __init__(self, number: int, pointer: int, start: int, end: int) -> None:
        self.number = number
        self.pointer = pointer
        self.start = start
        self.end = end


class TensorPacker:
    """Collects the tensors of one message; ``pack`` then copies their bytes."""

    def __init__(
        self, devices: Mapping[str, str] | None = None, receiver: str = "", space: Space | None = None
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self.slots: list[Slot] = []
        self.places: list[Place] = []
        self._indices: dict[int, int] = {}
        self._devices = devices or {}
        self._receiver = receiver
        self._space = space

    def add(self, tensor: torch.Tensor) -> int:
        """Take ``tensor`` along; its index in the message."""
        index = self._indices.get(id(tensor))
        if index is None:
            index = self._indices[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return index

    def pack(self) -> tuple[list[TensorMeta], list[tuple[int, int, int]], list[Buffer]]:
        """Metas, where each storage lies as (frame, offset, length), and the frames.

        Storages that were put into shared memory are in `slots`, and lie in frames -1, -2, …
        """
        if not self.tensors:
            return [], [], []
        if (packed := self._pack_simple()) is not None:
            return packed
        storages: dict[int, _Storage] = {}
        placed: list[tuple[torch.Tensor, _Storage, str | None]] = []
        users: dict[int, int] = {}
        hosts = [self._on_host(tensor) for tensor in self.tensors]
        for tensor, _ in hosts:
            key = tensor.untyped_storage()._cdata
            users[key] = users.get(key, 0) + 1
        for tensor, device in hosts:
            data, key = tensor, tensor.untyped_storage()._cdata
            start, end = _extent(data)
            if users[key] == 1 and end - start > max(LARGE, _SPARSE_VIEW * data.nbytes):
                data = _contiguous(data)
                key = data.untyped_storage()._cdata
                start, end = _extent(data)
            elif users[key] > 1:
                start -= start % _ALIGN  # views of one storage may be of different dtypes
            storage = storages.get(key)
            if storage is None:
                pointer = data.untyped_storage().data_ptr()
                storage = storages[key] = _Storage(len(storages), pointer, start, end)
            else:
                storage.start, storage.end = min(start, storage.start), max(end, storage.end)
            placed.append((data, storage, device))
        metas = [
            self._meta(original, data, storage, device)
            for original, (data, storage, device) in zip(self.tensors, placed, strict=True)
        ]
        spans = [(storage.pointer + storage.start, storage.end - storage.start) for storage in storages.values()]
        return metas, *self._copy_out(spans)

    def _copy_out(self, spans: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int, int]], list[Buffer]]:
        where: list[tuple[int, int, int]] = []
        frames: list[Buffer] = []
        small: list[bytes] = []
        small_size = 0
        shared = -1
        for pointer, length in spans:
            if self._put(pointer, length):
                where.append((-len(self.slots), 0, length))
                continue
            if length >= LARGE:
                where.append((len(frames), 0, length))
                frames.append(_snapshot(pointer, length))
                continue
            if shared < 0:
                shared = len(frames)
                frames.append(b"")
            where.append((shared, small_size, length))
            if length:
                small.append(_bytes_at(pointer, length))
                small_size += length
                if pad := -small_size % _ALIGN:
                    small.append(bytes(pad))
                    small_size += pad
        if shared >= 0:
            frames[shared] = small[0] if len(small) == 1 else b"".join(small)
        return where, frames

    def _put(self, pointer: int, length: int) -> bool:
        """Copy what is there into shared memory, if it is worth while and there is room."""
        if self._space is None or length < max(self._space.threshold, 1):
            return False
        slot = self._space.put(pointer, length)
        if slot is None:
            return False
        self.slots.append(slot)
        self.places.append(slot.place)
        return True

    def _pack_simple(self) -> tuple[list[TensorMeta], list[tuple[int, int, int]], list[Buffer]] | None:
        """The usual case, a few contiguous tensors of which none share storage, without the general one's books."""
        metas: list[TensorMeta] = []
        spans: list[tuple[int, int]] = []
        kept: list[torch.Tensor] = []
        for tensor in self.tensors:
            plain = _plain(tensor)
            if plain is None:
                return None
            kept.append(plain)
            metas.append(TensorMeta(len(metas), _DTYPE_CODES[plain.dtype], list(plain.shape), None, 0, _flags(tensor)))
            spans.append((plain.data_ptr(), plain.nbytes))
        if len(spans) > 1 and len({tensor.untyped_storage()._cdata for tensor in self.tensors}) < len(spans):
            return None
        return metas, *self._copy_out(spans)

    def _on_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str | None]:
        plain = tensor.detach()
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        if plain.device.type == "cpu":
            return plain, None
        device = self._devices.get(str(plain.device))
        if device is None:
            raise EncodeError(
                f"cannot be sent: a tensor is on {plain.device}, and no device map says where it goes on "
                f"{self._receiver or 'the other worker'}. Give this worker's options "
                f"set_device_map({self._receiver!r}, {{{str(plain.device)!r}: 'cuda:0'}}) before init_rpc, "
                f"or send tensor.cpu()"
            )
        return plain.cpu(), device

    @staticmethod
    def _meta(original: torch.Tensor, data: torch.Tensor, storage: _Storage, device: str | None) -> TensorMeta:
        offset = int(data.storage_offset()) - storage.start // data.element_size()
        strides = None if offset == 0 and data.is_contiguous() else list(data.stride())
        return TensorMeta(
            storage.number, _DTYPE_CODES[data.dtype], list(data.shape), strides, offset, _flags(original), device
        )


def _snapshot(pointer: int, length: int) -> memoryview:
    """A copy made without the GIL, in memory that lives as long as the view of it."""
    copy = torch.empty(length, dtype=torch.uint8, device="cpu")
    ctypes.memmove(copy.data_ptr(), pointer, length)
    block = (ctypes.c_char * length).from_address(copy.data_ptr())
    block.owner = copy  # type: ignore[attr-defined]  # keeps the memory for the view's life
    return memoryview(block).cast("B")


def unpack_tensors(
    metas: Sequence[TensorMeta],
    where: Sequence[tuple[int, int, int]],
    frames: Sequence[bytes],
    leased: Sequence[Buffer] = (),
) -> list[torch.Tensor]:
    """The tensors of a message, in memory of their own; ``leased`` is the shared memory that came with it."""
    if not metas:
        return []
    if len(metas) == 1 and (alone := unpack_alone(metas[0], where, frames)) is not None:
        return [alone]
    users: dict[int, int] = {}
    for meta in metas:
        users[meta.buffer] = users.get(meta.buffer, 0) + 1
    shared: dict[int, torch.UntypedStorage] = {}
    tensors = []
    for meta in metas:
        if not 0 <= meta.buffer < len(where):
            raise ProtocolError("a tensor refers to a buffer that the message does not have")
        dtype = _DTYPES[meta.dtype] if 0 <= meta.dtype < len(_DTYPES) else None
        if dtype is None:
            raise DecodeError(f"this torch ({torch.__version__}) has no dtype number {meta.dtype}")
        frame, offset, length = where[meta.buffer]
        if frame < 0:
            memory = _leased(leased, -1 - frame, length)
            if users[meta.buffer] == 1 and meta.strides is None:
                if math.prod(meta.shape) * dtype.itemsize != length:
                    raise ProtocolError("a tensor's bytes do not match its shape")
                tensor = torch.frombuffer(memory, dtype=dtype, count=length // dtype.itemsize).resize_(meta.shape)
            else:
                storage = shared.get(meta.buffer)
                if storage is None:
                    tensor = torch.frombuffer(memory, dtype=torch.uint8, count=length)
                    storage = shared[meta.buffer] = tensor.untyped_storage()
                tensor = _view(storage, dtype, meta)
            tensors.append(_finished(tensor, meta))
            continue
        if not 0 <= frame < len(frames) or offset < 0 or length < 0 or offset + length > len(frames[frame]):
            raise ProtocolError("a tensor's bytes lie outside of the message")
        if users[meta.buffer] == 1 and meta.strides is None:
            if math.prod(meta.shape) * dtype.itemsize != length:
                raise ProtocolError("a tensor's bytes do not match its shape")
            tensor = torch.empty(meta.shape, dtype=dtype, device="cpu")
            _copy_in(tensor.data_ptr(), frames[frame], offset, length)
        else:
            storage = shared.get(meta.buffer)
            if storage is None:
                storage = shared[meta.buffer] = torch.UntypedStorage(length)
                _copy_in(storage.data_ptr(), frames[frame], offset, length)
            tensor = _view(storage, dtype, meta)
        tensors.append(_finished(tensor, meta))
    return tensors


def unpack_alone(
    meta: TensorMeta, where: Sequence[tuple[int, int, int]], frames: Sequence[bytes]
) -> torch.Tensor | None:
    """The usual case, one small tensor in one frame, if this is it."""
    if meta.strides is not None or meta.device is not None or not frames or list(where) != [(0, 0, len(frames[0]))]:
        return None
    dtype = _DTYPES[meta.dtype] if 0 <= meta.dtype < len(_DTYPES) else None
    length = len(frames[0])
    if meta.buffer or dtype is None or length >= _COPY_HELD or math.prod(meta.shape) * dtype.itemsize != length:
        return None
    tensor = torch.empty(meta.shape, dtype=dtype, device="cpu")
    _copy_held(tensor.data_ptr(), frames[0], length)
    return _finished(tensor, meta) if meta.flags else tensor


def _leased(leased: Sequence[Buffer], index: int, length: int) -> Buffer:
    """A piece of shared memory that came with the message; what is made of it keeps the lease."""
    if not 0 <= index < len(leased):
        raise ProtocolError("a tensor refers to shared memory that the message does not have")
    memory = leased[index]
    if isinstance(memory, Unreadable):
        raise DecodeError(f"the sender's shared memory cannot be read here: {memory.why}")
    if not 0 < length <= len(memory):
        raise ProtocolError("a tensor's bytes lie outside of the message")
    return memory


def _finished(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The tensor as it was sent, but for its data."""
    if meta.device is not None:
        tensor = tensor.to(meta.device)
    if meta.flags & _PARAMETER:
        tensor = torch.nn.Parameter(tensor, requires_grad=bool(meta.flags & _REQUIRES_GRAD))
    elif meta.flags & _REQUIRES_GRAD:
        tensor.requires_grad_()
    return tensor


def _view(storage: torch.UntypedStorage, dtype: torch.dtype, meta: TensorMeta) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    strides = meta.strides
    if strides is None:
        strides = []
        step = 1
        for n in reversed(meta.shape):
            strides.insert(0, step)
            step *= max(n, 1)
    # Checked here, because torch would make the storage larger where it is too small.
    last = sum((n - 1) * stride for n, stride in zip(meta.shape, strides, strict=False))
    if (
        len(strides) != len(meta.shape)
        or min((meta.offset, *meta.shape, *strides)) < 0
        or (0 not in meta.shape and (meta.offset + last + 1) * dtype.itemsize > storage.nbytes())
    ):
        raise ProtocolError("a tensor's bytes do not match its shape")
    return tensor.set_(storage, meta.offset, meta.shape, strides)


def _copy_in(pointer: int, frame: bytes, offset: int, length: int) -> None:
    if not length:
        return
    if not isinstance(frame, bytes):
        frame = bytes(frame)
    source: int | bytes = frame
    if offset:
        address = ctypes.cast(ctypes.c_char_p(frame), ctypes.c_void_p).value
        assert address is not None  # a bytes object always has one
        source = address + offset
    (_copy_held if length < _COPY_HELD else ctypes.memmove)(pointer, source, length)
