"""The outcome of a call for which one thread waits once, as `rpc_sync` does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from nbdist.errors import RpcTimeout
from nbdist.rpc.waits import call_interrupt_hook, this_wait


class Latch:
    """The outcome of a call for which one thread waits once. It costs less than a `Future`."""

    __slots__ = ("_lock", "_outcome", "_setting", "error", "is_settled", "on_interrupt", "on_send", "on_settle")

    def __init__(self, on_send: Callable[[], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._setting = threading.Lock()  # of several threads that settle the latch, one wins
        self.is_settled = False
        self.on_settle: Callable[[], None] | None = None  # called once, by the thread that settles the latch
        # Called right before the call is sent. Only for a thread that calls `wait` directly afterwards and reads the
        # answer itself.
        self.on_send = on_send
        self.on_interrupt: Callable[[], object] | None = None  # called first when Ctrl-C ends the wait
        self._outcome: Any = None
        self.error: BaseException | None = None
        """The error with which the call failed; None if it has not failed (yet), and once `wait` has raised it."""

    def try_settle(self, outcome: Any, error: BaseException | None) -> bool:
        """Set the outcome or the error and wake the waiting thread; return False if the latch was settled before."""
        with self._setting:
            if self.is_settled:
                return False
            self._outcome, self.error = outcome, error
            self.is_settled = True
        self._lock.release()
        on_settle = self.on_settle
        if on_settle is not None:
            on_settle()
        return True

    def wait(
        self, read: Callable[[Latch], None] | None = None, timeout: float = -1.0, others: Sequence[Latch] = ()
    ) -> Any:
        """Wait for the outcome, and return it or raise the error.

        Only one thread may wait, and only once: a second wait would never end. Ctrl-C ends the wait.

        Args:
            read: Called with the latch before this thread sleeps; it may read messages until the answer has come.
            timeout: Seconds to sleep, after ``read``, before this raises RpcTimeout; negative for no limit.
            others: Other latches for which this thread waits: Ctrl-C stops the calls of these, too, on the workers.
        """
        hook = this_wait.blocking_hook
        try:
            try:
                # Both branches do the same: `rpc_sync` saves the call of a context manager.
                if hook is None:  # the main thread, as a rule
                    if read is not None:
                        read(self)
                    in_time = self._lock.acquire(timeout=timeout)
                else:
                    with hook():
                        if read is not None:
                            read(self)
                        in_time = self._lock.acquire(timeout=timeout)
            except KeyboardInterrupt as error:
                if self.on_interrupt is not None:
                    self.on_interrupt()
                call_interrupt_hook((self, *others), error)
                raise
            if not in_time:
                raise RpcTimeout(f"waited {timeout:g} s for an answer")
            failed, self.error = self.error, None
            if failed is not None:
                raise failed
            return self._outcome
        finally:
            failed = None  # or the error would keep itself alive, through its traceback and this frame
