"""Tells the threads of the pool that some file has news, unless another thread has shut the gate.

The kernel wakes one of the threads that sleep here for each news. A thread that looks for a message without sleeping
would not keep the kernel from that, and the woken one would get in its way. So it shuts the gate first::

    file --- news --> `news` (an epoll of all files) -----> the gate (an epoll of that one) ---> who sleeps in `wait`
                        |                             ^
                        +--> who has shut it          `shut` takes it out, `open` puts it back

News that came in between wake somebody when the gate is opened, if they are still news.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time

__all__ = ["Gate"]

OVERDUE = 0.01
"""Seconds after which whoever sleeps here opens a gate that is still shut: Ctrl-C may have kept its owner from it."""


class Gate:
    """A place for threads to sleep in until some file has news."""

    def __init__(self) -> None:
        self.news = select.epoll()
        """The files; whoever has shut the gate asks this."""
        self._gate = select.epoll()
        self._gate.register(self.news, select.EPOLLIN)
        self._lock = threading.Lock()
        self._owner = 0
        """The ident of the thread that has shut it; 0 while it is open."""
        self._since = 0.0

    def wait(self, timeout: float | None) -> bool:
        """Sleep until there is news, for ``timeout`` seconds at most; return whether there is."""
        if self._gate.poll(timeout, 1):
            return True
        owner = self._owner
        if owner and time.monotonic() - self._since > OVERDUE:
            self.open(owner)
        return False

    def shut(self) -> bool:
        """Keep news from waking others; return whether the calling thread is now the one to open it again."""
        with self._lock:
            if self._owner:
                return False
            # First: after Ctrl-C `open` finds the owner, whether or not the rest has been done.
            self._owner, self._since = threading.get_ident(), time.monotonic()
            self._gate.unregister(self.news)
            return True

    def is_shut_by(self, thread: int) -> bool:
        """Return whether the thread of that ident has shut it."""
        return self._owner == thread

    def open(self, owner: int) -> None:
        """Open it, if the thread of ident ``owner`` has shut it and nobody has opened it since."""
        if self._owner != owner:
            return
        with self._lock:
            if self._owner == owner:
                with contextlib.suppress(OSError, ValueError):  # it was not shut to the end, or all is closed
                    self._gate.register(self.news, select.EPOLLIN)
                self._owner = 0

    def close(self) -> None:
        """Close both."""
        self._gate.close()
        self.news.close()
