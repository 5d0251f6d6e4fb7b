"""Makes memory for large data without filling it with zeros, mapped in large pages; and copies large data.

Linux maps new memory page by page, at the first write to each page of 4 KiB. For 64 MB these are 16,000 interruptions,
which take longer than the copy of the bytes. With pages of 2 MiB there are 32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_WORTH_WHILE = 4 << 20  # bytes, from which on the kernel is asked for large pages
_PAGE = 4096
# Tensors begin at a multiple of this address: at other addresses, vectorised arithmetic differs in the last bit.
_ALIGNED = 64
_MADV_HUGEPAGE = 14

_WITHOUT_GIL = 64 * 1024  # bytes, from which on a copy lets other threads run

# `bytearray(length)` would fill the memory with zeros, and so map all of it.
_new: Callable[[None, int], bytearray] = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyByteArray_FromStringAndSize", ctypes.pythonapi)
)
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def unfilled(length: int) -> memoryview:
    """Return writable memory of ``length`` bytes, with arbitrary contents, at an address that is a multiple of 64.

    The memory lives as long as the view, or whatever is made of it. Large memory is mapped when first written to, so it
    takes no room before. Raises MemoryError if there are not as many addresses.
    """
    made = _new(None, length + _ALIGNED)
    address = ctypes.addressof(ctypes.c_char.from_buffer(made))
    with_large_pages(address, length)
    begin = -address % _ALIGNED
    return memoryview(made)[begin : begin + length]


def copy(target: memoryview, source: memoryview) -> None:
    """Copy the bytes of ``source`` to ``target``, which has the same length. Other threads run during a long copy."""
    if len(source) < _WITHOUT_GIL or source.readonly:  # ctypes takes no memory that is read-only
        target[:] = source
    else:
        ctypes.memmove((ctypes.c_char * 1).from_buffer(target), (ctypes.c_char * 1).from_buffer(source), len(source))


def with_large_pages(address: int, length: int) -> None:
    """Ask the kernel to map ``length`` bytes of new memory at ``address`` in large pages, if that is worth while.

    Nothing is promised: a system may have no large pages, or none left. The contents stay.
    """
    if length < _WORTH_WHILE:
        return
    # Only whole pages: `madvise` refuses an address within one, and the rest of the page belongs to others.
    begin = -(-address // _PAGE) * _PAGE
    end = (address + length) // _PAGE * _PAGE
    _madvise(begin, end - begin, _MADV_HUGEPAGE)
