"""Measures the memory of a process as Linux counts it: its own memory, and the shared memory that it has mapped.

::

    resident pages ─┬─ shared with other processes, such as torch's code and what a forked worker has not changed
                    ├─ its own                                  Usage.private
                    └─ of shared memory: arenas, /dev/shm       Usage.shared, counted by every process that maps it

`%dist_memory` shows both. `%dist_panel` shows `own_bytes`: `Usage.private`, plus the pages of shared memory that no
other process has mapped.
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

# The first line of a mapping in ``/proc/PID/smaps``, or one of its amounts.
_LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...(.) \S+ \S+ \S+ *(.*)$|^(Rss|Private_\w+): +(\d+) kB$", re.MULTILINE)
_SHARED_FILES = (b"/memfd:", b"/dev/shm/", b"/dev/zero", b"/SYSV")  # how the names of shared memory's files begin
_SMALL_BUFFER = 1 << 18  # buffers below this number of bytes count as resident without asking the system
_BYTES_AT_A_TIME = 1 << 26  # bytes that the system is asked for at a time; it answers with one byte for each page

_libc = ctypes.CDLL(None)


class Usage(msgspec.Struct, frozen=True):
    """The memory that a process uses, in bytes."""

    private: int
    """Bytes in pages that no other process has, without shared memory."""
    shared: int
    """Bytes in pages of shared memory that the process has mapped."""

    @property
    def total(self) -> int:
        """The sum of `private` and `shared`."""
        return self.private + self.shared


@dataclass(frozen=True)
class Regions:
    """The places of this process's shared memory: starts and ends of its mappings, in ascending order."""

    starts: Sequence[int] = ()
    ends: Sequence[int] = ()

    def contain(self, address: int) -> bool:
        """Return whether an address is in shared memory."""
        at = bisect_right(self.starts, address) - 1
        return at >= 0 and address < self.ends[at]


def resident() -> int:
    """Return the bytes that this process has in memory, shared ones included; 0 if the system does not tell."""
    # Takes 20 µs; the other functions of this module take milliseconds, or more in a large process.
    with contextlib.suppress(OSError), open("/proc/self/statm") as counts:
        return int(counts.read().split()[1]) * mmap.PAGESIZE
    return 0


def measure() -> tuple[Usage | None, Regions]:
    """Return the memory that this process uses, and the places of its shared memory; takes about 20 ms."""
    try:
        with open("/proc/self/smaps", "rb") as file:
            return parse_smaps(file.read())
    except OSError:  # there is no /proc
        return None, Regions()


def parse_smaps(text: bytes) -> tuple[Usage, Regions]:
    """Return the usage and the shared memory that the text of ``/proc/PID/smaps`` describes."""
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
    """Return the bytes of a process that no other process shares; None if ``pid`` is None or ``/proc`` has no count."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup") as file:  # there is no /proc/None
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_")) * 1024
    return None


def resident_bytes(address: int, nbytes: int) -> int:
    """Return how many of a buffer's bytes are in memory: pages never written to, or swapped out, do not count."""
    if nbytes < _SMALL_BUFFER:
        return nbytes
    pages, page = 0, mmap.PAGESIZE
    first = address - address % page
    for start in range(first, address + nbytes, _BYTES_AT_A_TIME):
        length = min(_BYTES_AT_A_TIME, address + nbytes - start)
        answer = (ctypes.c_ubyte * -(-length // page))()
        if _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), answer):
            return nbytes  # the buffer is gone, or the system does not answer: count all of it
        pages += bytes(answer).count(1)
    return min(nbytes, pages * page)


_start: int | None = None


def mark_start() -> None:
    """Remember how much this process uses now, before its user has done anything, for `started_with`."""
    global _start
    _start = own_bytes()


def started_with() -> int | None:
    """Return the bytes that this process used at `mark_start`; None before that, or where the system has no count."""
    return _start
