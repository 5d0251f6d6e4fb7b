"""Tells the threads of the pool that some file has news, unless another thread has shut the gate.

For each news the kernel wakes one of the threads that sleep here, and now and then a second one, which finds nothing.
A thread that looks for a message without sleeping would not keep the kernel from that, and the woken one would get in
its way. So it shuts the gate first::

    file --- news --> `news` (an epoll of all files) -----> the gate (an epoll of that one) ---> who sleeps in `wait`
                        |                             ^
                        +--> who has shut it          `shut` and `open` work here

News that came in between wake somebody when the gate is opened, if they are still news.
"""

from __future__ import annotations

import select
import threading
import time

__all__ = ["Gate"]

OVERDUE = 0.01
"""Seconds after which a gate that is still shut is opened by whoever ends a sleep here without news.

Its owner may have been kept from it by Ctrl-C. An agent's threads sleep for 0.2 s at most.
"""


class Gate:
    """A place for threads to sleep in until some file has news."""

    def __init__(self) -> None:
        self.news = select.epoll()
        """The files; whoever has shut the gate asks this."""
        self._gate = select.epoll()
        self._gate.register(self.news, select.EPOLLIN)
        self._lock = threading.RLock()  # a user's ``__del__``, which may run anywhere, may come here again
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
            self._since, self._owner = time.monotonic(), threading.get_ident()
            self._let_through(0)
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
                self._let_through(select.EPOLLIN)
                self._owner = 0

    def _let_through(self, events: int) -> None:
        try:
            self._gate.modify(self.news, events)
        except (OSError, ValueError):  # it is closed
            return

    def forked(self) -> None:
        """In a child process: whoever holds the lock or has shut the gate may not be here."""
        self._lock = threading.RLock()
        self._owner = 0

    def close(self) -> None:
        """Close both."""
        self._gate.close()
        self.news.close()
