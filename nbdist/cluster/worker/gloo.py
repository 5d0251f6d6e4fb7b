"""Finds the connections of gloo's process groups in this process, tells the groups apart, and shuts connections down.

A collective of gloo waits in C++ until all members have joined it. It ignores signals, and gloo cannot cancel it. But
it fails if its connections are shut down. Each process group has a *loop*, a thread that polls the group's connections
and its *listener*, the socket to which other members connect. Linux tells which files a thread polls::

    /proc/self/task/<thread>/comm        gloo_tcp_loop, since torch 2.13
    /proc/self/task/<thread>/syscall     the poller (epoll file) with which the thread waits
    /proc/self/fdinfo/<poller>           the files that the poller watches

Before torch 2.13 the thread has no name. With these versions, a thread that polls counts as a loop if it watches the
listener of a group that the caller knows.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from nbdist.torch_private import torch_version

_NAME = "gloo_tcp_loop" if torch_version() >= (2, 13) else None  # of a loop's thread
_EPOLL_WAITS = ("232", "281", "441", "22")  # epoll_wait, epoll_pwait, epoll_pwait2 on x86-64; epoll_pwait on ARM
# The most looks, 1 ms apart, to see whether a thread polls. The second is for an idle thread without a known name.
_TRIES, _TRIES_FOR_ANY = 100, 3
# The functions of C's library, during which no other thread of Python runs.
_KEEPS_GIL = ctypes.PyDLL(None)
_KEEPS_GIL.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)
_LOOKS, _LOOK_EVERY = 5, 50  # the most looks at a thread that seems to run, and the microseconds between two
# Bytes of a system call as Linux writes it: its number, six arguments and two addresses.
_LONGEST_CALL = 256
_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)


@dataclass
class Loop:
    """The sockets of one process group, as gloo's file numbers, which must not be closed here."""

    address: bytes = b""
    """The address of the listener, as the first bytes of C's ``sockaddr``, as gloo writes it into the group's store."""
    listeners: list[int] = field(default_factory=list)
    connections: list[int] = field(default_factory=list)


def loops(is_known: Callable[[bytes], bool]) -> list[Loop]:
    """Return the sockets of all gloo process groups in this process, a `Loop` for each group.

    Before torch 2.13, returns only the groups for which ``is_known`` returns True: it gets the address of the group's
    listener.
    """
    found = []
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, ValueError):  # a thread that ends during the search
            if _NAME is not None and (task / "comm").read_text().strip() != _NAME:
                continue
            if (poller := _poller(int(task.name))) is not None:
                watched = Path(f"/proc/self/fdinfo/{poller}").read_text()
                loop = _sorted(map(int, _WATCHED.findall(watched)))
                if _NAME is not None or is_known(loop.address):
                    found.append(loop)
    return found


def shut(loop: Loop) -> int:
    """Shut all connections of a process group down; return how many were still open. A second call is harmless."""
    count = 0
    for number in loop.connections:
        # The listener stays open: gloo ends the process if it cannot accept connections.
        # Shut, and not closed: the file number is gloo's, and would be given to another file.
        with contextlib.suppress(OSError), _copy(number) as connection:
            connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def connect_for_peers(loop: Loop, world_size: int) -> None:
    """Connect to a loop's listener as each of the group's members would, and close the connections.

    This ends gloo's waits for members that will never connect.
    """
    for number in loop.listeners:
        with contextlib.suppress(OSError), _copy(number) as listener:
            # A member sends its rank in 8 bytes, which gloo does not check. So gloo's wait for each rank ends here, and
            # finds a closed connection.
            for rank in range(world_size):
                with socket.create_connection(listener.getsockname()[:2], timeout=1) as peer:
                    peer.sendall(rank.to_bytes(8, sys.byteorder))


def system_call(task: int) -> list[str]:
    """Return the number and the arguments of the system call that a thread of this process is in, as Linux writes them.

    ``task`` is the thread's native id. The first entry is ``running`` if the thread is not blocked, ``-1`` if it is
    blocked outside of a system call, and ``unknown`` if Linux does not tell.
    """
    try:
        file = os.open(f"/proc/self/task/{task}/syscall", os.O_RDONLY)
    except OSError:
        return ["unknown"]
    try:
        # A thread that waits for the GIL is blocked: so this keeps the GIL while it looks.
        found = _read_keeping_gil(file)
        for _ in range(_LOOKS):
            if found[0] != "running":
                break
            _KEEPS_GIL.usleep(_LOOK_EVERY)  # a thread that has just given the GIL up needs a moment to block
            found = _read_keeping_gil(file)
    finally:
        os.close(file)
    return found


def _read_keeping_gil(file: int) -> list[str]:
    """Return the words at the beginning of a file. Python's own functions would release the GIL while they read."""
    text = ctypes.create_string_buffer(_LONGEST_CALL)
    count = _KEEPS_GIL.pread(file, text, _LONGEST_CALL, 0)
    return text.raw[:count].decode().split() if count > 0 else ["unknown"]


def call_of(ident: int) -> list[str]:
    """Return the system call of the Python thread with this ident, as `system_call` does."""
    if ident == threading.main_thread().ident:
        return system_call(os.getpid())  # Python 3.11 keeps the parent's `native_id` in a process that was forked
    return system_call(next((each.native_id or 0 for each in threading.enumerate() if each.ident == ident), 0))


def method_called(frame: FrameType) -> str:
    """Return the name of the method that a frame is calling: the attribute that the frame has loaded last."""
    name = ""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti:
            break
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = str(instruction.argval)
    return name


def _sorted(numbers: Iterator[int]) -> Loop:
    loop = Loop()
    for number in numbers:
        with contextlib.suppress(OSError), _copy(number) as file:  # OSError: a pipe
            if file.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                loop.listeners.append(number)
                loop.address = _start_of_sockaddr(file)
            else:
                loop.connections.append(number)
    return loop


def _start_of_sockaddr(listener: socket.socket) -> bytes:
    """Return a listener's family, port and, for IPv4, address, in the bytes of C's ``sockaddr``."""
    host, port = listener.getsockname()[:2]
    start = int(listener.family).to_bytes(2, sys.byteorder) + int(port).to_bytes(2, "big")
    return start + (socket.inet_aton(host) if listener.family == socket.AF_INET else b"")


def _poller(task: int) -> int | None:
    """Return the number of the epoll file with which a thread polls; None if it does not poll."""
    # Several looks, because the thread may be busy between two polls.
    for tried in range(_TRIES):
        call = system_call(task)
        if call[0] in _EPOLL_WAITS:
            return int(call[1], 16)
        if _NAME is None and tried >= _TRIES_FOR_ANY and call[0] != "running":
            break  # the thread waits for something else, so it is not a loop
        time.sleep(0.001)
    return None


def _copy(number: int) -> socket.socket:
    """Return a Python socket for a copy of gloo's file; closing it leaves gloo's file open."""
    file = os.dup(number)
    try:
        return socket.socket(fileno=file)
    except OSError:  # not a socket
        os.close(file)
        raise
