"""Carries tensors as raw bytes and a few integers, because torch's own pickle takes 300 µs for each.

These properties are kept: dtype, shape, strides, requires_grad, ``nn.Parameter``, and which tensors of one message
share storage. Packing *copies*, because the value sent is the value at the time of the call. The copy goes into frames,
or into shared memory (a `Space`) if the receiver can read it.

The receiver copies bytes from frames into memory that torch allocates. Two kinds of bytes stay where they are: a large
storage in a frame of its own whose memory nothing else uses, and bytes in shared memory. In each case the memory is the
receiver's own, and 64-byte aligned: vectorised arithmetic on misaligned memory differs in the last bit.

A storage that stays where it arrived has a fixed size, as with torch's own shared memory: ``resize_`` to more elements
raises, and so does ``untyped_storage().resize_``, even to fewer bytes.

Tensors of other layouts (sparse, quantised, meta, subclasses) are left to torch's own reducers; their inner dense parts
come back here.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nbdist.errors import DecodeError, EncodeError, ProtocolError
from nbdist.gpus import staging
from nbdist.large_memory import with_large_pages
from nbdist.wire.devices import CPU_ONLY, Devices
from nbdist.wire.messages import Place, TensorMeta

Buffer = bytes | memoryview


class Unreadable(bytes):
    """Stands, without bytes, for shared memory of a sender that this process cannot map."""

    def __new__(cls, why: str) -> Unreadable:
        """Make a stand-in. The reason ``why`` goes into the error of the call or backward pass that sent the tensor."""
        unreadable = super().__new__(cls)
        unreadable.why = why
        return unreadable

    why: str


OWN_FRAME_BYTES = 256 * 1024  # a storage of so many bytes gets its own frame, which ZeroMQ does not copy again

_ALIGN = 64  # storages that share a frame begin at multiples of this many bytes
_COPY_WITH_GIL_BYTES = 64 * 1024  # copies of fewer bytes keep the GIL
# ``PyDLL`` copies and keeps the GIL: releasing it for a few bytes costs a switch of threads.
_copy_held = ctypes.PyDLL(None).memmove
_copy_held.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

# Copies memory as bytes. ``ctypes.string_at`` does the same, but through a Python function.
_bytes_at = ctypes.pythonapi.PyBytes_FromStringAndSize
_bytes_at.argtypes, _bytes_at.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object

# A view that spans more than this many times its own bytes of a large storage is made contiguous before it is sent.
_SPARSE_VIEW_RATIO = 4
# The dtypes by number. The numbers are part of the bytes between agents (`nbdist.wire.messages.VERSION`).
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
# From this number on: integers of fewer bits than a byte, each stored in a byte, which torch cannot copy.
_FIRST_NARROW = _DTYPE_NAMES.index("int1")

_REQUIRES_GRAD = 1
_PARAMETER = 2


class Slot(Protocol):
    """A copy in shared memory for one receiver. Unless it is sent, its memory is freed with this object."""

    @property
    def place(self) -> Place:
        """The place of the copy in the sender's shared memory; it goes into the message, for the receiver."""

    def send(self) -> None:
        """Hand the copy over to the receiver, right before the message goes to the channel."""

    def take_back(self) -> None:
        """Free the copy after `send`, because the message with it is certainly not sent; else do nothing."""


class Space(Protocol):
    """Shared memory that one receiver can read."""

    threshold: int  # the size in bytes of the smallest storage that goes there; smaller ones are faster in frames

    def put(self, pointer: int, length: int) -> Slot | None:
        """Copy ``length`` bytes at address ``pointer`` of this process; return None if there is no room."""

    def put_from_gpu(self, part: torch.Tensor, there: str | None) -> Slot | None:
        """Copy a tensor of bytes from a GPU for the receiver's device ``there``; None means the CPU.

        The copy may be on the GPU if the receiver uses the same GPU. Returns None if there is no room, or the tensor is
        too small.
        """


