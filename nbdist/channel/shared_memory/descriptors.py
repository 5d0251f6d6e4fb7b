"""Passes descriptors of open files to other agents of this host.

A descriptor of a GPU's memory cannot be opened through ``/proc``, unlike shared memory of the CPU. It is sent over a
socket of its own, in a datagram, before the first message that names it. Neither agent waits: the receiver looks for
the datagram when that message arrives. Another datagram tells that the sender has closed the file, so that the receiver
may unmap it, too. Both kinds name the sender's incarnation, and a label.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import threading

from nbdist.channel.after_fork import call_forked
from nbdist.channel.resources import explain
from nbdist.channel.shared_memory.mapping import MemoryFailure

_LONGEST = 256  # the most bytes of a datagram
_CREDENTIALS = struct.Struct("3i")  # the kernel's statement about a datagram's sender: its process, user and group
_MOST_KEPT = 1024  # the most received descriptors that are kept until `take`
_OPEN, _CLOSED = "open", "closed"  # the first words of the two kinds of datagrams


class Descriptors:
    """One agent's socket for descriptors, each named by its sender's incarnation and a label. Any thread may use it."""

    def __init__(self, incarnation: int) -> None:
        """Open the socket of the agent with this incarnation. Raises MemoryFailure if the system refuses."""
        self._incarnation = incarnation
        self._came: dict[tuple[int, str], int] = {}  # the received descriptors
        self._closed: list[tuple[int, str]] = []  # the files that were closed since the last `take_closed`
        self._lock = threading.Lock()
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                self._socket.bind(_address(incarnation))
            except OSError:
                self._socket.close()
                raise
        except OSError as error:
            raise MemoryFailure(f"cannot open a socket for descriptors: {explain(error)}") from error
        call_forked(self)

    def send(self, to: int, label: str, descriptor: int | None) -> None:
        """Send a descriptor, or with None the notice that its file is closed, to the agent with incarnation ``to``.

        Raises MemoryFailure, without waiting, if the agent cannot be reached or has not read earlier datagrams.
        """
        files = [] if descriptor is None else [descriptor]
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        text = f"{_OPEN if files else _CLOSED} {self._incarnation:x} {label}"
        try:
            self._socket.sendmsg([text.encode()], passed, 0, _address(to))
        except OSError as error:
            raise MemoryFailure(f"cannot hand over a descriptor: {explain(error)}") from error

    def take(self, sender: int, label: str) -> int:
        """Return the descriptor of this file, which the caller closes. Raises MemoryFailure if it has not arrived."""
        with self._lock:
            while (sender, label) not in self._came:
                if not self._receive():
                    raise MemoryFailure(f"its descriptor ({label}) has not come")
            return self._came.pop((sender, label))

    def put_back(self, sender: int, label: str, descriptor: int) -> None:
        """Keep a descriptor that `take` has returned, for the next call of `take`."""
        with self._lock:
            self._came[sender, label] = descriptor

    def take_closed(self) -> list[tuple[int, str]]:
        """Return the files that senders have closed since the last call."""
        with self._lock:
            while self._receive():
                pass
            closed, self._closed = self._closed, []
            return closed

    def _receive(self) -> bool:
        """Receive one datagram, if there is one; return whether there was one. The caller holds the lock."""
        room = socket.CMSG_SPACE(4) + socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            text, passed, flags, _ = self._socket.recvmsg(_LONGEST, room, socket.MSG_CMSG_CLOEXEC)
        except OSError:  # none has arrived, or the socket is closed
            return False
        files: list[int] = []
        user = -1
        for level, kind, data in passed:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                files += array.array("i", data[: len(data) // 4 * 4])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                _, user, _ = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])
        words = text.decode(errors="replace").split(" ")
        what, key = "", (0, "")
        with contextlib.suppress(ValueError):
            what, key = words[0], (int(words[1], 16), words[2]) if len(words) == 3 else key
        # If this process has too many files open, the kernel leaves the descriptor out.
        # Any user may send to this address, which has no file, so no permissions either.
        if user != os.getuid() or flags & socket.MSG_CTRUNC or len(files) != {_OPEN: 1, _CLOSED: 0}.get(what):
            _close(files)
            return True
        if what == _OPEN and len(self._came) >= _MOST_KEPT:
            # The oldest one: the message that was to name it may never come.
            _close([self._came.pop(next(iter(self._came)))])
        _close([self._came.pop(key)] if key in self._came else [])
        if what == _OPEN:
            self._came[key] = files[0]
        else:
            self._closed.append(key)
        return True

    def forget(self, sender: int) -> None:
        """Close the descriptors of an agent that is gone."""
        with self._lock:
            while self._receive():
                pass
            _close([self._came.pop(key) for key in list(self._came) if key[0] == sender])

    def close(self) -> None:
        """Close the socket and all descriptors that were not taken. A second call does nothing."""
        with self._lock:
            self.forked()

    def forked(self) -> None:
        """Do what `close` does, in a forked process."""
        # Without the lock: the thread that held it at the fork does not exist in the child.
        self._socket.close()
        _close(list(self._came.values()))
        self._came.clear()


def _address(incarnation: int) -> str:
    """Return the address of an agent's socket: a name in the kernel's own name space, without a file."""
    return f"\0nbdist-descriptors-{incarnation:x}"


def _close(files: list[int]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)
