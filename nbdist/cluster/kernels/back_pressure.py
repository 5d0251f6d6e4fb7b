"""Makes the code of a worker wait while too much of its output has not left: the notebook reads more slowly.

A worker of another host sends its output through the relay of its keeper. While the notebook does not read, each part
of the way fills up, and holds the part before::

    print ── text ──> OutStream ── IOPub thread ──> XPUB ── ipc ──> SUB of the relay ──> `_MOST_READ` bytes ──> notebook
             waits at `_MOST_TEXT`        waits at `MESSAGES_WAITING`         `MESSAGES_WAITING`
    display ── message ──^ waits at `_MOST_BYTES`

Without this, ipykernel keeps all text in memory, and ZeroMQ drops messages from the thousandth on. Replies have
channels of their own, which never wait. An interrupt ends a wait of the main thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from nbdist.cluster.kernels.relay import MESSAGES_WAITING
from nbdist.cluster.kernels.versions import unsent_characters

__all__ = ["limit_output", "limit_socket"]

_MOST_TEXT = 1 << 18
"""Characters of printed text that may wait in a stream. A message of the stream has no more, but for one long text."""
_MOST_BYTES = 1 << 22
"""Bytes of messages, such as pictures, that may wait for the thread that sends them."""
_LOOK_EVERY = 0.05
"""Seconds between two looks whether there is room again."""


def limit_output(app: Any) -> None:
    """Let the code of a kernel wait while its output cannot leave. ``app`` is the kernel's application.

    Call it once, before the first cell: during each cell, IPython keeps the streams' methods, and sets them afterwards.
    The threads that send output and that serve control requests, such as interrupts, never wait.
    """
    sender = app.iopub_thread
    sending = _Sending(sender, [sender.thread, getattr(app, "control_thread", None)])
    sender.send_multipart = sending.send
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "pub_thread"):  # the user may have replaced it
            _limit_stream(stream, sending.may_wait)


def limit_socket(app: Any) -> None:
    """Make the kernel's output socket block, and not drop messages, from `MESSAGES_WAITING` messages on.

    Call it when the subscriber has connected: the limit does not hold for later connections. Returns at once: the
    sending thread, to which the socket belongs, does it.
    """
    sender = app.iopub_thread

    def limit() -> None:
        sender.socket.set(zmq.SNDHWM, MESSAGES_WAITING)
        sender.socket.set(zmq.XPUB_NODROP, 1)

    sender.schedule(limit)


class _Sending:
    """Counts the bytes of the messages that wait for the kernel's sending thread."""

    def __init__(self, sender: Any, exempt: Sequence[threading.Thread | None]) -> None:
        self._sender = sender
        self._plain = sender.send_multipart
        self._exempt = exempt
        self._plain_send = sender._really_send
        sender._really_send = self._send_now
        self._bytes = 0
        self._lock = threading.Lock()

    def may_wait(self) -> bool:
        """Return whether the calling thread may wait: the output can leave, and the thread is not one of the kernel's.

        A process that was forked from the worker has no sending thread.
        """
        return self._sender.thread.is_alive() and threading.current_thread() not in self._exempt

    def send(self, message: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        """Hand a message to the sending thread, in place of `IOPubThread.send_multipart`; first wait for room."""
        while self._bytes > _MOST_BYTES and self.may_wait():
            time.sleep(_LOOK_EVERY)
        with self._lock:
            self._bytes += _size(message)
        self._plain(message, *args, **kwargs)

    def _send_now(self, message: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        """Send a message, in place of `IOPubThread._really_send`; it blocks while the socket is full."""
        try:
            self._plain_send(message, *args, **kwargs)
        finally:
            with self._lock:
                self._bytes -= _size(message)


class _Limited:
    """Mixed into a kernel's stream: a write waits while more than `_MOST_TEXT` characters have not been sent."""

    _may_wait: Callable[[], bool]
    _written = 0
    """Characters written since the last look at what has been sent."""

    def write(self, text: str) -> Any:
        """Write text, then wait until most of it has been sent. An interrupt ends the wait; the text stays."""
        stream: Any = super()
        count = stream.write(text)
        self._written += len(text)
        while self._written > _MOST_TEXT:
            self._written = unsent_characters(self)
            if self._written > _MOST_TEXT:
                self._wait_for_flush()
                if not self._may_wait():
                    break
        return count

    def _wait_for_flush(self) -> None:
        """Make the sending thread take the text, and wait until it has, if the calling thread may wait."""
        stream: Any = self
        taken = threading.Event()
        stream.pub_thread.schedule(stream.flush)
        stream.pub_thread.schedule(taken.set)
        while self._may_wait() and not taken.wait(_LOOK_EVERY):
            pass


def _limit_stream(stream: Any, may_wait: Callable[[], bool]) -> None:
    """Make a stream of the kernel `_Limited`."""
    stream.__class__ = type(type(stream).__name__, (_Limited, type(stream)), {})
    limited: _Limited = stream
    limited._may_wait = may_wait


def _size(message: Sequence[Any]) -> int:
    """Return the bytes of a message's frames."""
    with contextlib.suppress(TypeError):
        return sum(map(len, message))
    return 0
