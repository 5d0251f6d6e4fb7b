"""A door: a socket at which processes without the members' secret speak with a member, encrypted, in both directions.

::

    a client                          tcp://host:port, CURVE                                   a member
    DoorLink.send ── DEALER ────────────────────────────> ROUTER ── take(who, message), in the door's thread
             take <─────────────────────────────────────────────── Door.send(who, message), any thread

Any process that knows the door's public key can connect, and nobody can read the traffic. ``take`` decides whom to
believe. ``who`` is the name that ZeroMQ has for the connection. A `DoorLink` chooses it at random and tells nobody, so
another process that knows the key cannot take its place, even after the connection was broken. A link ends with its
connection: nothing is sent again.

A process that knows the public key can fill the memory of the door's process: ZeroMQ limits the size of a message's
part, but not the number of parts, and hands a message over only when its last part has arrived. A message has one part.
The door drops a message of more parts as it reads it, and keeps nothing of a message that ``take`` has read.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from nbdist.channel.contract import ChannelError
from nbdist.channel.resources import require_files
from nbdist.channel.secret import CurveKeys
from nbdist.channel.zeromq import in_brackets
from nbdist.errors import ProtocolError

LARGEST = 1 << 28  # bytes of a message to a door; ZeroMQ ends the connection of a process that sends a larger one
NAME_BYTES = 16  # of a link's name
_HANDSHAKE_MS = 5000  # after which a connection is closed if the other end has not proved that it knows the public key
_TICK = 1.0  # seconds between two calls of ``tick``
_ASLEEP = 3.0  # seconds without a turn of the thread, as of a process that was stopped
_LINGER_MS = 500  # for which ZeroMQ still tries to send after the end
_READ_AHEAD = 100  # messages of one client that wait in the door's process
_FILES_NEEDED = 18  # ZeroMQ's threads need about ten

_log = logging.getLogger("nbdist.channel")


class _Post:
    """A socket and the thread that alone uses it, in which ``take`` and ``tick`` run: they must be quick."""

    name = "nbdist-door"

    def __init__(self, kind: int, options: dict[Any, int], take: Callable[..., None], tick: Callable[[], None]) -> None:
        require_files(_FILES_NEEDED, f"the socket of {self.name} cannot open")
        self.refused = 0
        """The number of messages that were dropped, or for which ``take`` has raised an error."""
        self._take, self._tick = take, tick
        self._sent_at = -math.inf  # the time of the last message
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(kind)
        for option, value in {zmq.LINGER: _LINGER_MS, zmq.HANDSHAKE_IVL: _HANDSHAKE_MS, **options}.items():
            self.socket.set(option, value)
        # Both are reentrant: a finaliser may send in the middle of another `send`.
        self._leaving: queue.SimpleQueue[tuple[bytes, ...]] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def _start(self, attach: Callable[[], object]) -> None:
        """Bind or connect the socket by ``attach``, and start the thread."""
        try:
            attach()
        except BaseException:  # Ctrl-C, too, would leave ZeroMQ's threads and files
            self._free()
            raise
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT)
        """The door's address, such as ``tcp://10.0.0.5:40123``."""
        self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
        self._thread.start()

    def send(self, *parts: bytes) -> None:
        """Send a message; it is dropped if the other end is gone. Any thread may call this."""
        self._leaving.put(parts)
        with contextlib.suppress(OSError, ValueError):  # closed
            os.eventfd_write(self._bell, 1)

    def _serve(self) -> None:
        poller, due = zmq.Poller(), time.monotonic()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        while self._pass_on():
            try:
                for which, _ in poller.poll(1000):
                    if which == self._bell:
                        os.eventfd_read(self._bell)
                    else:
                        self._take(*self._receive())
                if (now := time.monotonic()) >= due:
                    was_asleep, due = now > due + _ASLEEP, now + _TICK
                    if not was_asleep:  # else what the other end has sent meanwhile is to be read first
                        self._tick()
            except Exception as error:  # whatever a stranger's bytes cause, even MemoryError: others still want answers
                self.refused += 1
                _log.debug("%s drops a message: %s", self.name, error)
        self._drain()
        self._free()

    def _drain(self) -> None:
        """Drop what still comes: a connection that ends with unread bytes may lose what was sent just now."""
        end = self._sent_at + _LINGER_MS / 1000
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(Exception):  # whatever a stranger's bytes cause
                if self.socket.poll(int(left * 1000) + 1):
                    self._receive()

    def _pass_on(self) -> bool:
        """Send all messages that wait to the other end; return False after `close`."""
        while not self._leaving.empty():
            if not (parts := self._leaving.get()):
                return False
            self._sent_at = time.monotonic()
            with contextlib.suppress(zmq.ZMQError, MemoryError):  # the other end may have left meanwhile
                self.socket.send_multipart(parts, zmq.NOBLOCK)
        return True

    def _free(self) -> None:
        self._bell, bell = -1, self._bell  # a late `send` must not write to another file with this number
        os.close(bell)
        self._context.destroy()

    def _receive(self) -> list[bytes]:
        return [self.socket.recv()]

    def close(self) -> None:
        """Send what waits, and end, without waiting for that. A second call does nothing."""
        self.send()


