"""Moves frames over ZeroMQ, on one host and between hosts.

A channel has two PULL sockets, at which all other agents reach it, and a PUSH socket for each link::

    agent A                                          agent B
    ZeroMqLink ────── ipc://…/agent-B/in ─────────────> inbox              agents on one host
    ZeroMqLink ────── tcp://host:port, CURVE ─────────> the same inbox     agents on different hosts
    LargeZeroMqLink ─ ipc://…/agent-B/large#large ────> large inbox ─┐
    LargeZeroMqLink ─ tcp://host:port#large, CURVE ───> large inbox  │ its thread puts the chunks together, and
                                                        inbox <──────┘ announces each whole message

Large messages have links, an inbox and two threads of their own, one of ZeroMQ's and one of Python's: encrypting and
copying takes long, and a small message that arrives meanwhile must not wait.

Sending and receiving never share a socket, so a thread can wait in `receive` while others send. The ``ipc://`` files
are in the agent's own directory (mode 0700). The CURVE keys of TCP come from the cluster's secret
(`nbdist.channel.secret`).

The directory contains a file that its agent has locked. When an agent starts, it removes each directory whose lock is
free, because the agent of that directory has died (`sweep`).
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from nbdist.channel import machine
from nbdist.channel.assembly import NOT_COPIED_FROM, Assembly, chunks
from nbdist.channel.contract import Buffer, Channel, ChannelError, TooManyFiles
from nbdist.channel.resources import require_files
from nbdist.channel.secret import Secret, runtime_directory
from nbdist.errors import ResourceError
from nbdist.finalisers import this_thread
from nbdist.signals import DeferredSignals

__all__ = ["LockedDirectory", "ZeroMqChannel", "host_identity", "sweep", "sweep_directories"]

_FOR_LARGE = "#large"
"""The end of the addresses at which an agent takes large messages."""
_SMALL_THREAD, _LARGE_THREAD = 1, 2
"""The numbers (``ZMQ_AFFINITY``) of ZeroMQ's two threads: one moves small messages, the other large ones."""
_ANNOUNCED = b"\0"
"""A message to the inbox that announces a whole message in the large inbox."""
_HANDSHAKE_MS = 5000
"""Milliseconds after which ZeroMQ closes a connection whose other end has not finished the handshake."""
_KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 30, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 3}
"""Options that end a TCP connection after 60 seconds without a sign of the other host.

An inbox never sends. Without these options, it would never notice that the host at the other end has lost its power.
"""
_LINGER_MS = 500
"""Milliseconds for which ZeroMQ still tries to send after a link was closed."""
_LOOK_EVERY_MS = 10_000
"""Milliseconds between two searches for incomplete large messages of which no more arrives."""
_POLLIN = int(zmq.POLLIN)
"""A plain number, since each ``&`` with pyzmq's enum takes as long as it takes to send a message, 1 µs."""
MAX_MESSAGE = 1 << 40
"""The most bytes of a message, unless the caller or the machine's memory sets a lower limit."""

_log = logging.getLogger("nbdist.channel")


def host_identity() -> str:
    """Return a text that is equal for two agents if they share a host, its files and process ids, and the user."""
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


_directories: weakref.WeakSet[LockedDirectory] = weakref.WeakSet()


def _after_fork() -> None:
    for directory in list(_directories):
        directory.forked()


os.register_at_fork(after_in_child=_after_fork)


_FILES_AT_START = 32
"""The number of files that must be free before ZeroMQ starts its threads and opens the first sockets.

It needs 16, and 24 with TCP. Without free files, ZeroMQ would abort this process.
"""
_FILES_FOR_LARGE = 16
"""The number of files that must be free before the first large message: one for a socket, 7 for a thread of pyzmq."""


class LockedDirectory:
    """A process's own directory, with a file that stays locked while the process lives.

    The kernel keeps the lock, also for processes of other containers, to whom a process id would say nothing.
    """

    def __init__(self, base: Path, label: str) -> None:
        """Make and lock the directory ``base / label``. Raises OSError on failure, as when another process has it."""
        self.path = base / label
        draft = self.path.with_name(f"new-{label}")  # else others would remove it before it is locked
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, draft, ignore_errors=True)
            draft.mkdir(mode=0o700)
            self._lock: IO[bytes] = undo.enter_context((draft / "lock").open("wb"))
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.rename(self.path)
            undo.pop_all()
        _directories.add(self)

    def forked(self) -> None:
        """Close the lock's file in a forked process. Else the child would keep the lock after the parent's death."""
        self._lock.close()

    def remove(self) -> None:
        """Delete the directory with its files, and release the lock. Errors while deleting are ignored."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sweep() -> int:
    """Remove the directories of this user's agents that were killed; return how many there were."""
    return sweep_directories(runtime_directory(), "agent")


