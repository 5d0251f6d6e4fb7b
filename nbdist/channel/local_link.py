"""Sends messages over unix sockets, and queues the bytes that a socket has no room for.

The thread that calls `LocalLink.send` writes the message to the socket itself, without waiting. Bytes that the socket
does not accept go into the link's backlog, in order, and the thread of the `Outbox` writes them when the socket has
room again::

    send ──> backlog empty? ── yes ──> socket ── accepts a part ──> rest into the backlog, `Outbox.watch`
                 └─ no ──> backlog                                        │
                                        socket has room ──> `flush` <─────┘
                                                               └── backlog empty ──> `Outbox.forget`

So no thread ever waits for a receiver. Two agents that send each other much at the same time both keep reading.
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

_JOINED_BELOW = 64 * 1024  # bytes; a smaller message is copied into one piece: sending one costs less than several
_PIECES_PER_WRITE = 64  # the most pieces that are passed to the kernel in one call; Linux allows 1024
_SEND_BUFFER = 4 << 20  # the requested size of the socket's send buffer, in bytes


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the id of the process at the other end of a connected unix socket, and the id of its user."""
    pid, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


class Outbox:
    """Writes the backlogs of links, bytes for which their sockets had no room. Its thread starts when needed."""

    def __init__(self) -> None:
        self._waiting: dict[int, LocalLink] = {}
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, link: LocalLink, number: int) -> None:
        """Call ``link.flush`` whenever the socket with this file number has room, until `forget` or `close`."""
        with self._lock:
            if self._closed:
                return
            self._waiting[number] = link
            self._epoll.register(number, select.EPOLLOUT)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nbdist-outbox", daemon=True)
                self._thread.start()

    def forget(self, number: int) -> None:
        """Stop watching a socket, if it is watched: its backlog is empty, or it is about to be closed."""
        with self._lock:
            # Closing the socket is not enough: while a forked process has it, the epoll keeps reporting it.
            if self._waiting.pop(number, None) is not None and not self._closed:
                self._epoll.unregister(number)

    def _run(self) -> None:
        this_thread.is_closed = True  # a finaliser of the user's may run here, and must not wait for a call
        while not self._closed:
            for number, _ in self._epoll.poll():
                # Without the lock: `flush` holds its link's lock when it takes this one, in `forget`.
                if (link := self._waiting.get(number)) is not None:
                    link.flush()

    def close(self, linger: float) -> None:
        """Stop the thread and close the files, once all backlogs are sent or ``linger`` seconds have passed."""
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
        """Close the files. A forked process, which has no copy of the thread, calls only this."""
        self._epoll.close()
        os.close(self._wake)


class LocalLink:
    """A `Link` to another agent of this host, over one unix socket. Bytes for which it has no room go to a backlog.

    The caller of `_write_what_fits`, `_advance` and `_shut` holds the lock.
    """

    def __init__(self, path: str, outbox: Outbox) -> None:
        """Connect to the socket at ``path``. Raises ChannelError, or TooManyFiles if no file can be opened."""
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
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # the kernel may give less
            sock.connect(self._path)
            if peer_of(sock)[1] != os.getuid():
                raise ChannelError(f"a process of another user listens at {self._path}; nbdist sends it nothing")
        except BaseException as error:  # Ctrl-C, too, would leave the socket open
            sock.close()
            if isinstance(error, OSError):
                raise ChannelError(f"cannot connect to {self._path}: {error}") from error
            raise
        return sock

    def send(self, frames: Sequence[Buffer], kind: str) -> None:
        """Send a message without waiting for the receiver. Bytes for which the socket has no room go into the backlog.

        Raises ChannelError once the link is closed. Reconnects a broken socket; if that fails, the message is lost
        without an error.
        """
        sizes = [*map(len, frames)]
        pieces: list[Buffer] = [head(sizes), *frames]
        if sum(sizes) < _JOINED_BELOW:
            pieces = [b"".join(pieces)]
        with self._lock:
            if self._closed:
                raise ChannelError("the link is closed: its worker is gone, or RPC has been shut down in this process")
            if self._socket is None:
                # The connection broke. If the other process has died, `nbdist.channel.process_watch` reports that.
                with contextlib.suppress(ChannelError):
                    self._socket = self._open()
            if self._socket is None:
                return  # the message is lost; `nbdist.wire.peer` sends it again
            if self._backlog:  # behind it, though the socket may have room by now: messages must not mix
                self._backlog.extend(map(memoryview, pieces))
                return
            try:
                sent = self._write_what_fits(self._socket, pieces[:_PIECES_PER_WRITE])
                if self._socket is not None and (len(pieces) > 1 or sent < len(pieces[0])):
                    self._backlog.extend(map(memoryview, pieces))
                    self._advance(sent)
                    if self._backlog:
                        self._outbox.watch(self, self._socket.fileno())
            except BaseException:
                # Ctrl-C: it is unknown how much of the message the socket took; the receiver drops an incomplete one.
                self._shut()
                raise

    def flush(self) -> None:
        """Write as much of the backlog as the socket takes at once. The outbox's thread calls this."""
        with self._lock:
            if self._socket is None:
                return
            self._advance(self._write_what_fits(self._socket, list(islice(self._backlog, _PIECES_PER_WRITE))))
            if self._socket is not None and not self._backlog:
                self._outbox.forget(self._socket.fileno())
                if self._closed:
                    self._shut()

    def _write_what_fits(self, sock: socket.socket, pieces: Sequence[Buffer]) -> int:
        """Write what the socket has room for; return the number of bytes. After an error, shut the link; return 0."""
        try:
            return sock.send(pieces[0]) if len(pieces) == 1 else sock.sendmsg(pieces)
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                # The receiver drops an incomplete message, and `nbdist.wire.peer` sends it again.
                self._shut()
            return 0

    def _advance(self, sent: int) -> None:
        """Remove the first ``sent`` bytes from the backlog, which the socket has taken."""
        backlog = self._backlog
        while backlog and sent >= len(backlog[0]):
            sent -= len(backlog.popleft())
        if sent:
            backlog[0] = backlog[0][sent:]

    def close(self, *, at_once: bool = False) -> None:
        """Close the link: with ``at_once`` now, else as soon as the outbox has sent the backlog."""
        with self._lock:
            self._closed = True
            if at_once or not self._backlog:
                self._shut()

    def _shut(self) -> None:
        """Close the socket and drop the backlog. The next `send` connects again, unless the link is closed."""
        sock, self._socket = self._socket, None
        self._backlog.clear()
        if sock is not None:
            # Before the file is closed: another file may get its number at once.
            self._outbox.forget(sock.fileno())
            sock.close()

    def forked(self) -> None:
        """Close the socket in a forked process; the parent keeps its own."""
        # Without the lock: the thread that held it at the fork does not exist in the child.
        self._closed = True
        if self._socket is not None:
            self._socket.close()
