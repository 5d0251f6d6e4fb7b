"""Makes memory that processes of one host share.

Shared memory is an anonymous file (``memfd_create``). One process makes it. Another process opens it through the
first one's entry in ``/proc``, which the kernel allows to processes of the same user. It checks that it has opened the
right file, and that the file is sealed, so that no process can make it shorter while others read it.

Two more common ways do not work here. Containers often allow only 64 MB in ``/dev/shm``, and files there outlive a
killed process. Descriptors can be passed over unix sockets only, but tensors must not depend on the channel.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os

from nbdist import amounts
from nbdist.channel.resources import explain
from nbdist.errors import NbdistError

# Without the seals, a process that makes the file shorter would kill those that read it (SIGBUS).
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
_MADV_REMOVE = 9  # Linux's number for the advice to free pages, in the file as well
_FAILED = ctypes.c_void_p(-1).value  # the address that a failed mmap returns

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MemoryFailure(NbdistError):
    """The system refuses shared memory, or the memory of another process cannot be opened.

    A sender sends the bytes another way; a receiver raises DecodeError with this text.
    """


def is_available() -> bool:
    """Return whether this system has anonymous files, seals and ``/proc``."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS") and os.path.isdir("/proc/self/fd")


class Mapping:
    """A file that is mapped into this process's memory until the object is collected."""

    # Python's own mmap keeps one more descriptor of the file open for each mapping.
    __slots__ = ("_unmap", "address", "size")

    def __init__(self, file: int, size: int) -> None:
        """Map ``size`` bytes of ``file``, which the caller may then close. May raise MemoryFailure."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, file, 0)
        if address == _FAILED or address is None:
            error = ctypes.get_errno()
            raise MemoryFailure(f"cannot map {amounts.size(size)}: {explain(OSError(error, os.strerror(error)))}")
        self.address: int = address
        self.size = size
        self._unmap = _libc.munmap  # the last tensor may be collected after this module's globals are gone

    def empty(self, offset: int, size: int) -> None:
        """Free the pages of a part of the file, in every process that has it mapped. They read as zeros afterwards."""
        _libc.madvise(self.address + offset, size, _MADV_REMOVE)  # if the kernel refuses, the pages stay as they are

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._unmap(self.address, self.size)


def create(name: str, size: int) -> int:
    """Return a new anonymous file, which the caller closes. It takes memory only as it is written to.

    Raises MemoryFailure if the system refuses.
    """
    try:
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise MemoryFailure(f"cannot make shared memory: {explain(error)}") from error
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _seals())
    except OSError as error:
        os.close(file)
        raise MemoryFailure(f"cannot make {amounts.size(size)} of shared memory: {explain(error)}") from error
    return file


def _seals() -> int:
    return int(sum(getattr(fcntl, seal) for seal in _SEALS))


def open_of(pid: int, file: int, name: str, size: int) -> Mapping:
    """Map a file that process ``pid`` has open under the number ``file``.

    Raises MemoryFailure if it cannot be opened or mapped, or if it does not have this name, size and all seals.
    """
    opened = -1
    try:
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        # By now, the process may have ended, and another one may have its pid: check what was opened.
        if (
            os.readlink(f"/proc/self/fd/{opened}") != f"/memfd:{name} (deleted)"
            or os.fstat(opened).st_size != size
            or ~fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _seals()
        ):
            raise MemoryFailure(f"file {file} of process {pid} is not its shared memory {name}, or has another size")
        return Mapping(opened, size)
    except OSError as error:
        raise MemoryFailure(f"cannot open {name} of process {pid}: {explain(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            os.close(opened)