def sweep_directories(base: Path, kind: str) -> int:
    """Remove each `LockedDirectory` below ``base`` whose process has died; return how many there were.

    The label of the directories begins with ``kind`` and a hyphen. A living process holds the lock in its directory, so
    its directory stays.
    """
    removed = 0
    for path in base.glob(f"{kind}-*"):
        try:
            with (path / "lock").open("r+b") as lock:  # NFS locks only files that are open for writing
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
        except BlockingIOError:
            pass  # its process is alive
        except (FileNotFoundError, NotADirectoryError):
            # Its process may be removing it right now. If it is more than 60 s old, that is not so.
            with contextlib.suppress(OSError):
                if path.exists() and not any(path.iterdir()) and _age(path) > 60:
                    path.rmdir()
    for path in base.glob(f"new-{kind}-*"):
        with contextlib.suppress(OSError):
            if _age(path) > 60:
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
    return removed


def _age(path: Path) -> float:
    """Return the seconds since a file or directory was last changed. Raises OSError if it is missing."""
    return time.time() - path.stat().st_mtime


class ZeroMqChannel(Channel):
    """Receives messages over ZeroMQ, from agents of this host and of others. It has one reader and no guest."""

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
        """Open the channel; ``label`` goes into the name of its directory, ``agent-LABEL``.

        With ``local``, agents of this host can reach it. ``host`` is the address of one of this host's interfaces: with
        it, agents of other hosts that have the ``secret`` can reach the channel by TCP, at a free port. The channel's
        directory is made in ``directory``, whose caller must remove what killed agents leave there; without it, in the
        user's runtime directory, which is swept first.

        Raises ChannelError if an address cannot be bound, ResourceError if too few files can be opened.
        """
        self._secret = secret
        self._local = local
        self._max_message = min(max_message, machine.memory())
        self._closed = False
        self._lock = threading.Lock()
        self._receiving = threading.Lock()
        self._links: weakref.WeakSet[ZeroMqLink] = weakref.WeakSet()
        self._resources = contextlib.ExitStack()
        require_files(_FILES_AT_START, "ZeroMQ cannot start")  # without files, ZeroMQ would abort this process
        with contextlib.ExitStack() as undo:
            self._context = zmq.Context(2)
            undo.callback(self._context.destroy, 0)
            self._context.max_sockets = 8192
            self._inbox = self._context.socket(zmq.PULL)
            self._prepare(self._inbox, _SMALL_THREAD)
            large = self._context.socket(zmq.PULL)
            self._prepare(large, _LARGE_THREAD)
            self._addresses: list[str] = []
            self.directory: Path | None = None
            if local:
                if directory is None:
                    sweep()
                own = LockedDirectory(directory or runtime_directory(), f"agent-{label}")
                undo.callback(own.remove)
                self.directory = own.path
                self._bind(self._inbox, f"ipc://{own.path}/in")
                self._bind(large, f"ipc://{own.path}/large", _FOR_LARGE)
            if host is not None:
                undo.enter_context(self._authenticator())
                # CURVE applies to addresses that are bound from here on. The ipc files are bound already; their
                # directory protects them.
                for sock, suffix in ((self._inbox, ""), (large, _FOR_LARGE)):
                    self._secured(sock)
                    sock.set(zmq.IPV6, int(":" in host))
                    self._bind(sock, f"tcp://{in_brackets(host)}:*", suffix)
            self._inbox.bind(_LargeInbox.ANNOUNCED_AT)
            self._large = _LargeInbox(self._context, large, self._max_message)
            undo.callback(self._large.close)
            self._poller = zmq.Poller()
            self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(os.close, self._wake_out)
            undo.callback(os.close, self._wake_in)
            self._poller.register(self._inbox, zmq.POLLIN)
            self._poller.register(self._wake_out, zmq.POLLIN)
            self._resources = undo.pop_all()

    # -- setting up ---------------------------------------------------------------------------

    def _prepare(self, sock: zmq.Socket[bytes], thread: int) -> None:
        """Set the options of a new socket. Its queues have no limit, so that no `send` ever blocks.

        ``thread`` is the thread of ZeroMQ's that moves its bytes.
        """
        sock.set(zmq.AFFINITY, thread)
        sock.set(zmq.SNDHWM, 0)
        sock.set(zmq.RCVHWM, 0)
        sock.set(zmq.LINGER, _LINGER_MS)
        sock.set(zmq.MAXMSGSIZE, self._max_message)
        sock.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        sock.set(zmq.RECONNECT_IVL, 20)
        sock.set(zmq.RECONNECT_IVL_MAX, 1000)
        for option, value in _KEEPALIVE.items():
            sock.set(option, value)

    @contextlib.contextmanager
    def _authenticator(self) -> Iterator[None]:
        """Run, during the block, ZeroMQ's thread that admits a TCP connection only with the members' key pair."""
        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()
        try:
            authenticator.configure_curve_callback("*", _OnlyMembers(self._secret.curve("member").public))
            yield
        finally:
            authenticator.stop()

    def _secured(self, sock: zmq.Socket[bytes]) -> None:
        """Make a socket encrypt its TCP connections and prove its identity, with the CURVE keys of role ``door``."""
        door = self._secret.curve("door")
        sock.set(zmq.CURVE_SERVER, 1)
        sock.set(zmq.CURVE_PUBLICKEY, door.public)
        sock.set(zmq.CURVE_SECRETKEY, door.private)

    def _bind(self, sock: zmq.Socket[bytes], address: str, suffix: str = "") -> None:
        """Listen at an address, and add it to `addresses`, with the chosen port in place of ``*``, and a ``suffix``.

        Raises ChannelError if that fails.
        """
        try:
            sock.bind(address)
        except zmq.ZMQError as error:
            remedy = (
                "Set NBDIST_RUNTIME_DIR to another directory"
                if address.startswith("ipc://")
                else "Set NBDIST_HOST, or pass RpcBackendOptions(host=...), to an address of this machine"
            )
            raise ChannelError(f"cannot listen at {address}: {error}. {remedy}") from error
        self._addresses.append(sock.get_string(zmq.LAST_ENDPOINT) + suffix)

    # -- the contract -------------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """The channel's addresses: ``ipc://`` for agents of this host, ``tcp://`` for others.

        Addresses that end with ``#large`` take large messages, in chunks.
        """
        return list(self._addresses)

    def connect(self, addresses: Sequence[str], is_large: bool = False) -> ZeroMqLink:
        """Return a link to the first address that is TCP, or an ipc file that exists on this host.

        With ``is_large``, it is a link for large messages. Raises ChannelError if there is no such address or the
        channel is closed, TooManyFiles if no socket can be opened. ZeroMQ connects later: if the other agent is dead,
        no error is raised.
        """
        for each in addresses:
            address, _, large = each.partition("#")
            if bool(large) is not is_large:
                continue
            if address.startswith("tcp://"):
                return self._link(address, curve=True, is_large=is_large)
            if address.startswith("ipc://") and self._local and Path(address[6:]).exists():
                return self._link(address, curve=False, is_large=is_large)
        raise ChannelError(
            f"none of a worker's addresses {list(addresses)} can be reached from this process: the worker has ended, "
            "or is on another machine without an address there. Give each worker one: NBDIST_HOST, or "
            "RpcBackendOptions(host=...)"
        )

    def _link(self, address: str, *, curve: bool, is_large: bool) -> ZeroMqLink:
        """Return a new link by a PUSH socket to an address; ``curve`` encrypts it with the keys that all members share.

        ``is_large`` makes it a link for large messages. Raises ChannelError if the channel is closed or the address is
        wrong, TooManyFiles if no socket can be opened.
        """
        with self._lock:
            if self._closed:
                raise ChannelError("the channel is closed: RPC has been shut down in this process")
            if is_large:
                _get_ready_to_send_without_copies()
            try:
                sock = self._context.socket(zmq.PUSH)
            except zmq.ZMQError as error:
                raise TooManyFiles(f"cannot connect to {address}: {error}") from error
            self._prepare(sock, _LARGE_THREAD if is_large else _SMALL_THREAD)
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
                raise ChannelError(
                    f"the address {address} of another worker cannot be used: {error}. Give that worker another one: "
                    "NBDIST_HOST, or RpcBackendOptions(host=...)"
                ) from error
            link = LargeZeroMqLink(sock) if is_large else ZeroMqLink(sock)
            self._links.add(link)
            return link

    @property
    def readers(self) -> int:
        """The number of threads that should wait in `receive`: 1."""
        return 1

    def has_more(self) -> bool:
        """Return False: every message wakes the reader."""
        return False

    def receive(self, timeout: float | None, guest: bool = False, soon: bool = False) -> list[bytes] | None:
        """Return the next message's frames; None after ``timeout`` seconds, after `wake`, and once closed.

        Bytes that no link of nbdist sends are dropped, and None is returned. A second thread waits for its turn,
        without a time limit.
        """
        with self._receiving:
            return self._receive(timeout)

    def _receive(self, timeout: float | None) -> list[bytes] | None:
        """Return the next message's frames, or None, as `receive` does. The caller holds `_receiving`."""
        try:
            if self._has_message():  # ask first: the exception zmq.Again would cost as much time as the message
                return self._take()
            if self._closed:
                return None
            ready = self._poller.poll(None if timeout is None else max(0, round(timeout * 1000 + 0.5)))
            for which, _ in ready:
                if which == self._wake_out:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_out, 4096)
            return self._take() if ready and self._has_message() else None
        except zmq.ZMQError:
            return None

    def _take(self) -> list[bytes] | None:
        """Return the frames of a message that the inbox has or announces; None for bytes that no link of nbdist sends.

        Raises ZMQError if the inbox is empty.
        """
        message = self._inbox.recv(zmq.NOBLOCK)
        if self._inbox.get(zmq.RCVMORE):
            self._inbox.recv_multipart(zmq.NOBLOCK)  # no link sends several parts here
            return None
        return self._large.next() if message == _ANNOUNCED else _split(message)

    @property
    def file(self) -> int:
        """The number of a file that becomes readable when messages may have arrived.

        It becomes readable only once for several messages, so call `take` until it returns None.
        """
        return int(self._inbox.get(zmq.FD))

    def take(self) -> list[bytes] | None:
        """Return the frames of a message that has arrived, or None, without waiting. For use with `file`.

        Do not call it together with `receive`. It may be called after `close`, too.
        """
        try:
            while self._has_message():
                frames = self._take()
                if frames is not None:
                    return frames
        except zmq.ZMQError:
            pass  # the channel is closed
        return None

    def _has_message(self) -> bool:
        """Return whether the inbox has a message."""
        return bool(int(self._inbox.get(zmq.EVENTS)) & _POLLIN)

    def wake(self) -> None:
        """Make the waiting `receive`, or else the next one, return None."""
        with contextlib.suppress(OSError):
            os.write(self._wake_in, b"w")

    def close(self) -> None:
        """Close all links and sockets, and remove the channel's directory. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.wake()
        with self._receiving:  # ZeroMQ does not allow closing a socket while another thread waits for it
            for link in list(self._links):
                link.close()
            self._large.close()  # before the inbox, to which it announces messages
            self._inbox.close(0)
            self._wake_in = -1  # a late `wake`, from a finaliser, must not write to another file that gets this number
            self._resources.close()


class _OnlyMembers:
    """Admits only connections that prove the members' private key. ZeroMQ's thread calls it."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether ``key`` is the members' public key. ZeroMQ also passes a ``domain``, which is ignored."""
        return key == self._public


