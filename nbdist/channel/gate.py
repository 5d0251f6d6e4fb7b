"""Wakes sleeping threads when a file becomes readable, unless another thread has shut the gate to read it alone.

When a file becomes readable, the kernel wakes one of the threads that sleep here, and sometimes a second one, which
then finds nothing to read. If another thread polls for messages without sleeping (`nbdist.channel.spinning`), the
kernel wakes sleeping threads as well, and they compete with it for the core. So that thread shuts the gate first::

    file ── readable ──> `news` (an epoll of all files) ──┬──> the gate (an epoll of `news`) ──> threads in `wait`
                           │                              │
                           │                              └ `shut` cuts the line here, `open` restores it
                           └──> the thread that shut the gate polls `news` itself

A file that became readable while the gate was shut wakes a thread when the gate is opened, if it is still readable.
"""

from __future__ import annotations

import select
import threading
import time

OPEN_AFTER = 0.01
"""Seconds after which a gate that is still shut is opened by the next thread whose `wait` times out."""
# Only Ctrl-C keeps an owner from opening the gate. An agent's threads wait for 0.2 s at most, so they find out soon.


class Gate:
    """A place where threads sleep until a file is readable. Any thread may call any method."""

    def __init__(self) -> None:
        self.news = select.epoll()
        """The epoll of all files. The thread that has shut the gate polls it directly."""
        self._gate = select.epoll()
        self._gate.register(self.news, select.EPOLLIN)
        self._lock = threading.RLock()  # reentrant: a user's ``__del__`` may run while it is held, and call this gate
        self.owner = 0
        """The ident of the thread that has shut the gate; 0 while it is open."""
        self._since = 0.0  # the moment at which the gate was last shut, as of `time.monotonic`

    def wait(self, timeout: float | None) -> bool:
        """Sleep until a file is readable, for ``timeout`` seconds at most. Returns whether one may be.

        Opens a gate that was shut for too long, because Ctrl-C kept its owner from opening it.
        """
        if self._gate.poll(timeout, 1):
            return True
        owner = self.owner
        if owner and time.monotonic() - self._since > OPEN_AFTER:
            # True if the gate cannot be opened: its owner runs a signal handler in the middle of `shut`, and this
            # handler may wait for a message that only the caller can read.
            return not self._open(owner, blocking=False)
        return False

    def shut(self) -> bool:
        """Keep files from waking the threads in `wait`. Returns False if another thread moves the gate, or has shut it.

        After True, the calling thread must poll `news`, the epoll of all files, itself, and then call `open`.
        """
        # Without waiting: a signal handler of the thread that has the lock may wait for a message that this one reads.
        # Ctrl-C right after this leaves the lock with this thread: others then never shut the gate, and no more.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self.owner:
                return False
            # Set the owner first: if Ctrl-C comes right after, `open` still knows that the gate may be shut.
            me = threading.get_ident()
            self._since, self.owner = time.monotonic(), me
            self._let_through(0)
            if self.owner == me:
                return True
            self._let_through(select.EPOLLIN)  # a signal handler has made a call here, and opened the gate after it
            return False
        finally:
            self._lock.release()

    def open(self, owner: int) -> None:
        """Let files wake the threads in `wait` again, if the thread with the ident ``owner`` has shut the gate."""
        if self.owner == owner:
            self._open(owner, blocking=True)

    def _open(self, owner: int, *, blocking: bool) -> bool:
        if not self._lock.acquire(blocking=blocking):
            return False
        try:
            if self.owner == owner:
                # In this order: else Ctrl-C in between would leave a shut gate without an owner, which nobody opens.
                self._let_through(select.EPOLLIN)
                self.owner = 0
            return True
        finally:
            self._lock.release()

    def _let_through(self, events: int) -> None:
        try:
            self._gate.modify(self.news, events)
        except (OSError, ValueError):  # the gate is closed
            return

    def forked(self) -> None:
        """Reset the lock and the owner in a forked process, which lacks the threads that may have held them."""
        self._lock = threading.RLock()
        self.owner = 0

    def close(self) -> None:
        """Close both epolls. No thread may be in `wait`."""
        self._gate.close()
        self.news.close()
