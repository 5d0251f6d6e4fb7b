"""The channel that always works: a PULL socket to be reached at, a PUSH socket to each other agent.

Sending and receiving never share a socket, so a thread may wait in `receive` while others send. On one host
the sockets are ``ipc://`` files in a directory of the agent's own (0700); to other hosts they are TCP with
CURVE, whose keys come from the cluster's secret. A directory whose owner has died is removed by whoever
comes next: a lock on a file in it tells.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from nbdist.channel import memory
from nbdist.channel.contract import Buffer, ChannelError, TooManyFiles
from nbdist.channel.resources import require_files
from nbdist.channel.security import Secret, runtime_directory
from nbdist.signals import Deferral

__all__ = ["ZmqChannel", "host_identity", "sweep"]

_LARGE = 256 * 1024
_JOINED = 64 * 1024
_HANDSHAKE_MS = 5000
_LINGER_MS = 500
MAX_MESSAGE = 1 << 40


def host_identity() -> str:
    """What tells whether two agents share a host, and can see each other's files."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    try:
        mounts = os.stat("/proc/self/ns/mnt").st_ino
        pids = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        mounts = pids = 0
    return f"{socket.gethostname()}/{boot}/{mounts}/{pids}/{os.getuid()}"


_directories: weakref.WeakSet[_Directory] = weakref.WeakSet()


def _after_fork() -> None:
    for directory in list(_directories):
        directory.forked()


os.register_at_fork(after_in_child=_after_fork)


_FILES_AT_START = 16
"""Files that must be free before ZeroMQ starts its threads and opens the first sockets; it takes about ten."""


class _Directory:
    """An agent's own directory; a lock says that its agent lives."""

    def __init__(self, base: Path, label: str) -> None:
        self.path = base / label
        draft = self.path.with_name(f"new-{label}")  # nobody may find it before it is locked
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, draft, ignore_errors=True)
            draft.mkdir(mode=0o700)
            self._lock: IO[bytes] = undo.enter_context((draft / "lock").open("wb"))
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.rename(self.path)
            undo.pop_all()
        _directories.add(self)

    def forked(self) -> None:
        """In a child process: the lock must not outlive the parent."""
        self._lock.close()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sweep() -> int:
    """Remove what agents that were killed left behind; how many directories that was."""
    removed = 0
    for path in runtime_directory().glob("agent-*"):
        try:
            with (path / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
        except BlockingIOError:
            pass  # its agent lives
        except (FileNotFoundError, NotADirectoryError):
            # Half removed: only an old one is litter.
            with contextlib.suppress(OSError):
                if path.exists() and not any(path.iterdir()) and _age(path) > 60:
                    path.rmdir()
    for path in runtime_directory().glob("new-agent-*"):
        with contextlib.suppress(OSError):
            if _age(path) > 60:
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
    return removed


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime


class ZmqChannel:
    """ZeroMQ, on one host and between hosts."""

    def __init__(
        self,
        label: str,
        secret: Secret,
        *,
        local: bool = True,
        host: str | None = None,
        max_message: int = MAX_MESSAGE,
        directory: Path | None = None,
    ) -> None:
        """``directory``: where the channel's own shall be, of which somebody takes care; else the user's own."""
        self._secret = secret
        self._local = local
        self._max_message = min(max_message, memory.total())
        self._closed = False
        self._lock = threading.Lock()
        self._receiving = threading.Lock()
        self._links: weakref.WeakSet[ZmqLink] = weakref.WeakSet()
        self._resources = contextlib.ExitStack()
        require_files(_FILES_AT_START, "ZeroMQ cannot start")  # else it would end this process
        with contextlib.ExitStack() as undo:
            self._context = zmq.Context(1)
            undo.callback(self._context.destroy, 0)
            self._context.max_sockets = 8192
            self._inbox = self._context.socket(zmq.PULL)
            self._prepare(self._inbox)
            self._addresses: list[str] = []
            self.directory: Path | None = None
            if local:
                if directory is None:
                    sweep()
                own = _Directory(directory or runtime_directory(), f"agent-{label}")
                undo.callback(own.remove)
                self.directory = own.path
                self._bind(f"ipc://{own.path}/in")
            if host is not None:
                undo.enter_context(self._authenticator())
                # From here on; what is bound already, the ipc file, is guarded by its directory instead.
                self._secured(self._inbox)
                self._inbox.set(zmq.IPV6, int(":" in host))
                self._bind(f"tcp://{_bracketed(host)}:*")
            self._poller = zmq.Poller()
            self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(os.close, self._wake_out)
            undo.callback(os.close, self._wake_in)
            self._poller.register(self._inbox, zmq.POLLIN)
            self._poller.register(self._wake_out, zmq.POLLIN)
            self._resources = undo.pop_all()

    # -- setting up ---------------------------------------------------------------------------

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        sock.set(zmq.SNDHWM, 0)
        sock.set(zmq.RCVHWM, 0)
        sock.set(zmq.LINGER, _LINGER_MS)
        sock.set(zmq.MAXMSGSIZE, self._max_message)
        sock.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        sock.set(zmq.RECONNECT_IVL, 20)
        sock.set(zmq.RECONNECT_IVL_MAX, 1000)

    @contextlib.contextmanager
    def _authenticator(self) -> Iterator[None]:
        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()
        try:
            authenticator.configure_curve_callback("*", _OnlyMembers(self._secret.curve("member").public))
            yield
        finally:
            authenticator.stop()

    def _secured(self, sock: zmq.Socket[bytes]) -> None:
        door = self._secret.curve("door")
        sock.set(zmq.CURVE_SERVER, 1)
        sock.set(zmq.CURVE_PUBLICKEY, door.public)
        sock.set(zmq.CURVE_SECRETKEY, door.private)

    def _bind(self, address: str) -> None:
        try:
            self._inbox.bind(address)
        except zmq.ZMQError as error:
            raise ChannelError(f"cannot listen at {address}: {error}") from error
        self._addresses.append(self._inbox.get_string(zmq.LAST_ENDPOINT))

    # -- the contract -------------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        return list(self._addresses)

    def connect(self, addresses: Sequence[str]) -> ZmqLink:
        for address in addresses:
            if address.startswith("tcp://"):
                return self._link(address, curve=True)
            if address.startswith("ipc://") and self._local and Path(address[6:]).exists():
                return self._link(address, curve=False)
        raise ChannelError(f"none of {list(addresses)} can be reached from this process")

    def _link(self, address: str, *, curve: bool) -> ZmqLink:
        with self._lock:
            if self._closed:
                raise ChannelError("the channel is closed")
            try:
                sock = self._context.socket(zmq.PUSH)
            except zmq.ZMQError as error:
                raise TooManyFiles(f"cannot connect to {address}: {error}") from error
            self._prepare(sock)
            sock.set(zmq.IPV6, int("[" in address))
            if curve:
                member = self._secret.curve("member")
                sock.set(zmq.CURVE_PUBLICKEY, member.public)
                sock.set(zmq.CURVE_SECRETKEY, member.private)
                sock.set(zmq.CURVE_SERVERKEY, self._secret.curve("door").public)
            try:
                sock.connect(address)
            except zmq.ZMQError as error:
                sock.close(0)
                raise ChannelError(f"cannot connect to {address}: {error}") from error
            link = ZmqLink(sock)
            self._links.add(link)
            return link

    @property
    def readers(self) -> int:
        return 1

    def has_more(self) -> bool:
        return False

    def receive(self, timeout: float | None, guest: bool = False, soon: bool = False) -> list[bytes] | None:
        with self._receiving:
            return self._receive(timeout)

    def _receive(self, timeout: float | None) -> list[bytes] | None:
        try:
            if self._has_message():  # asked, because an Again would cost as much as the message
                return _split(self._inbox.recv_multipart(zmq.NOBLOCK))
            if self._closed:
                return None
            ready = self._poller.poll(None if timeout is None else max(0, round(timeout * 1000 + 0.5)))
            for which, _ in ready:
                if which == self._wake_out:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_out, 4096)
            if not ready:
                return None
            return _split(self._inbox.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return None
        except zmq.ZMQError:
            return None

    @property
    def file(self) -> int:
        """Readable once when something may have come; then `take` has to be called until it has nothing."""
        return int(self._inbox.get(zmq.FD))

    def take(self) -> list[bytes] | None:
        """A message that has come, without waiting; for who waits for `file` instead of in `receive`."""
        try:
            while self._has_message():
                frames = _split(self._inbox.recv_multipart(zmq.NOBLOCK))
                if frames is not None:
                    return frames
        except zmq.ZMQError:
            pass  # closed
        return None

    def _has_message(self) -> bool:
        return bool(int(self._inbox.get(zmq.EVENTS)) & zmq.POLLIN)

    def expect(self) -> None:
        pass

    def expect_no_more(self) -> None:
        pass

    def call(self) -> None:
        self.wake()

    def called(self) -> None:
        pass

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_in, b"w")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.wake()
        with self._receiving:  # a socket must not be closed under a thread that waits for it
            for link in list(self._links):
                link.close()
            self._inbox.close(0)
            self._wake_in = -1  # the number may soon be another file's, and `wake` be called by a late finaliser
            self._resources.close()