class _LargeInbox:
    """Receives the chunks of large messages in a thread of its own, and announces whole messages in the other inbox."""

    ANNOUNCED_AT = "inproc://large"
    """The address at which the other inbox listens for announcements."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], inbox: zmq.Socket[bytes], max_message: int) -> None:
        """Start the thread that reads ``inbox``; it accepts messages of at most ``max_message`` bytes."""
        self._inbox = inbox
        self._whole: deque[list[bytes]] = deque()
        self._assembly = Assembly(max_message)
        self._to_inbox = context.socket(zmq.PUSH)
        self._to_inbox.set(zmq.SNDHWM, 0)
        self._to_inbox.connect(self.ANNOUNCED_AT)
        self._closing = False
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="nbdist-large", daemon=True)
        self._thread.start()

    def next(self) -> list[bytes] | None:
        """Return the frames of the oldest message that was announced and not returned; None if there is none."""
        return self._whole.popleft() if self._whole else None

    def _run(self) -> None:
        this_thread.is_closed = True
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        while not any(which == self._stop for which, _ in poller.poll(_LOOK_EVERY_MS if self._assembly else None)):
            self._assembly.drop_idle()
            while not self._closing and int(self._inbox.get(zmq.EVENTS)) & _POLLIN:
                try:
                    self._take()
                except Exception:  # the thread must continue: no other thread takes large messages
                    _log.exception("a large message from another agent is dropped")

    def _take(self) -> None:
        """Take one chunk; if it was the last one of its message, announce the message. Other bytes are dropped."""
        head = self._inbox.recv()
        if not self._inbox.get(zmq.RCVMORE):
            return
        data = self._inbox.recv(copy=False)
        if data.more:
            self._inbox.recv_multipart()
            return
        frames = self._assembly.add(head, data.buffer)
        if frames is not None:
            self._whole.append(frames)  # type: ignore[arg-type]  # large frames are views; see `Channel.receive`
            self._to_inbox.send(_ANNOUNCED, zmq.NOBLOCK)

    def close(self) -> None:
        """Stop the thread and close the sockets. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        with DeferredSignals():  # after Ctrl-C, the thread would still use the sockets
            os.eventfd_write(self._stop, 1)
            self._thread.join()
        self._to_inbox.close(0)
        self._inbox.close(0)
        os.close(self._stop)


