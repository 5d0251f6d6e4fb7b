"""Finds the processes of a group, reads their CPU time, and pins them to cores. On Linux only."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

_PROC = Path("/proc")


def group(leader: int) -> list[int]:
    """Return the processes of a process group: its leader, then the others from the oldest on."""
    found = []
    for folder in _PROC.glob("[0-9]*"):
        try:
            # After the name, which may hold anything, in parentheses: state, parent, group.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[2]) == leader and fields[0] != "Z":
            found.append(int(folder.name))
    return sorted(found, key=lambda pid: (pid != leader, pid))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, all its threads, to the nanosecond.

    Raises:
        OSError: There is no such process, or this system has no such clock.
    """
    # The kernel's number for the CPU clock of a process, as clock_getcpuclockid(3) makes it; Python has no name for it.
    return time.clock_gettime((~pid << 3) | 2)


def cpu_of_group(pids: Sequence[int]) -> tuple[float, float] | None:
    """Return the CPU time of the first process, and of all others together; None where it cannot be read."""
    try:
        first, *others = (cpu_seconds(pid) for pid in pids)
    except (OSError, ValueError):
        return None
    return first, sum(others)


def allow(pid: int, cores: Iterable[int]) -> None:
    """Let a process, all its threads, run on these cores alone. Threads that start later inherit it.

    Raises:
        OSError: The system refuses.
    """
    for thread in (_PROC / str(pid) / "task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
