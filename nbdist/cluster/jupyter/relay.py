"""Relays the messages of a kernel's channels if the kernel and the notebook are on different hosts.

::

    the notebook's host                                              the kernel's host
    KernelConnection ── ipc ──> Relay.before_notebook ── carry, deliver ──> Relay.before_kernel ── ipc ──> ipykernel

A relay has two threads. One reads and writes its sockets. The other, the *courier*, carries the messages that were read
to the other relay, one batch at a time, in order. While a batch is on its way, the relay reads more, so a kernel never
waits to send its output. `nbdist.cluster.jupyter.waiting_output` holds what was read, and drops text if it is too much.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from nbdist.cluster.jupyter.waiting_output import Parcel, WaitingOutput

_CHANNELS = ("shell", "iopub", "stdin", "control")
# The name by which the kernel knows its only client: requests for input go where the cells came from.
_CLIENT = b"notebook"
_BATCH = 1 << 20  # bytes after which a batch is full
_MESSAGES_AT_ONCE = 100  # messages of a channel that are read before the others have their turn

_log = logging.getLogger("nbdist.cluster")


class Relay:
    """One end of the connection between a notebook and a kernel of another host.

    `before_notebook` and `before_kernel` make it; their ``connection`` is what the kernel's connection file says.
    ``carry(batch)`` brings a list of parcels to the other end, and returns when they are there. If it raises an error,
    the relay carries nothing more.
    """

    def __init__(
        self, connection: Mapping[str, Any], carry: Callable[[list[Parcel]], object], of_output: int, of_others: int
    ) -> None:
        """Open sockets of the kind ``of_output`` for the channel iopub, ``of_others`` for the other channels."""
        self._context: Any = zmq.Context()
        self._context.rcvhwm = self._context.sndhwm = 0  # no message is dropped
        kinds = {channel: of_output if channel == "iopub" else of_others for channel in _CHANNELS}
        self._sockets = {channel: _socket(self._context, connection, channel, kind) for channel, kind in kinds.items()}
        self._carry = carry
        self._client = _CLIENT  # the identity of the client on this side, for ROUTER sockets
        self._to_send: deque[Parcel] = deque()  # delivered here, and not sent to a socket yet
        self._read = WaitingOutput(connection["key"].encode())
        self._carrying = False  # True while a batch is on its way
        # Guards `_read`, `_carrying` and `_closed`; notified when one of them changes.
        self._changed = threading.Condition()
        self._closed = False
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._work, "nbdist-relay"), (self._carry_all, "nbdist-courier"))
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def before_notebook(cls, connection: Mapping[str, Any], carry: Callable[[list[Parcel]], object]) -> Relay:
        """Return a relay that answers the notebook in the place of the kernel, at a connection's ``ipc`` sockets."""
        return cls(connection, carry, zmq.PUB, zmq.ROUTER)

    @classmethod
    def before_kernel(cls, connection: Mapping[str, Any], carry: Callable[[list[Parcel]], object]) -> Relay:
        """Return a relay that is the client of a kernel of this host."""
        return cls(connection, carry, zmq.SUB, zmq.DEALER)

    def deliver(self, batch: Sequence[Parcel]) -> None:
        """Accept a batch from the other end, and queue it for the sockets. Does not wait. Any thread may call this."""
        self._to_send.extend(batch)
        self._wake()

    def drain(self, quiet: float, timeout: float) -> None:
        """Wait until all parcels read here are carried away, and none came for ``quiet`` s; ``timeout`` s at most."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._closed and (left := deadline - time.monotonic()) > 0:
                if self._read or self._carrying:
                    self._changed.wait(left)
                elif not self._changed.wait(min(quiet, left)):
                    return

    def close(self) -> None:
        """Stop, and close the sockets."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)
        with self._changed:
            wake_in, self._wake_in = self._wake_in, -1
            os.close(wake_in)

    def _wake(self) -> None:
        """Make the thread of the sockets look at once."""
        # Under the lock: the file's number may belong to another file as soon as it is closed.
        with self._changed, contextlib.suppress(OSError):
            os.write(self._wake_in, b"w")

    # -- the thread of the sockets ------------------------------------------------------------

    def _work(self) -> None:
        """Read and write the sockets until `close`; then close them."""
        woken, all_files = select.poll(), select.poll()
        for poller in (woken, all_files):
            poller.register(self._wake_out, select.POLLIN)
        for sock in self._sockets.values():
            all_files.register(sock.FD, select.POLLIN)
        while not self._closed:
            # ZeroMQ's files report a change once: so all sockets are looked at until nothing moves any more.
            while self._send_all() | self._read_all():
                pass
            # While there is no room, nothing is read, and the files would stay readable. The courier wakes this thread.
            (all_files if self._read.has_room else woken).poll()
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_out, 4096)
        os.close(self._wake_out)
        self._context.destroy(linger=0)

    def _send_all(self) -> bool:
        """Send the parcels that were delivered; return whether there were any."""
        moved = bool(self._to_send)
        while self._to_send:
            channel, frames = self._to_send.popleft()
            sock = self._sockets[channel]
            with contextlib.suppress(zmq.ZMQError):
                sock.send_multipart([self._client, *frames] if sock.type == zmq.ROUTER else frames)
        return moved

    def _read_all(self) -> bool:
        """Read the messages at the sockets while there is room; return whether there were any."""
        found: list[Parcel] = []
        if self._read.has_room:
            for channel, sock in self._sockets.items():
                for _ in range(_MESSAGES_AT_ONCE):
                    # Also of the PUB socket, which has no messages: else its file would stay readable.
                    if not sock.EVENTS & zmq.POLLIN:
                        break
                    frames = sock.recv_multipart()
                    if sock.type == zmq.ROUTER:
                        self._client, *frames = frames
                    found.append((channel, frames))
        if found:
            with self._changed:
                for parcel in found:
                    self._read.add(parcel)
                self._changed.notify_all()
        return bool(found)

    # -- the courier --------------------------------------------------------------------------

    def _carry_all(self) -> None:
        """Carry the parcels that were read to the other end, batch by batch, until `close` or an error."""
        while batch := self._next_batch():
            try:
                self._carry(batch)
            except Exception as error:  # of `carry`, of any class: the other end cannot be reached
                if not self._closed:
                    _log.debug("a relay stops: %s", error)
                return
            finally:
                with self._changed:
                    self._carrying = False
                    self._changed.notify_all()
            self._wake()  # there is room again

    def _next_batch(self) -> list[Parcel]:
        """Wait for parcels; return the next batch of them, or [] after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._read or self._closed)
            batch = [] if self._closed else self._read.take(_BATCH)
            self._carrying = bool(batch)
            return batch


def _socket(context: Any, connection: Mapping[str, Any], channel: str, kind: int) -> Any:
    """Return a socket for a channel of this connection: bound as the kernel's, or connected as a client's."""
    sock = context.socket(kind)
    sock.linger = 0  # forgets unsent messages as it closes
    address = f"ipc://{connection['ip']}-{connection[f'{channel}_port']}"
    if kind in (zmq.PUB, zmq.ROUTER):
        sock.bind(address)
        return sock
    if kind == zmq.SUB:
        sock.subscribe(b"")
    else:
        sock.identity = _CLIENT
    sock.reconnect_ivl = 10  # a starting kernel has yet to make its sockets
    sock.connect(address)
    return sock