class Lent(Protocol):
    """Memory of a GPU that a sender has lent to this process."""

    def __len__(self) -> int:
        """Return the number of bytes."""

    def tensor(self) -> torch.Tensor:
        """Return the bytes as a tensor on the GPU. While it lives, the memory is not given back."""


def is_packable(tensor: torch.Tensor) -> bool:
    """Return whether this module carries ``tensor``; if not, the tensor's own ``__reduce_ex__`` does."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    return (
        tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.dtype in _DTYPE_CODES
        and not tensor.is_nested
        and not tensor.__dict__  # attributes that the user has set, which only ``__reduce_ex__`` keeps
    )


def refuse_uncarried(tensor: torch.Tensor) -> None:
    """Raise EncodeError if torch's own pickling cannot carry ``tensor`` either; the error says what to send instead."""
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
    """Return ``tensor`` in contiguous memory, even for dtypes that torch cannot copy."""
    if _DTYPE_CODES[tensor.dtype] < _FIRST_NARROW:
        return tensor.contiguous()
    return tensor.view(torch.uint8).contiguous().view(tensor.dtype)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the part of its storage that ``tensor`` can touch: begin and end, in bytes from the storage's begin."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        start = min(start, tensor.untyped_storage().nbytes())  # torch does not check where an empty view begins
        return start, start
    # Strides of torch are never negative, so the last element has the highest address.
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def _flags(tensor: torch.Tensor) -> int:
    flags = _REQUIRES_GRAD if tensor.requires_grad else 0
    return flags | _PARAMETER if type(tensor) is torch.nn.Parameter else flags


