"""Links over ZeroMQ's PUSH sockets, for small messages and for large ones.

A small message travels in one piece, as `nbdist.channel.framing` lays it out. A large one travels in chunks
(`nbdist.channel.assembly`).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence

import zmq

from nbdist.channel.assembly import NOT_COPIED_FROM, chunks
from nbdist.channel.contract import Buffer, ChannelError, TooManyFiles
from nbdist.channel.framing import head
from nbdist.channel.resources import require_files
from nbdist.errors import ResourceError
from nbdist.signals import DeferredSignals

_FILES_FOR_LARGE = 16  # free files before the first large message: one for a socket, 7 for a thread of pyzmq


class ZeroMqLink:
    """A `Link` over a PUSH socket, for which threads take turns. Every message is copied, and sent as a whole."""

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, frames: Sequence[Buffer], kind: str) -> None:
        """Queue a message for ZeroMQ's own thread. Raises ChannelError if the link or the channel is closed."""
        # One part: each further part takes as long as a system call, and may lose the GIL in the middle.
        whole = b"".join((head([*map(len, frames)]), *frames))
        with self._lock:
            try:
                self._socket.send(whole, zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise _not_sent(error) from error

    def close(self, *, at_once: bool = False) -> None:
        """Close the socket. Unless ``at_once``, ZeroMQ still sends queued messages for half a second."""
        with self._lock:
            self._socket.close(0 if at_once else None)


class LargeZeroMqLink(ZeroMqLink):
    """A `Link` over a PUSH socket to a large inbox. Every message is sent in chunks."""

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        super().__init__(sock)
        self._name = os.urandom(8)
        self._numbers = itertools.count()

    def send(self, frames: Sequence[Buffer], kind: str) -> None:
        """Queue a message for ZeroMQ's own thread, without copying its large frames. Raises errors as `ZeroMqLink`."""
        # If Ctrl-C cut a chunk in two, the next chunk's parts would be appended to it.
        with DeferredSignals(), self._lock:
            try:
                for begin, data in chunks(frames, self._name, next(self._numbers)):
                    self._socket.send(begin, zmq.NOBLOCK | zmq.SNDMORE)
                    self._socket.send(data, zmq.NOBLOCK, copy=len(data) < NOT_COPIED_FROM)
            except zmq.ZMQError as error:
                raise _not_sent(error) from error


def get_ready_to_send_without_copies() -> None:
    """Start the thread with which pyzmq notices that memory is no longer used. Raises TooManyFiles if it cannot."""
    # pyzmq would start it with the first message that it does not copy, and abort this process if there is no file.
    try:
        require_files(_FILES_FOR_LARGE, "no link for large messages can be made")
    except ResourceError as error:
        raise TooManyFiles(str(error)) from error
    zmq.Frame(b"x", copy=False, copy_threshold=0)


def _not_sent(error: zmq.ZMQError) -> ChannelError:
    return ChannelError(f"cannot send a message to another worker: {error}. It was not sent: call again")
