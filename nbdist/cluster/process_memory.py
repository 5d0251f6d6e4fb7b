"""Measures the memory of a process as Linux counts it: what is its own, and the shared memory that it has mapped.

::

    resident pages ─┬─ shared with other processes, such as torch's code and what a forked worker has not changed
                    ├─ its own                                  Usage.private, what `%dist_panel` shows
                    └─ of shared memory: arenas, /dev/shm       Usage.shared, counted by every process that maps it
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

__all__ = ["Regions", "Usage", "mark_start", "measure", "own_bytes", "resident_bytes", "started_with"]

_LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...(.) \S+ \S+ \S+ *(.*)$|^(Rss|Private_\w+): +(\d+) kB$", re.MULTILINE)
_SHARED_FILES = (b"/memfd:", b"/dev/shm/", b"/dev/zero", b"/SYSV")
_SMALL = 1 << 18
"""Bytes of a buffer that is taken to be resident as a whole."""
_PART = 1 << 26
"""Bytes for which the kernel is asked at once; the answer takes a byte for each page."""

_libc = ctypes.CDLL(None)


class Usage(msgspec.Struct, frozen=True):
    """Bytes that a process occupies."""

    private: int
    """Pages of no other process, those of shared memory aside."""
    shared: int
    """Pages of shared memory that it has mapped."""

    @property
    def total(self) -> int:
        """Both together."""
        return self.private + self.shared


@dataclass(frozen=True)
class Regions:
    """Where the shared memory of this process lies: starts and ends of its mappings, in order."""

    starts: Sequence[int] = ()
    ends: Sequence[int] = ()

    def contain(self, address: int) -> bool:
        """Return whether an address is in shared memory."""
        at = bisect_right(self.starts, address) - 1
        return at >= 0 and address < self.ends[at]


def measure() -> tuple[Usage | None, Regions]:
    """Measure this process, which takes about 20 ms. The usage is None where there is no ``/proc``."""
    try:
        with open("/proc/self/smaps", "rb") as file:
            return parse_smaps(file.read())
    except OSError:
        return None, Regions()


def parse_smaps(text: bytes) -> tuple[Usage, Regions]:
    """Read what the kernel says of every mapping of a process."""
    private = shared = 0
    starts, ends = [], []
    is_shared = False
    for start, end, mode, name, field, amount in _LINE.findall(text):
        if start:
            is_shared = mode == b"s" and name.startswith(_SHARED_FILES)
            if is_shared:
                starts.append(int(start, 16))
                ends.append(int(end, 16))
        elif is_shared:
            shared += int(amount) if field == b"Rss" else 0
        elif field != b"Rss":
            private += int(amount)
    return Usage(private * 1024, shared * 1024), Regions(starts, ends)


def own_bytes(pid: int | str | None = "self") -> int | None:
    """Return the bytes that no other process shares; None where that cannot be known."""
    with contextlib.suppress(OSError, ValueError):
        if pid is not None:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                return sum(int(line.split()[1]) for line in file if line.startswith("Private_")) * 1024
    return None


def resident_bytes(address: int, nbytes: int) -> int:
    """Return how many of a buffer's bytes are in memory: not those never written to, nor those swapped out."""
    if nbytes < _SMALL:
        return nbytes
    pages, page = 0, mmap.PAGESIZE
    first = address - address % page
    for start in range(first, address + nbytes, _PART):
        length = min(_PART, address + nbytes - start)
        answer = (ctypes.c_ubyte * -(-length // page))()
        if _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), answer):
            return nbytes  # it is not there any more, or the kernel does not say
        pages += bytes(answer).count(1)
    return min(nbytes, pages * page)


_start: int | None = None


def mark_start() -> None:
    """Remember what this process uses now: what it needs before its user has done anything."""
    global _start
    _start = own_bytes()


def started_with() -> int | None:
    """Return the bytes that this process used at `mark_start`; None where that is not known."""
    return _start
