"""Makes memory of a GPU that processes of one host share.

CUDA's driver makes such memory (``cuMemCreate``) and gives a descriptor for it, which another process can map. The
memory lives as long as any process has it mapped, or has a descriptor of it. So a tensor in it outlives the process
that made it. With ``cudaIpcGetMemHandle``, which torch.multiprocessing uses, it would not: there, the memory ends with
the process that made it.

The driver's functions are called with ctypes, because torch has no functions for this.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from nbdist import amounts
from nbdist.channel.shared_memory import quiet
from nbdist.channel.shared_memory.mapping import MemoryFailure

# Numbers of the driver's, from its header cuda.h.
_PINNED = 1  # memory that stays where it is made
_DESCRIPTOR = 1  # sharing by a file descriptor
_ON_DEVICE = 1  # a place on a GPU
_READ_AND_WRITE = 3
_CAN_MAP, _CAN_EXPORT = 102, 103  # attributes of a GPU: it can map memory, and share memory by a descriptor
GRANULE = 1 << 21  # the driver makes and maps multiples of this many bytes: 2 MiB, on all GPUs so far


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("security", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@functools.cache
def cuda_driver() -> Any:
    """Return CUDA's driver as a ctypes library, started; raise OSError if there is none."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    return driver


def _ask(name: str, *args: Any) -> None:
    """Call a function of the driver. May raise MemoryFailure."""
    if number := getattr(cuda_driver(), name)(*args):
        word = ctypes.c_char_p()
        cuda_driver().cuGetErrorName(number, ctypes.byref(word))
        raise MemoryFailure(f"CUDA refuses {name}: {(word.value or str(number).encode()).decode()}")


def is_available(index: int) -> bool:
    """Return whether the driver can share memory of GPU ``index``, as torch counts, between processes."""
    return not why_unavailable(index)


def why_unavailable(index: int) -> str:
    """Return why the driver cannot share memory of GPU ``index`` between processes; an empty text if it can."""
    try:
        device, answer = ctypes.c_int(), ctypes.c_int()
        _ask("cuDeviceGet", ctypes.byref(device), index)
        for attribute, what in ((_CAN_MAP, "map memory by its handle"), (_CAN_EXPORT, "export memory as a file")):
            _ask("cuDeviceGetAttribute", ctypes.byref(answer), attribute, device)
            if not answer.value:
                return f"CUDA's driver says that the GPU cannot {what}"
    except (MemoryFailure, OSError, AttributeError) as error:
        return str(error)
    return ""


def uuids() -> list[str]:
    """Return the ids of the GPUs that torch sees, the same in all processes of the host. Starts CUDA."""
    try:
        return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError, AttributeError):  # as in a process forked from one that has started CUDA
        return []


class GpuMapping:
    """Memory of a GPU that is mapped into this process while the object lives."""

    __slots__ = ("_process", "_unmap", "address", "index", "size", "whole")

    def __init__(self, handle: ctypes.c_ulonglong, index: int, size: int) -> None:
        """Map ``size`` bytes behind a handle for GPU ``index``, and release the handle. May raise MemoryFailure."""
        driver = cuda_driver()
        address, length = ctypes.c_ulonglong(), ctypes.c_size_t(_rounded(size))
        nothing = ctypes.c_ulonglong(0)
        try:
            with contextlib.ExitStack() as undo:
                _ask("cuMemAddressReserve", ctypes.byref(address), length, ctypes.c_size_t(0), nothing, nothing)
                undo.callback(driver.cuMemAddressFree, address, length)
                _ask("cuMemMap", address, length, ctypes.c_size_t(0), handle, nothing)
                undo.callback(driver.cuMemUnmap, address, length)
                access = _Access(_Location(_ON_DEVICE, index), _READ_AND_WRITE)
                _ask("cuMemSetAccess", address, length, ctypes.byref(access), ctypes.c_size_t(1))
                memory = undo.pop_all()
        finally:
            driver.cuMemRelease(handle)
        self.address: int = address.value
        self.index = index
        self.size = size
        self.whole: torch.Tensor | None = None  # the whole memory as a tensor of bytes, from the first `part` on
        self._process = os.getpid()
        # Not at once: work of the GPU on this memory may still wait in its streams.
        self._unmap = partial(quiet.when_done, index, memory.close)

    def part(self, offset: int, length: int) -> torch.Tensor:
        """Return a part as a tensor of bytes. The tensor does not keep the mapping alive; the caller must."""
        if self.whole is None:
            with torch.inference_mode(False):  # a tensor made in inference mode could be written to only there
                self.whole = torch.as_tensor(_Bytes(self.address, self.size), device=f"cuda:{self.index}")
        return self.whole[offset : offset + length]

    def empty(self, offset: int, size: int) -> None:
        """Do nothing: memory of a GPU is freed in whole segments only."""

    def __del__(self, _getpid: Any = os.getpid) -> None:  # a default outlives this module's globals
        if hasattr(self, "_unmap") and _getpid() == self._process:  # a forked process cannot use CUDA
            self._unmap()


