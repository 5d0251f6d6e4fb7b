"""The inbox of a ZeroMQ channel for large messages: a thread that puts their chunks together.

Encrypting and copying takes long, and a small message that arrives meanwhile must not wait. So large messages have a
socket and a thread of their own; the channel's other inbox only gets an announcement of each whole message.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

import zmq

from nbdist.channel.assembly import Assembly
from nbdist.finalisers import this_thread
from nbdist.signals import DeferredSignals

_LOOK_EVERY_MS = 10_000  # between two searches for incomplete large messages of which no more arrives

_log = logging.getLogger("nbdist.channel")


class LargeInbox:
    """Receives the chunks of large messages in a thread of its own, and announces whole messages in the other inbox."""

    ANNOUNCED_AT = "inproc://large"  # the address at which the other inbox listens for announcements
    ANNOUNCEMENT = b"\0"  # tells the other inbox of a whole message in this one

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], inbox: zmq.Socket[bytes], max_message: int) -> None:
        """Start the thread that reads ``inbox``; it accepts messages of at most ``max_message`` bytes."""
        self._inbox = inbox
        self._whole: deque[list[bytes]] = deque()
        self._assembly = Assembly(max_message)
        self._to_inbox = context.socket(zmq.PUSH)
        # Without a limit: in `_take`, `send` must not fail once `_whole` has the message.
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
        this_thread.is_closed = True  # a finaliser of the user's may run here, and must not wait for a call
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        while not any(which == self._stop for which, _ in poller.poll(_LOOK_EVERY_MS if self._assembly else None)):
            self._assembly.drop_idle()
            while not self._closing and int(self._inbox.get(zmq.EVENTS)) & zmq.POLLIN:
                try:
                    self._take()
                except Exception:  # the thread must continue: no other thread takes large messages
                    _log.exception("a large message from another agent is dropped")

    def _take(self) -> None:
        """Take one chunk; if it was the last one of its message, announce the message. Drop other bytes."""
        head = self._inbox.recv()
        if not self._inbox.get(zmq.RCVMORE):
            return
        data = self._inbox.recv(copy=False)
        if data.more:
            self._inbox.recv_multipart()
            return
        if (frames := self._assembly.add(head, data.buffer)) is not None:
            # Before the announcement: another thread takes the message as soon as it reads that.
            self._whole.append(frames)  # type: ignore[arg-type]  # large frames are views; see `Channel.receive`
            self._to_inbox.send(self.ANNOUNCEMENT, zmq.NOBLOCK)

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