class _OnlyMembers:
    """Admits one public key: the one that only members have the other half of."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class ZmqLink:
    """A PUSH socket that threads take turns at."""

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, frames: Sequence[Buffer], kind: str) -> None:
        sizes = [len(frame) for frame in frames]
        if len(sizes) == 1 or (sum(sizes) < _JOINED and len(sizes) < 256):
            # One part: each further one costs a system call's worth, and a chance to lose the GIL half way.
            frames = [b"".join((struct.pack(f"<B{len(sizes)}I", len(sizes), *sizes), *frames))]
        last = len(frames) - 1
        with Deferral(), self._lock:  # a message that breaks off would take the next one's frames
            try:
                for index, frame in enumerate(frames):
                    more = zmq.SNDMORE if index < last else 0
                    self._socket.send(frame, zmq.NOBLOCK | more, copy=len(frame) < _LARGE)
            except zmq.ZMQError as error:
                raise ChannelError(f"cannot send: {error}") from error

    def close(self, *, at_once: bool = False) -> None:
        with self._lock:
            self._socket.close(0 if at_once else None)


def _split(parts: list[bytes]) -> list[bytes] | None:
    """The frames of a message, in whatever number of parts it came; None for what no link of ours sends."""
    if len(parts) > 1:
        return parts
    joined = parts[0]
    try:
        count = joined[0]
        sizes = struct.unpack_from(f"<{count}I", joined, 1)
    except (IndexError, struct.error):
        return None
    frames, start = [], 1 + 4 * count
    for size in sizes:
        frames.append(joined[start : start + size])
        start += size
    return frames if frames and start == len(joined) else None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