class Door(_Post):
    """The listening end."""

    def __init__(
        self,
        host: str,
        ports: tuple[int, int] | None,
        take: Callable[[bytes, bytes], None],
        tick: Callable[[], None] = lambda: None,
        keys: CurveKeys | None = None,
        options: dict[Any, int] | None = None,
    ) -> None:
        """Listen at ``host``, this machine's address for others, and one of ``ports`` (first, last); None for any.

        ``take(who, message)`` gets all messages, ``tick()`` is called each second. ``keys`` are new ones by default,
        ``options`` further ones of the socket. Raises ChannelError if no port is free or the address is not this
        machine's, ResourceError if too few files can be opened.
        """
        own = {zmq.MAXMSGSIZE: LARGEST, zmq.RCVHWM: _READ_AHEAD, zmq.SNDHWM: 0, zmq.IPV6: int(":" in host)}
        super().__init__(zmq.ROUTER, {**own, **(options or {})}, take, tick)
        keys = keys or CurveKeys(*zmq.curve_keypair())
        self.key = keys.public.decode()
        """The public key of the door."""
        keys.secure(self.socket)
        self._start(lambda: bind(self.socket, host, ports))

    def _receive(self) -> list[bytes]:
        try:
            parts = [self.socket.recv(), b""]
            if self.socket.get(zmq.RCVMORE):
                parts[1] = self.socket.recv()
            if self.socket.get(zmq.RCVMORE):
                raise ProtocolError("a message has one part")
            return parts
        finally:
            # Read the rest of a message with too many parts, or the next one would begin in its middle. The parts are
            # not kept: all of them together may be larger than the memory.
            while self.socket.get(zmq.RCVMORE):
                self.socket.recv(copy=False)


class DoorLink(_Post):
    """The connecting end."""

    def __init__(self, address: str, key: str, take: Callable[[bytes], None], tick: Callable[[], None]) -> None:
        """Connect to the door with the public ``key``, without waiting. Raises ChannelError for a bad address."""
        # Without reconnecting: messages that a broken connection has lost would never be answered.
        super().__init__(zmq.DEALER, {zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.RECONNECT_IVL: -1}, take, tick)
        self.socket.set(zmq.ROUTING_ID, b"c" + os.urandom(NAME_BYTES - 1))  # ZeroMQ's own names begin with a zero
        self.socket.set(zmq.IPV6, int("[" in address))
        try:
            CurveKeys(*zmq.curve_keypair()).secure(self.socket, key.encode())
            self._start(lambda: self.socket.connect(address))
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ChannelError(f"the address {address} of a swarm's door cannot be used: {error}") from error


def bind(sock: zmq.Socket[bytes], host: str, ports: tuple[int, int] | None) -> None:
    """Bind a socket to a free port of ``host``; ``ports`` is the first and the last that may be used, None for any.

    Raises ChannelError if none is free, or the address is not this machine's.
    """
    place = in_brackets(host)
    for port in ["*"] if ports is None else range(ports[0], ports[1] + 1):
        try:
            sock.bind(f"tcp://{place}:{port}")
            return
        except zmq.ZMQError as found:
            error = found
            if found.errno != zmq.EADDRINUSE:
                break
    if ports is not None and error.errno == zmq.EADDRINUSE:
        raise ChannelError(
            f"all ports from {ports[0]} to {ports[1]} of {host} are taken: name others with --ports (port=...), or "
            "end what listens there"
        ) from error
    raise ChannelError(
        f"cannot listen at {host}: {error}. Name an address of this machine: --host (host=...), or NBDIST_HOST"
    ) from error
