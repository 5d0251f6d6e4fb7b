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
are in the agent's own directory (mode 0700, `nbdist.channel.locked_directory`). The CURVE keys of TCP come from the
cluster's secret (`nbdist.channel.secret`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import zmq
from zmq.auth.thread import ThreadAuthenticator

from nbdist.channel import machine
from nbdist.channel.contract import Channel, ChannelError, TooManyFiles
from nbdist.channel.framing import split
from nbdist.channel.large_inbox import LargeInbox
from nbdist.channel.locked_directory import LockedDirectory, sweep
from nbdist.channel.resources import require_files
from nbdist.channel.secret import Secret, runtime_directory
from nbdist.channel.zeromq_links import LargeZeroMqLink, ZeroMqLink, get_ready_to_send_without_copies
from nbdist.errors import ProtocolError

_FOR_LARGE = "#large"  # the end of the addresses at which an agent takes large messages
_SMALL_THREAD, _LARGE_THREAD = 1, 2  # ZeroMQ's two threads, as bits of ``ZMQ_AFFINITY``, for small and large messages
_HANDSHAKE_MS = 5000  # after which ZeroMQ closes a connection whose other end has not finished the handshake
# End a TCP connection after 60 seconds without a sign of the other host. Without these options, an inbox, which never
# sends, would not notice that the other host has lost its power.
_KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 30, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 3}
_LINGER_MS = 500  # for which ZeroMQ still tries to send after a link was closed
_POLLIN = int(zmq.POLLIN)  # each ``&`` with pyzmq's enum would take as long as it takes to send a message, 1 µs
MAX_MESSAGE = 1 << 40  # bytes; the caller or the machine's memory may set a lower limit


def host_identity() -> str:
    """Return a text that is equal for two agents if they share a host, its files and process ids, and the user."""
    boot, mounts, pids = "", 0, 0
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        mounts, pids = os.stat("/proc/self/ns/mnt").st_ino, os.stat("/proc/self/ns/pid").st_ino
    return f"{socket.gethostname()}/{boot}/{mounts}/{pids}/{os.getuid()}"


