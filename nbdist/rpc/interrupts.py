"""Ctrl-C for waits that Python cannot end, and for a main thread that the kernel does not tell of it.

The kernel tells one thread, any one, of a signal that is sent to a process. Python runs the handler in the main thread,
which knows nothing of it if it sleeps and another thread was told. So who sees Ctrl-C arrive wakes the main thread,
with a signal that is for nothing else (`_WAKING`).

A wait for a future of torch's own sleeps in C++, where no Python signal handler runs until it returns. Such a future
may be one that a callback of ours completes. (A list with a future of ours in it is waited for in Python, see
`nbdist.rpc.collecting`.) A signal's arrival can still be seen from another thread, through the wakeup file of the
`signal` module: if the main thread then stays inside ``torch/futures``, the watch fails the calls that the main
thread made, the wait returns, and Python raises the KeyboardInterrupt that has been pending meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

__all__ = ["InterruptWatch"]

_LOOK_EVERY = 0.02
_LOOK_FOR = 1.0
_WAKING = signal.SIGURG
"""A signal for the main thread alone, so that it runs the handlers of others."""

_TORCH_FUTURES = os.path.join("torch", "futures", "__init__.py")


class InterruptWatch:
    """Wakes the main thread at Ctrl-C, and calls ``give_up`` where it is inside torch's own waits then."""

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closed = False
        # The wakeup file belongs to the main thread; one that is there already gets what we read.
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if signal.getsignal(_WAKING) in (signal.SIG_DFL, signal.SIG_IGN):  # else it is somebody's: `_wake` leaves it
            signal.signal(_WAKING, _nothing)
        self._thread = threading.Thread(target=self._run, name="nbdist-interrupts", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, give_up: Callable[[], None]) -> InterruptWatch | None:
        """A watch, if this is the main thread; only there can it be set up."""
        if threading.current_thread() is not threading.main_thread():
            return None
        return cls(give_up)

    def _run(self) -> None:
        while not self._closed:
            select.select([self._read], [], [])
            if self._closed:
                return  # the file may be gone
            with contextlib.suppress(OSError):
                numbers = os.read(self._read, 512)
                if self._before >= 0:
                    os.write(self._before, numbers)
                if signal.SIGINT in numbers:
                    self._wake()
                    self._look()

    def _wake(self) -> None:
        """Have the main thread run what handlers are due; one that has done so already does nothing."""
        if signal.getsignal(_WAKING) is _nothing:
            signal.pthread_kill(threading.main_thread().ident or 0, _WAKING)

    def _look(self) -> None:
        deadline = time.monotonic() + _LOOK_FOR
        while time.monotonic() < deadline and not self._closed:
            time.sleep(_LOOK_EVERY)
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            if frame is None or not frame.f_code.co_filename.endswith(_TORCH_FUTURES):
                return
            self._give_up()

    def close(self) -> None:
        """Stop, and put back what was there."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")
        self._thread.join(0.5)
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread can take the file back from `signal`: it must stay open
        _put_back(self._before)
        if signal.getsignal(_WAKING) is _nothing:
            signal.signal(_WAKING, signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal that was only to wake the main thread."""


def _put_back(wakeup_file: int) -> None:
    try:
        signal.set_wakeup_fd(wakeup_file)
    except (OSError, ValueError):  # its owner has closed it meanwhile
        signal.set_wakeup_fd(-1)