class _Bytes:
    """Bytes at an address of a GPU, in the form that torch accepts."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class GpuBytes(_Bytes):
    """A leased block of a GPU's memory. It lives as long as a tensor made of it, and keeps ``lease`` alive."""

    def __init__(self, mapping: GpuMapping, offset: int, length: int, lease: object) -> None:
        super().__init__(mapping.address + offset, length)
        self._length = length
        self._device = f"cuda:{mapping.index}"
        self._lease = lease

    def __len__(self) -> int:
        return self._length

    def tensor(self) -> torch.Tensor:
        """Return the bytes as a tensor, which keeps this object alive."""
        return torch.as_tensor(self, device=self._device)


def create(index: int, size: int) -> tuple[int, GpuMapping]:
    """Make ``size`` bytes of memory on GPU ``index``; return a descriptor, which the caller closes, and its mapping.

    Raises MemoryFailure if the driver refuses, as when the GPU is full.
    """
    wanted = _Properties(_PINNED, _DESCRIPTOR, _Location(_ON_DEVICE, index))
    handle, descriptor = ctypes.c_ulonglong(), ctypes.c_int()
    with _started(index):
        try:
            _ask(
                "cuMemCreate",
                ctypes.byref(handle),
                ctypes.c_size_t(_rounded(size)),
                ctypes.byref(wanted),
                ctypes.c_ulonglong(0),
            )
        except MemoryFailure as error:
            raise MemoryFailure(f"cannot make {amounts.size(size)} of memory on GPU {index}: {error}") from None
        try:
            _ask("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _DESCRIPTOR, ctypes.c_ulonglong(0))
        except MemoryFailure:
            cuda_driver().cuMemRelease(handle)
            raise
        try:
            return descriptor.value, GpuMapping(handle, index, size)
        except BaseException:  # Ctrl-C, too, would leave the descriptor open
            os.close(descriptor.value)
            raise


def open_descriptor(descriptor: int, index: int, size: int) -> GpuMapping:
    """Map memory that another process made, on GPU ``index`` of this one. ``descriptor`` stays open."""
    handle = ctypes.c_ulonglong()
    with _started(index):
        _ask("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), _DESCRIPTOR)
        return GpuMapping(handle, index, size)


@contextlib.contextmanager
def _started(index: int) -> Iterator[None]:
    """Let the driver's functions use GPU ``index``, for this thread. Raises MemoryFailure if CUDA cannot be used."""
    try:
        with torch.cuda.device(index):
            # Lets torch start CUDA, and report what is wrong with it, before the driver is used.
            torch.cuda.current_stream(index).query()
            yield
    except MemoryFailure:
        raise
    except RuntimeError as error:
        raise MemoryFailure(f"CUDA cannot be used now: {error}") from error


def _rounded(size: int) -> int:
    return -(-size // GRANULE) * GRANULE