class ZeroMqLink:
    """A `Link` over a PUSH socket. Every message is copied, and sent as a whole. Threads take turns at it."""

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, frames: Sequence[Buffer], kind: str) -> None:
        """Send a message, without waiting for the receiver: ZeroMQ's own thread writes it to the network.

        Raises ChannelError if the link or the channel is closed. A message may be lost without an error.
        """
        # One part: each further part takes as long as a system call, and may lose the GIL in the middle.
        whole = b"".join((struct.pack(f"<I{len(frames)}Q", len(frames), *map(len, frames)), *frames))
        with self._lock:
            try:
                self._socket.send(whole, zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise _not_sent(error) from error

    def close(self, *, at_once: bool = False) -> None:
        """Close the socket. Unless ``at_once``, ZeroMQ still sends queued messages for half a second.

        A second call does nothing.
        """
        with self._lock:
            self._socket.close(0 if at_once else None)


class LargeZeroMqLink(ZeroMqLink):
    """A `Link` over a PUSH socket to a large inbox. Every message is sent in chunks. Threads take turns at it."""

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        super().__init__(sock)
        self._name = os.urandom(8)
        self._numbers = itertools.count()
        """The numbers of the messages."""

    def send(self, frames: Sequence[Buffer], kind: str) -> None:
        """Send a message, without waiting for the receiver, and without copying its large frames.

        Raises ChannelError if the link or the channel is closed. A message may be lost without an error.
        """
        with (
            DeferredSignals(),
            self._lock,
        ):  # if Ctrl-C cut a chunk in two, the next chunk's parts would be appended to it
            try:
                for head, data in chunks(frames, self._name, next(self._numbers)):
                    self._socket.send(head, zmq.NOBLOCK | zmq.SNDMORE)
                    self._socket.send(data, zmq.NOBLOCK, copy=len(data) < NOT_COPIED_FROM)
            except zmq.ZMQError as error:
                raise _not_sent(error) from error


def _get_ready_to_send_without_copies() -> None:
    """Start the thread with which pyzmq notices that memory is no longer used. Raises TooManyFiles if it cannot.

    pyzmq would start it with the first message that it does not copy, and abort this process if there is no free file.
    """
    try:
        require_files(_FILES_FOR_LARGE, "no link for large messages can be made")
    except ResourceError as error:
        raise TooManyFiles(str(error)) from error
    zmq.Frame(b"x", copy=False, copy_threshold=0)


def _not_sent(error: zmq.ZMQError) -> ChannelError:
    return ChannelError(f"cannot send a message to another worker: {error}. It was not sent: call again")


def _split(joined: bytes) -> list[bytes] | None:
    """Return the frames of a message that arrived as a whole, after their number and sizes; None for other bytes."""
    try:
        (count,) = struct.unpack_from("<I", joined)
        sizes = struct.unpack_from(f"<{count}Q", joined, 4)
    except struct.error:
        return None
    frames, start = [], 4 + 8 * count
    for size in sizes:
        frames.append(joined[start : start + size])
        start += size
    return frames if frames and start == len(joined) else None


def in_brackets(host: str) -> str:
    """Return a host in the form that addresses have: IPv6 addresses are put in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
