"""What a storm does to a process: kills, stops, fills its file table, cuts its links, sends it bad frames.

Everything is done from outside, so that the process needs no code for it and can do nothing against it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import select
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_PIDFD_GETFD = 438
"""The system call that copies a file of another process; glibc has no name for it before 2.36."""

_libc = ctypes.CDLL(None, use_errno=True)


def kill(pid: int) -> None:
    """End a process with SIGKILL; return when it has ended.

    The signal alone takes effect some milliseconds later: a storm whose last strike is a kill would count the process
    among those that are there, and begin the next phase with it.
    """
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [])
    finally:
        os.close(handle)


def stop(pid: int) -> None:
    """Stop a process; `go_on` lets it run."""
    os.kill(pid, signal.SIGSTOP)


def go_on(pid: int) -> None:
    """Let a stopped process run."""
    os.kill(pid, signal.SIGCONT)


def fill_files(pid: int) -> None:
    """Leave a process no room for another file; `free_files` ends that."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = next(number for number in range(len(used) + 1) if number not in used)
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))


def free_files(pid: int) -> None:
    """Let a process open as many files as it may."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(hard, 65536), hard))


def cut_links(pid: int, dice: random.Random) -> int:
    """Shut some of a process's connections to other agents of its host, in both directions; return how many."""
    cut = 0
    with contextlib.closing(_Files(pid)) as files:
        for sock in files.sockets():
            with contextlib.closing(sock), contextlib.suppress(OSError):
                if _is_link(sock) and dice.random() < 0.5:
                    sock.shutdown(socket.SHUT_RDWR)
                    cut += 1
    return cut


class _Files:
    """The open files of another process, which must be one that this process may trace."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._handle = os.pidfd_open(pid)

    def sockets(self) -> Iterator[socket.socket]:
        """Copy the sockets that the process has open, one after the other."""
        for number in sorted(map(int, os.listdir(f"/proc/{self._pid}/fd"))):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{self._pid}/fd/{number}").startswith("socket:"):
                    copy = _libc.syscall(_PIDFD_GETFD, self._handle, number, 0)
                    if copy < 0:
                        raise OSError(ctypes.get_errno(), "pidfd_getfd")
                    yield socket.socket(fileno=copy)

    def close(self) -> None:
        os.close(self._handle)


def _is_link(sock: socket.socket) -> bool:
    """Return whether a socket is one end of a connection between two agents."""
    if sock.family != socket.AF_UNIX or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    return any("/agent-" in str(end) for end in (sock.getsockname(), sock.getpeername()))


def send_bad_frames(pid: int, runtime: Path, dice: random.Random) -> int:
    """Connect to a process's own socket and send what no agent sends; return how many connections took it.

    ``runtime`` is the runtime directory of the storm.
    """
    took = 0
    for path in runtime.glob(f"**/agent-{pid}-*/un"):
        for _ in range(dice.randint(1, 4)):
            with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
                sock.settimeout(1)
                sock.connect(str(path))
                sock.sendall(_bad_frames(dice))
                took += 1
    return took


def _bad_frames(dice: random.Random) -> bytes:
    """Return noise, a message of noise, half a message, or a message whose frames do not add up."""
    noise = dice.randbytes(dice.randint(1, 300))
    whole = struct.pack("<QIQ", 8 + len(noise), 1, len(noise)) + noise
    return dice.choice((noise, whole, whole[: len(whole) // 2], struct.pack("<QIQ", 8 + len(noise), 1, 5) + noise))
