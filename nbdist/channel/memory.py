"""Memory that processes of one host share: anonymous files, made by one and opened by the others through ``/proc``.

Not files in ``/dev/shm``, of which containers give 64 MB, and which who is killed leaves behind. And not descriptors
passed over a unix socket, which would tie tensors to one channel: a file is opened through its maker's ``/proc``
entry, whatever way the message went. The kernel allows that to processes of the same user; what is opened is checked
to be the file that was meant, and sealed, so that nobody can make it shorter under those who read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import sys
from pathlib import Path

from nbdist.channel.resources import explain
from nbdist.errors import NbdistError

__all__ = ["Mapping", "MemoryFailure", "available", "create", "is_available", "open_of", "total"]

_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
_MADV_REMOVE = 9
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MemoryFailure(NbdistError):
    """Shared memory cannot be had."""


def is_available() -> bool:
    """Whether this system has what is needed."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS") and os.path.isdir("/proc/self/fd")


def total() -> int:
    """Return how much memory, in bytes, this process may have: all of the machine's or of its control group's."""
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_of_group("memory.max"), sys.maxsize)


def available() -> int:
    """Return how much more memory, in bytes, this process could have now, before the kernel has to kill somebody."""
    found = [total()]
    with contextlib.suppress(OSError, ValueError, StopIteration):  # nor can it be read while the file table is full
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    for limit, used in zip(_of_group("memory.max"), _of_group("memory.current"), strict=False):
        found.append(limit - used)
    return max(0, min(found))


def _of_group(name: str) -> list[int]:
    """Return a number of this process's control group; none where there is no such file, or it says "max"."""
    with contextlib.suppress(OSError, ValueError):
        return [int(Path("/sys/fs/cgroup", name).read_text())]
    return []


class Mapping:
    """A file as this process's memory, for as long as something refers to it."""

    # By hand: Python's own mmap would keep a second descriptor of the file for as long.
    __slots__ = ("_unmap", "address", "size")

    def __init__(self, file: int, size: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, file, 0)
        if address == _FAILED or address is None:
            error = ctypes.get_errno()
            raise MemoryFailure(f"cannot map {size} bytes: {explain(OSError(error, os.strerror(error)))}")
        self.address: int = address
        self.size = size
        self._unmap = _libc.munmap  # by the time that the last tensor dies, this module may be no more

    def empty(self, offset: int, size: int) -> None:
        """Give up the pages there, for all who have them mapped."""
        _libc.madvise(self.address + offset, size, _MADV_REMOVE)  # where it cannot be done, they stay

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._unmap(self.address, self.size)


def create(name: str, size: int) -> int:
    """A new file of that size, which takes memory as it is written to."""
    try:
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise MemoryFailure(f"cannot make shared memory: {explain(error)}") from error
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _seals())
    except OSError as error:
        os.close(file)
        raise MemoryFailure(f"cannot make shared memory of {size} bytes: {explain(error)}") from error
    return file


def _seals() -> int:
    return int(sum(getattr(fcntl, seal) for seal in _SEALS))


def open_of(pid: int, file: int, name: str, size: int) -> Mapping:
    """The file that process ``pid`` has under that number; it must be the one of that name and size."""
    opened = -1
    try:
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        if (
            os.readlink(f"/proc/self/fd/{opened}") != f"/memfd:{name} (deleted)"
            or os.fstat(opened).st_size != size
            or ~fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _seals()
        ):
            raise MemoryFailure(f"file {file} of process {pid} is not its {name}")
        return Mapping(opened, size)
    except OSError as error:
        raise MemoryFailure(f"cannot open {name} of process {pid}: {explain(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            os.close(opened)
