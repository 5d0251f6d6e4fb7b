"""The sending end of a unix socket, and what becomes of messages that its buffer has no room for.

A message goes out on the thread that sends it, without waiting. What the socket does not take at once stays in
order behind the link, and a thread of the channel's own, started when that first happens, sends it when there is
room. So nobody ever waits for a receiver: not a sender, and not the thread that reads, on which the other side of
two agents that send each other much at once depends.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

from nbdist.channel.contract import Buffer, ChannelError, TooManyFiles
from nbdist.channel.framing import head
from nbdist.finalisers import this_thread

__all__ = ["LocalLink", "Outbox", "is_own_user"]

_JOINED = 64 * 1024
_AT_ONCE = 64
_BUFFER = 4 << 20


def is_own_user(sock: socket.socket) -> bool:
    """Whether the process at the other end belongs to the user that this one belongs to."""
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


class Outbox:
    """Sends on what links could not send at once."""

    def __init__(self) -> None:
        self._waiting: dict[int, LocalLink] = {}
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, link: LocalLink, number: int) -> None:
        """Have ``link.flush`` called when the socket of that number has room."""
        with self._lock:
            if self._closed:
                return
            self._waiting[number] = link
            self._epoll.register(number, select.EPOLLOUT)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nbdist-outbox", daemon=True)
                self._thread.start()

    def forget(self, number: int) -> None:
        """That socket has nothing more to send, or is about to be closed."""
        with self._lock:
            # Also where the number is not closed for good: a forked process may hold the same socket.
            if self._waiting.pop(number, None) is not None and not self._closed:
                self._epoll.unregister(number)

    def _run(self) -> None:
        this_thread.is_closed = True
        while not self._closed:
            for number, _ in self._epoll.poll():
                link = self._waiting.get(number)
                if link is not None:
                    link.flush()

    def close(self, linger: float) -> None:
        """Stop, after what waits has gone, or ``linger`` seconds have."""
        deadline = time.monotonic() + linger
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.001)
        with self._lock:
            self._closed = True
            self._waiting.clear()
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        self.release()

    def release(self) -> None:
        """Close the files; in a forked process, which has not the thread, that is all."""
        self._epoll.close()
        os.close(self._wake)


class LocalLink:
    """The way to another agent of this host: a socket that threads take turns at."""

    def __init__(self, path: str, outbox: Outbox) -> None:
        self._path = path
        self._outbox = outbox
        self._lock = threading.Lock()
        self._backlog: deque[memoryview] = deque()
        self._closed = False
        self._socket: socket.socket | None = self._open()

    def _open(self) -> socket.socket:
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise TooManyFiles(f"cannot connect to {self._path}: {error}") from error
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)  # the kernel gives what it allows
            sock.connect(self._path)
            if not is_own_user(sock):
                raise ChannelError(f"another user listens at {self._path}")
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                raise ChannelError(f"cannot connect to {self._path}: {error}") from error
            raise
        return sock

    def send(self, frames: Sequence[Buffer], kind: str) -> None:
        sizes = [*map(len, frames)]
        pieces: list[Buffer] = [head(sizes), *frames]
        if sum(sizes) < _JOINED:
            pieces = [b"".join(pieces)]
        with self._lock:
            if self._closed:
                raise ChannelError("the link is closed")
            if self._socket is None:
                # The connection broke. If who listened there has died, that becomes known by other means.
                with contextlib.suppress(ChannelError):
                    self._socket = self._open()
            if self._socket is None:
                return  # lost, as on a wire
            if self._backlog:
                self._backlog.extend(map(memoryview, pieces))
                return
            try:
                sent = self._try(self._socket, pieces[:_AT_ONCE])
                if self._socket is not None and (len(pieces) > 1 or sent < len(pieces[0])):
                    self._backlog.extend(map(memoryview, pieces))
                    self._advance(sent)
                    if self._backlog:
                        self._outbox.watch(self, self._socket.fileno())
            except BaseException:  # Ctrl-C: nobody knows how much of the message has gone
                self._shut()
                raise

    def flush(self) -> None:
        """Send on, once, what could not be sent before."""
        with self._lock:
            if self._socket is None:
                return
            self._advance(self._try(self._socket, list(islice(self._backlog, _AT_ONCE))))
            if self._socket is not None and not self._backlog:
                self._outbox.forget(self._socket.fileno())
                if self._closed:
                    self._shut()

    def _try(self, sock: socket.socket, pieces: Sequence[Buffer]) -> int:
        """Send as much as there is room for; how many bytes that was."""
        try:
            return sock.send(pieces[0]) if len(pieces) == 1 else sock.sendmsg(pieces)
        except BlockingIOError:
            return 0
        except OSError:
            # The other side drops a message that breaks off, and may ask for it again.
            self._shut()
            return 0

    def _advance(self, sent: int) -> None:
        backlog = self._backlog
        while backlog and sent >= len(backlog[0]):
            sent -= len(backlog.popleft())
        if sent:
            backlog[0] = backlog[0][sent:]

    def close(self, *, at_once: bool = False) -> None:
        with self._lock:
            self._closed = True
            if at_once or not self._backlog:
                self._shut()

    def _shut(self) -> None:
        sock, self._socket = self._socket, None
        self._backlog.clear()
        if sock is not None:
            self._outbox.forget(sock.fileno())
            sock.close()

    def forked(self) -> None:
        """In a forked process: let go of the socket, which is the parent's. No lock: its holder may not be here."""
        self._closed = True
        if self._socket is not None:
            self._socket.close()