def _contiguous_or_none(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return ``tensor`` if its bytes can be sent as they are, or such a copy of one small expanded value; else None."""
    if not tensor.is_cpu or tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj()):
        return None
    if tensor.is_contiguous():
        return tensor
    if tensor.nbytes >= OWN_FRAME_BYTES or any(tensor.stride()):
        return None
    return _contiguous(tensor.detach())  # one expanded value, such as the gradient of a sum


def pack_alone(tensor: torch.Tensor, bare: bool, space: Space | None) -> tuple[TensorMeta, bytes] | None:
    """Return the description and a copy of the bytes of a message's only tensor, if it is small and not empty.

    Returns None if the message needs `TensorPacker`, as when the tensor has 256 KiB or more, or enough for the shared
    memory (``space``). With ``bare``, requires_grad and whether the tensor is a parameter are left out.
    ``tensor`` may be a parameter, but no other subclass.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in _DTYPE_CODES or tensor.is_nested or tensor.__dict__:
        return None
    length = tensor.nbytes
    if not 0 < length < (OWN_FRAME_BYTES if space is None else min(OWN_FRAME_BYTES, space.threshold)):
        return None
    # The first test is enough for almost all tensors.
    is_plain = tensor.is_contiguous() and tensor.is_cpu and not tensor.is_neg() and not tensor.is_conj()
    plain = tensor if is_plain else _contiguous_or_none(tensor)
    if plain is None:
        return None
    flags = 0 if bare or not (tensor.requires_grad or type(tensor) is torch.nn.Parameter) else _flags(tensor)
    meta = TensorMeta(0, _DTYPE_CODES[tensor.dtype], list(tensor.shape), None, 0, flags)
    return meta, _bytes_at(plain.data_ptr(), length)


@dataclass(eq=False, repr=False, slots=True)
class StoragePart:
    """The part of one storage that the tensors of a message use: from byte ``start`` to byte ``end``."""

    number: int
    storage: torch.UntypedStorage
    start: int
    end: int
    device: str | None  # the receiver's device; None for the CPU

    @property
    def is_on_gpu(self) -> bool:
        """True if the part is in a GPU's memory."""
        return self.storage.device.type != "cpu"

    def bytes(self) -> torch.Tensor:
        """Return the part as a tensor of bytes that shares its memory."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return whole.set_(self.storage, self.start, (self.end - self.start,), (1,))

    def on_host(self) -> tuple[int, Any]:
        """Return the part's address on the CPU, and an object that must live as long as the address is used.

        A part of a GPU's memory is copied, on the calling thread's stream, after the work queued there.
        """
        if not self.is_on_gpu:
            return self.storage.data_ptr() + self.start, self.storage
        copy = staging.fresh_host_copy(self.bytes())
        return copy.data_ptr(), copy


class TensorPacker:
    """Collects the tensors of one message; `pack` then copies their bytes."""

    def __init__(self, devices: Devices = CPU_ONLY, space: Space | None = None) -> None:
        """Begin without tensors; ``devices`` maps devices here to the receiver's, which can read ``space``."""
        self.tensors: list[torch.Tensor] = []
        self.slots: list[Slot] = []  # the copies in shared memory, after `pack`
        self.places: list[Place] = []  # the places of these copies
        self._indices: dict[int, int] = {}  # the index of each tensor, by the object's id
        self._devices = devices
        self._space = space

    def add(self, tensor: torch.Tensor) -> int:
        """Add ``tensor`` to the message, unless it is there already; return its index. `pack` copies the bytes."""
        # By ``id``: `tensors` keeps them all alive.
        if (index := self._indices.get(id(tensor))) is None:
            index = self._indices[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return index

    def pack(self) -> tuple[list[TensorMeta], list[tuple[int, int, int]], list[Buffer]]:
        """Copy the bytes; return the tensors' descriptions, the place of each storage, and the frames.

        A place is (frame, offset, length), in bytes. Storages in shared memory are in `slots` instead, and their frames
        count -1, -2, … Only the part of each storage that the tensors use is copied. Raises EncodeError for a tensor on
        a GPU that has no device on the receiver (`Devices`).
        """
        if not self.tensors:
            return [], [], []
        if self._devices.leave_cpu and (packed := self._pack_simple()) is not None:
            return packed
        # The general way: find which tensors share a storage, and which part of each storage they use together.
        storages: dict[int, StoragePart] = {}
        placed: list[tuple[torch.Tensor, StoragePart, str | None]] = []
        values = [self._value(tensor) for tensor in self.tensors]
        users = Counter(tensor.untyped_storage()._cdata for tensor in values)
        for tensor in values:
            device = self._devices.of(tensor.device)
            data, key = tensor, tensor.untyped_storage()._cdata
            start, end = _extent(data)
            # Alone in a large storage, of which it uses little.
            if users[key] == 1 and end - start > max(OWN_FRAME_BYTES, _SPARSE_VIEW_RATIO * data.nbytes):
                data = _contiguous(data)
                key = data.untyped_storage()._cdata
                start, end = _extent(data)
            elif users[key] > 1:
                start -= start % _ALIGN  # because views of one storage may have different dtypes
            storage = storages.get(key)
            if storage is None:
                storage = storages[key] = StoragePart(len(storages), data.untyped_storage(), start, end, device)
            else:
                storage.start, storage.end = min(start, storage.start), max(end, storage.end)
            placed.append((data, storage, device))
        # Describe and copy the tensors only now: the used part of a storage may grow with each tensor.
        metas = [
            self._meta(original, data, storage, device)
            for original, (data, storage, device) in zip(self.tensors, placed, strict=True)
        ]
        shared = {storage.number: place for storage in storages.values() if (place := self._put_from_gpu(storage))}
        rest = [storage for storage in storages.values() if storage.number not in shared]
        # `parts` also keeps alive what is at the addresses.
        parts = [(*storage.on_host(), storage.end - storage.start) for storage in rest]
        copies = {number: parts[number][1] for number, storage in enumerate(rest) if storage.is_on_gpu}
        where, frames = self._copy_out([(address, length) for address, _, length in parts], copies)
        shared |= {storage.number: place for storage, place in zip(rest, where, strict=True)}
        return metas, [shared[number] for number in range(len(storages))], frames

    def _copy_out(
        self, spans: Sequence[tuple[int, int]], copies: Mapping[int, torch.Tensor]
    ) -> tuple[list[tuple[int, int, int]], list[Buffer]]:
        """Copy memory into frames or shared memory; return the place of each piece as in `pack`, and the frames.

        ``spans`` has the address and the length in bytes of each piece. ``copies`` has, by their numbers, the pieces
        that nobody else uses, as tensors of bytes: such a piece becomes a frame without another copy.
        """
        where: list[tuple[int, int, int]] = []
        frames: list[Buffer] = []
        small: list[bytes] = []
        small_size = 0
        shared = -1
        for number, (pointer, length) in enumerate(spans):
            if self._put(pointer, length):
                where.append((-len(self.slots), 0, length))
                continue
            if length >= OWN_FRAME_BYTES:
                where.append((len(frames), 0, length))
                frames.append(_memory_of(copies[number]) if number in copies else _snapshot(pointer, length))
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
        """Copy memory into `slots`; return False without shared memory, without room in it, or for too few bytes."""
        if self._space is None or length < max(self._space.threshold, 1):
            return False
        return self._keep(self._space.put(pointer, length))

    def _put_from_gpu(self, storage: StoragePart) -> tuple[int, int, int] | None:
        """Copy the part of a storage on a GPU into shared memory; return its place, None if it must go another way."""
        if self._space is None or not storage.is_on_gpu or storage.end == storage.start:
            return None
        if not self._keep(self._space.put_from_gpu(storage.bytes(), storage.device)):
            return None
        return -len(self.slots), 0, storage.end - storage.start

    def _keep(self, slot: Slot | None) -> bool:
        if slot is None:
            return False
        self.slots.append(slot)
        self.places.append(slot.place)
        return True

    def _pack_simple(self) -> tuple[list[TensorMeta], list[tuple[int, int, int]], list[Buffer]] | None:
        """Do the work of `pack` for contiguous tensors that share no storage; return None if there are others."""
        metas: list[TensorMeta] = []
        spans: list[tuple[int, int]] = []
        kept: list[torch.Tensor] = []
        for tensor in self.tensors:
            if (plain := _contiguous_or_none(tensor)) is None:
                return None
            kept.append(plain)  # `spans` has only addresses
            metas.append(TensorMeta(len(metas), _DTYPE_CODES[plain.dtype], list(plain.shape), None, 0, _flags(tensor)))
            spans.append((plain.data_ptr(), plain.nbytes))
        if len(spans) > 1 and len({tensor.untyped_storage()._cdata for tensor in self.tensors}) < len(spans):
            return None
        return metas, *self._copy_out(spans, {})

    @staticmethod
    def _value(tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's data, without history, in memory whose bytes are the values."""
        plain = tensor.detach()
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        return plain

    @staticmethod
    def _meta(original: torch.Tensor, data: torch.Tensor, storage: StoragePart, device: str | None) -> TensorMeta:
        """Return the description of a tensor whose ``data`` lies in a storage of the message."""
        offset = int(data.storage_offset()) - storage.start // data.element_size()
        strides = None if offset == 0 and data.is_contiguous() else list(data.stride())
        return TensorMeta(
            storage.number, _DTYPE_CODES[data.dtype], list(data.shape), strides, offset, _flags(original), device
        )


def _snapshot(pointer: int, length: int) -> memoryview:
    """Return a copy of ``length`` bytes at an address. The copy lives as long as the returned view."""
    copy = torch.empty(length, dtype=torch.uint8, device="cpu")
    with_large_pages(copy.data_ptr(), length)
    ctypes.memmove(copy.data_ptr(), pointer, length)  # without the GIL: other threads run meanwhile
    return _memory_of(copy)


def _memory_of(copy: torch.Tensor) -> memoryview:
    """Return the memory of a tensor of bytes on the CPU; it lives as long as the returned view."""
    block = (ctypes.c_char * copy.numel()).from_address(copy.data_ptr())
    block.owner = copy  # type: ignore[attr-defined]  # keeps the memory as long as the view lives
    return memoryview(block).cast("B")


def unpack_tensors(
    metas: Sequence[TensorMeta],
    where: Sequence[tuple[int, int, int]],
    frames: Sequence[Buffer],
    leased: Sequence[Buffer | Lent] = (),
) -> list[torch.Tensor]:
    """Return the tensors of a message, in memory of their own; ``leased`` is the shared memory that came with it.

    ``metas``, ``where`` and ``frames`` are the results of `TensorPacker.pack`.

    Raises ProtocolError if a description does not fit the bytes, and DecodeError for a dtype that this torch lacks, or
    for shared memory that this process cannot read.
    """
    if not metas:
        return []
    users = Counter(meta.buffer for meta in metas)
    shared: dict[int, torch.UntypedStorage] = {}
    tensors = []
    for meta in metas:
        # Each description is checked: another process has made it, and torch would read outside of the memory.
        if not 0 <= meta.buffer < len(where):
            raise _damaged("a tensor refers to a buffer that the message does not have")
        dtype = _DTYPES[meta.dtype] if 0 <= meta.dtype < len(_DTYPES) else None
        if dtype is None:
            raise DecodeError(
                f"this torch ({torch.__version__}) has no dtype number {meta.dtype}; the sender has another "
                "version of torch or nbdist"
            )
        frame, offset, length = where[meta.buffer]
        if frame < 0:
            memory, stays = _leased(leased, -1 - frame, length), True
        elif 0 <= frame < len(frames) and offset >= 0 and 0 <= length <= len(frames[frame]) - offset:
            memory = frames[frame]
            # Channels pass a frame whose memory nothing else uses on as a writable view (`nbdist.channel.assembly`).
            stays = isinstance(memory, memoryview) and not memory.readonly and len(memory) == length
        else:
            raise _damaged("a tensor's bytes lie outside of the message")
        # The tensor is made on these bytes if they stay where they are; others are copied into torch's memory.
        if users[meta.buffer] == 1 and meta.strides is None and isinstance(memory, (bytes, memoryview)):
            if math.prod(meta.shape) * dtype.itemsize != length:
                raise _damaged("a tensor's bytes do not match its shape")
            if stays:
                tensor = torch.frombuffer(memory, dtype=dtype, count=length // dtype.itemsize).resize_(meta.shape)
            else:
                tensor = torch.empty(meta.shape, dtype=dtype, device="cpu")
                _copy_in(tensor.data_ptr(), memory, offset, length)
        else:
            if (storage := shared.get(meta.buffer)) is None:
                if not isinstance(memory, bytes | memoryview):
                    storage = memory.tensor().untyped_storage()
                elif stays:
                    storage = torch.frombuffer(memory, dtype=torch.uint8, count=length).untyped_storage()
                else:
                    storage = torch.UntypedStorage(length)
                    _copy_in(storage.data_ptr(), memory, offset, length)
                storage = shared[meta.buffer] = _on_device(storage, meta.device)
            tensor = _view(storage, dtype, meta)
        tensors.append(_finished(tensor, meta))
    return tensors


def unpack_alone(
    meta: TensorMeta, where: Sequence[tuple[int, int, int]], frames: Sequence[Buffer]
) -> torch.Tensor | None:
    """Return the tensor of a message with one small tensor in one frame; None leaves it to `unpack_tensors`."""
    if meta.strides is not None or meta.device is not None or not frames or list(where) != [(0, 0, len(frames[0]))]:
        return None
    dtype = _DTYPES[meta.dtype] if 0 <= meta.dtype < len(_DTYPES) else None
    length = len(frames[0])
    if (
        meta.buffer
        or dtype is None
        or length >= _COPY_WITH_GIL_BYTES
        or math.prod(meta.shape) * dtype.itemsize != length
    ):
        return None
    tensor = torch.empty(meta.shape, dtype=dtype, device="cpu")
    _copy_held(tensor.data_ptr(), frames[0], length)
    return _finished(tensor, meta) if meta.flags else tensor


def _damaged(why: str) -> ProtocolError:
    return ProtocolError(
        f"{why}, so the message was dropped. It is damaged, or its sender has another version of nbdist: install the "
        "same version everywhere"
    )


def _leased(leased: Sequence[Buffer | Lent], index: int, length: int) -> Buffer | Lent:
    """Return piece ``index`` of a message's shared memory, checked to have at least ``length`` bytes."""
    if not 0 <= index < len(leased):
        raise _damaged("a tensor refers to shared memory that the message does not have")
    memory = leased[index]
    if isinstance(memory, Unreadable):
        raise DecodeError(
            f"the sender's shared memory cannot be read in this process: {memory.why}. Send the value again; if that "
            "does not help, give the sender arena_bytes=0 in RpcBackendOptions: then it shares no memory"
        )
    if not 0 < length <= len(memory):
        raise _damaged("a tensor's bytes lie outside of the message")
    return memory


def _finished(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    if meta.device is not None:
        tensor = move_to(tensor, meta.device)
    if meta.flags & _PARAMETER:
        tensor = torch.nn.Parameter(tensor, requires_grad=bool(meta.flags & _REQUIRES_GRAD))
    elif meta.flags & _REQUIRES_GRAD:
        tensor.requires_grad_()
    return tensor


def _on_device(storage: torch.UntypedStorage, device: str | None) -> torch.UntypedStorage:
    """Return a storage on ``device`` (None means the CPU): itself, or a copy that all tensors of the storage share."""
    if (device or "cpu") == str(storage.device):
        return storage
    part = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
    there: torch.UntypedStorage = move_to(part, device or "cpu").untyped_storage()
    return there


def move_to(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor on ``device``, complete when this returns, so that any thread may use it on any stream."""
    if (there := staging.to_gpu(tensor, device)) is not None:
        return there
    moved = tensor.to(device)
    # torch waits for a copy between the CPU and a GPU, but not for one from GPU to GPU.
    if tensor.is_cuda and moved.is_cuda and moved is not tensor:
        torch.cuda.current_stream(moved.device).synchronize()
    return moved


def _view(storage: torch.UntypedStorage, dtype: torch.dtype, meta: TensorMeta) -> torch.Tensor:
    """Return a view of a storage as its description says; raise ProtocolError if the storage is too small.

    For tensors that share a buffer, have strides, or are in a GPU's shared memory; others are made without a view.
    """
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    strides = meta.strides
    if strides is None:  # contiguous
        strides = []
        step = 1
        for n in reversed(meta.shape):
            strides.insert(0, step)
            step *= max(n, 1)
    # Checked here, because torch would enlarge a storage that is too small.
    last = sum((n - 1) * stride for n, stride in zip(meta.shape, strides, strict=False))
    if (
        len(strides) != len(meta.shape)
        or min((meta.offset, *meta.shape, *strides)) < 0
        or (0 not in meta.shape and (meta.offset + last + 1) * dtype.itemsize > storage.nbytes())
    ):
        raise _damaged("a tensor's bytes do not match its shape")
    return tensor.set_(storage, meta.offset, meta.shape, strides)


def _copy_in(pointer: int, frame: Buffer, offset: int, length: int) -> None:
    """Copy ``length`` bytes of a frame, from ``offset`` on, to an address."""
    if not length:
        return
    source: int | bytes
    if isinstance(frame, memoryview) and not frame.readonly:
        source = ctypes.addressof(ctypes.c_char.from_buffer(frame, offset))
    else:
        source = frame = bytes(frame)  # without a copy, if it is bytes
        if offset:
            # ctypes takes a bytes object as the address of its first byte; for another byte the address is needed.
            address = ctypes.cast(ctypes.c_char_p(frame), ctypes.c_void_p).value
            assert address is not None  # a bytes object always has an address
            source = address + offset
    (_copy_held if length < _COPY_WITH_GIL_BYTES else ctypes.memmove)(pointer, source, length)
