"""Collects the stacks of processes that hang: Python's, C's where there is gdb, and the kernel's words on each thread.

A process shows its Python stacks only if it has called `listen`, or was forked by one that has.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

SIGNAL = signal.SIGUSR2
_KERNEL = ("comm", "wchan", "syscall", "stack")
_C_FRAMES = "thread apply all backtrace 40"


def listen() -> None:
    """Have this process, and those it forks, print all Python stacks to their standard error at `SIGNAL`.

    The handler is C code and takes no GIL: a process whose GIL is stuck prints as well.
    """
    faulthandler.register(SIGNAL, file=2, all_threads=True)


def session(leader: int) -> list[int]:
    """Return the processes of the session that ``leader`` leads."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # the process has ended
                continue
            if int(fields[3]) == leader:
                found.append(int(entry.name))
    return sorted(found)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or is a zombie that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def collect(pids: Iterable[int], *, python: bool = True) -> str:
    """Return what the kernel and gdb say of these processes, and ask each for its Python stacks.

    Those go to the standard error of the process itself, hence ``python=False`` for a process that does not `listen`:
    the signal would end it.
    """
    pids = list(pids)
    parts = [f"{time.strftime('%X')}  load {Path('/proc/loadavg').read_text().strip()}"]
    for pid in pids:
        parts.append(_kernel(pid))
        if python:
            try:
                os.kill(pid, SIGNAL)
            except ProcessLookupError:
                continue
    parts += [_c_frames(pid) for pid in pids]
    return "\n".join(parts)


def _kernel(pid: int) -> str:
    """Return the state of each thread of a process: what it waits in, and the time it has run and waited to run."""
    lines = [f"== process {pid}: {_read(Path(f'/proc/{pid}/cmdline'))}"]
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        status = dict(line.partition(":")[::2] for line in _read(task / "status").splitlines())
        state = status.get("State", "gone").strip()
        told = "  ".join(f"{name}={_read(task / name).strip()}" for name in _KERNEL)
        lines.append(f"thread {task.name} {state}  schedstat={_read(task / 'schedstat').strip()}  {told}")
    return "\n".join(lines)


def _c_frames(pid: int) -> str:
    if shutil.which("gdb") is None:
        return "(C frames: there is no gdb)"
    command = ["gdb", "-p", str(pid), "-batch", "-nx", "-ex", "set debuginfod enabled off", "-ex", _C_FRAMES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return f"== C frames of {pid}: gdb took more than 60 s"
    return f"== C frames of {pid}\n{done.stdout}"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").replace("\0", " ")
    except OSError:
        return "?"