_FILES_AT_START = 32  # ZeroMQ's threads and first sockets need 16, and 24 with TCP


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
        require_files(_FILES_AT_START, "ZeroMQ cannot start")  # without files, ZeroMQ would abort this process
        with contextlib.ExitStack() as undo:
            self._context = zmq.Context(2)
            undo.callback(self._context.destroy, 0)
            self._context.max_sockets = 8192  # before the first socket: later, ZeroMQ ignores it
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
                # ZeroMQ's thread that admits a TCP connection only with the members' key pair.
                authenticator = ThreadAuthenticator(self._context)
                authenticator.start()
                undo.callback(authenticator.stop)
                member = self._secret.curve("member").public
                only_members = SimpleNamespace(callback=lambda domain, key: key == member)
                authenticator.configure_curve_callback("*", only_members)
                # CURVE applies to addresses that are bound from here on. The ipc files are bound already; their
                # directory protects them.
                for sock, suffix in ((self._inbox, ""), (large, _FOR_LARGE)):
                    self._secret.curve("door").secure(sock)
                    sock.set(zmq.IPV6, int(":" in host))
                    self._bind(sock, f"tcp://{in_brackets(host)}:*", suffix)
            self._inbox.bind(LargeInbox.ANNOUNCED_AT)
            self._large = LargeInbox(self._context, large, self._max_message)
            undo.callback(self._large.close)
            self._poller = zmq.Poller()
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake)
            self._poller.register(self._inbox, zmq.POLLIN)
            self._poller.register(self._wake, zmq.POLLIN)
            self._resources = undo.pop_all()

    # -- setting up ---------------------------------------------------------------------------

    def _prepare(self, sock: zmq.Socket[bytes], thread: int) -> None:
        """Set the options of a new socket, whose bytes one of ZeroMQ's threads moves."""
        sock.set(zmq.AFFINITY, thread)
        # No limits: a `send` would block, or with NOBLOCK fail, while a queue is full.
        sock.set(zmq.SNDHWM, 0)
        sock.set(zmq.RCVHWM, 0)
        sock.set(zmq.LINGER, _LINGER_MS)
        sock.set(zmq.MAXMSGSIZE, self._max_message)
        sock.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        sock.set(zmq.RECONNECT_IVL, 20)
        sock.set(zmq.RECONNECT_IVL_MAX, 1000)
        for option, value in _KEEPALIVE.items():
            sock.set(option, value)

    def _bind(self, sock: zmq.Socket[bytes], address: str, suffix: str = "") -> None:
        """Listen at an address, and add it to `addresses`, with the chosen port in place of ``*``, and a ``suffix``."""
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

        Raises ChannelError if there is no such address or the channel is closed, TooManyFiles if no socket can be
        opened. ZeroMQ connects later: if the other agent is dead, no error is raised.
        """
        for each in addresses:
            address, _, large = each.partition("#")
            if bool(large) is not is_large:
                continue
            is_tcp = address.startswith("tcp://")
            # To a missing ipc file, ZeroMQ would try to connect for ever.
            if is_tcp or (address.startswith("ipc://") and self._local and Path(address[6:]).exists()):
                return self._link(address, curve=is_tcp, is_large=is_large)
        raise ChannelError(
            f"none of a worker's addresses {list(addresses)} can be reached from this process: the worker has ended, "
            "or is on another machine without an address there. Give each worker one: NBDIST_HOST, or "
            "RpcBackendOptions(host=...)"
        )

    def _link(self, address: str, *, curve: bool, is_large: bool) -> ZeroMqLink:
        """Return a new link by a PUSH socket; ``curve`` encrypts it with the keys that all members share."""
        with self._lock:
            if self._closed:
                raise ChannelError("the channel is closed: RPC has been shut down in this process")
            if is_large:
                get_ready_to_send_without_copies()
            try:
                sock = self._context.socket(zmq.PUSH)
            except zmq.ZMQError as error:
                raise TooManyFiles(f"cannot connect to {address}: {error}") from error
            self._prepare(sock, _LARGE_THREAD if is_large else _SMALL_THREAD)
            sock.set(zmq.IPV6, int("[" in address))
            if curve:
                self._secret.curve("member").secure(sock, self._secret.curve("door").public)
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

    def receive(self, timeout: float | None, guest: bool = False, soon: bool = False) -> list[bytes] | None:
        """Return the next message's frames; None after ``timeout`` seconds, after `wake`, and once closed.

        Returns None also for bytes that no link of nbdist sends. A second thread waits for its turn, without a limit.
        """
        with self._receiving:
            try:
                if self._has_message():  # ask first: the exception zmq.Again would cost as much time as the message
                    return self._take()
                if self._closed:
                    return None
                # Rounded up: the caller would otherwise find that its time is not up, and call again at once.
                ready = self._poller.poll(None if timeout is None else max(0, round(timeout * 1000 + 0.5)))
                for which, _ in ready:
                    if which == self._wake:
                        os.eventfd_read(self._wake)
                return self._take() if ready and self._has_message() else None
            except zmq.ZMQError:
                return None

    def _take(self) -> list[bytes] | None:
        """Return a message that the inbox has or announces; None for bytes that no link of nbdist sends."""
        message = self._inbox.recv(zmq.NOBLOCK)
        if self._inbox.get(zmq.RCVMORE):
            self._inbox.recv_multipart(zmq.NOBLOCK)  # no link sends several parts here
            return None
        try:
            return self._large.next() if message == LargeInbox.ANNOUNCEMENT else split(message)
        except ProtocolError:
            return None

    @property
    def file(self) -> int:
        """The number of a file that becomes readable, once for several messages: call `take` until it returns None."""
        return int(self._inbox.get(zmq.FD))

    def take(self) -> list[bytes] | None:
        """Return the frames of a message that has arrived, or None, without waiting, for use with `file`.

        Do not call it together with `receive`. It may be called after `close`, too.
        """
        with contextlib.suppress(zmq.ZMQError):  # the channel is closed
            while self._has_message():
                if (frames := self._take()) is not None:
                    return frames
        return None

    def _has_message(self) -> bool:
        return bool(int(self._inbox.get(zmq.EVENTS)) & _POLLIN)

    def wake(self) -> None:
        """Make the waiting `receive`, or else the next one, return None."""
        with contextlib.suppress(OSError, ValueError):  # the channel is closed
            os.eventfd_write(self._wake, 1)

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
            self._wake = -1  # a late `wake`, from a finaliser, must not write to another file that gets this number
            self._resources.close()


def in_brackets(host: str) -> str:
    """Return a host in the form that addresses have: IPv6 addresses are put in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
