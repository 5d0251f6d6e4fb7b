"""Tells how much of its machine this process may use: cores, memory, files, ports, a GPU driver.

Linux limits the processes of a container by *control groups*. These are nested folders, and ``/proc/self/cgroup`` names
those of a process. A group's limit holds for all groups inside it, so the lowest limit counts. There are two versions
of control groups, and a machine may use both::

                          version 2, in /sys/fs/cgroup       version 1, in /sys/fs/cgroup/<controller>
    memory: limit         memory.max                         memory.limit_in_bytes
            used          memory.current                     memory.usage_in_bytes
            cached files  inactive_file in memory.stat       total_inactive_file in memory.stat
    cores:  limit         cpu.max: "<quota> <period>"        cpu.cfs_quota_us and cpu.cfs_period_us

In a container, ``/proc/self/cgroup`` may name the group as it is called outside the container. Then no folder has that
name, and the controller's own folder is the group's.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from nbdist import amounts

# Messages of fewer bytes are not compared with the memory that is left: reading that takes 0.1 to 0.3 ms, and 1 ms in a
# container.
_COMPARED_WITH_MEMORY = 64 * 1024 * 1024

_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DRIVER = Path("/proc/driver/nvidia/version")
_GROUPS, _PROC = Path("/sys/fs/cgroup"), Path("/proc")
# The names, in the two versions, of the file of the limit, the file of the used bytes, and the key in memory.stat.
_NAMES_2 = "memory.max", "memory.current", "inactive_file"
_NAMES_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def open_files() -> int:
    """Return how many files this process has open; 0 if the system does not tell."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 0


def free_ports() -> tuple[int, int] | None:
    """Return the first and the last port that Linux gives to programs that ask for any port; None if not known."""
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, _PORTS.read_text().split())
        return first, last
    return None


def has_nvidia_driver() -> bool:
    """Return whether NVIDIA's driver runs on this machine."""
    return _DRIVER.exists()


def cores() -> int:
    """Return how many cores this process may use at once, at least 1; its control groups' limit is rounded down."""
    return max(1, int(min(len(os.sched_getaffinity(0)), _quota_of_cores())))


@functools.cache  # every backward pass asks
def _quota_of_cores() -> float:
    """Return how many cores the control groups of this process may use; infinity if they set no limit."""
    return min([quota for folder in _groups("cpu") if (quota := _quota(folder)) is not None], default=math.inf)


def memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its control groups' limit if lower."""
    return min([_memory_of_the_machine(), *(limit for limit, _ in _limits_of_memory())])


def available_memory() -> int:
    """Return the bytes of memory that this process can still take before the kernel must kill a process."""
    found = [_memory_of_the_machine()]
    with contextlib.suppress(OSError, ValueError, StopIteration):  # reading fails while the file table is full
        lines = (_PROC / "meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    found += [limit - used for limit, used in _limits_of_memory()]
    return max(0, min(found))


def require_memory(length: int) -> None:
    """Raise MemoryError if a message of ``length`` bytes has 64 MiB or more and exceeds the memory that is left."""
    if length >= _COMPARED_WITH_MEMORY and length > (left := available_memory()):
        raise MemoryError(
            f"a message of {amounts.size(length)} does not fit: the machine has {amounts.size(left)} of memory "
            "left. Free some, or send less at once"
        )


def limits() -> str:
    """Return in words where this process may use less than the machine has, such as ``"2 of 64 cores"``, else ""."""
    mine, all_of_them = cores(), os.cpu_count() or 1
    size, whole = memory(), _memory_of_the_machine()
    found = [f"{mine} of {amounts.counted(all_of_them, 'core')}"] if mine < all_of_them else []
    if size < whole:
        found.append(f"{amounts.size(size)} of {amounts.size(whole)} of memory")
    return " and ".join(found)


def _memory_of_the_machine() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits_of_memory() -> Iterator[tuple[int, int]]:
    """Yield, for each control group that limits memory, the limit and the used bytes that the kernel cannot free."""
    for folder in _groups("memory"):
        names = _NAMES_2 if (folder / _NAMES_2[0]).exists() else _NAMES_1
        with contextlib.suppress(OSError, ValueError):  # the file is missing, or says "max"
            most = int((folder / names[0]).read_text())
            # Version 1's number for no limit. Go on at once: reading the used bytes would take 1 ms.
            if most >= _memory_of_the_machine():
                continue
            taken = 0
            with contextlib.suppress(OSError, ValueError, KeyError):
                taken = int((folder / names[1]).read_text())
                lines = (folder / "memory.stat").read_text().splitlines()
                # The kernel drops the contents of files that no process needs before it kills a process.
                taken -= int(dict(line.split(maxsplit=1) for line in lines)[names[2]])
            yield most, max(0, taken)


def _quota(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):  # the file is missing, or says "max"
        quota, period = map(int, (folder / "cpu.max").read_text().split())
        return quota / period
    with contextlib.suppress(OSError, ValueError):
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else None
    return None


def _groups(controller: str) -> Sequence[Path]:
    """Return the folders of this process's control groups that may limit ``controller``, "memory" or "cpu"."""
    with contextlib.suppress(OSError, ValueError):  # outside of the cached function: a failure must not be cached
        return _read_groups(controller)
    return ()


@functools.cache  # a channel asks while it holds the lock of its reading threads
def _read_groups(controller: str) -> Sequence[Path]:
    """Read the folders for `_groups`, without those that have no files of the controller."""
    found = []
    for line in (_PROC / "self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        tops = [_GROUPS / controllers, _GROUPS / controller] if controllers else [_GROUPS, _GROUPS / "unified"]
        inner = PurePosixPath(name.lstrip("/"))
        # Every parent counts. The top does, too, in a container that calls its group as it is called outside.
        parts = [inner, *inner.parents] if ".." not in inner.parts else [PurePosixPath()]
        found += [top / part for top in tops for part in parts]
    return tuple(dict.fromkeys(folder for folder in found if any(folder.glob(f"{controller}.*"))))
