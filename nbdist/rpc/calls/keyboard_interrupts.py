"""Ctrl-C in waits that Python cannot end, and in a main thread that the kernel does not wake.

Two things keep Ctrl-C from ending a wait:

- The kernel delivers a signal to any one thread of the process. Python runs the handler in the main thread. If the main
  thread sleeps and another thread got the signal, the main thread does not notice. So a watching thread, which sees
  every signal, wakes the main thread with another signal (`_WAKE_SIGNAL`).
- A wait for a future of torch's own sleeps in C++, where no Python handler runs until the wait returns. The future may
  depend on a callback of ours. So if the main thread stays inside ``torch/futures`` after Ctrl-C, the watching thread
  fails the calls that the main thread has made. Then the wait returns, and Python raises the pending KeyboardInterrupt.
  (`nbdist.rpc.calls.collecting` waits in Python for a list with a future of ours in it.)

The watching thread reads the wakeup file of the `signal` module, to which Python's C code writes each signal's number.
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

from nbdist.channel.after_fork import call_forked
from nbdist.code_places import is_torchs
from nbdist.thread_frames import thread_frames

_LOOK_EVERY = 0.02  # seconds between two looks at where the main thread is, after Ctrl-C
_LOOK_FOR = 1.0  # seconds after Ctrl-C for which the watching thread looks
# Wakes only the main thread. Ignored by default, so that a late one does no harm.
_WAKE_SIGNAL = signal.SIGURG


class InterruptWatch:
    """Wakes the main thread at Ctrl-C, and calls ``give_up`` while the main thread stays in a wait of torch's own.

    ``give_up`` must end that wait. The watch takes over the wakeup file of the `signal` module, and copies what it
    reads there to the earlier wakeup file.
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closed = False
        # Only the main thread can set the wakeup file.
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # A user's handler stays: then `_wake` sends no signal.
        if signal.getsignal(_WAKE_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(_WAKE_SIGNAL, _on_wake)
        self._thread = threading.Thread(target=self._run, name="nbdist-interrupts", daemon=True)
        self._thread.start()
        call_forked(self)

    @classmethod
    def start(cls, give_up: Callable[[], None]) -> InterruptWatch | None:
        """Start a watch if this is the main thread; elsewhere return None, since only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return None
        return cls(give_up)

    def _run(self) -> None:
        while not self._closed:
            select.select([self._read], [], [])
            if self._closed:
                return  # `close` may have closed the file
            with contextlib.suppress(OSError):
                numbers = os.read(self._read, 512)
                if self._before >= 0:
                    os.write(self._before, numbers)
                if signal.SIGINT in numbers:
                    wake_main_thread()
                    self._look()

    def _look(self) -> None:
        """Call ``give_up`` repeatedly while the main thread stays in torch's own wait, at most `_LOOK_FOR` seconds."""
        deadline = time.monotonic() + _LOOK_FOR
        while time.monotonic() < deadline and not self._closed:
            time.sleep(_LOOK_EVERY)
            frame = thread_frames().get(threading.main_thread().ident or 0)
            if frame is None or not is_torchs(frame.f_code.co_filename, "futures"):
                return
            self._give_up()

    def forked(self) -> None:
        """Take this watch away from a forked process, whose signals would else count as those of its parent."""
        if self._closed:
            return
        self._closed = True
        found = signal.set_wakeup_fd(-1)
        _put_back(self._before if found == self._write else found)
        os.close(self._read)
        os.close(self._write)

    def close(self) -> None:
        """Stop watching, and restore the earlier wakeup file and handler. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")
        self._thread.join(0.5)
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread can take the file back from `signal`: it must stay open
        _put_back(self._before)
        if signal.getsignal(_WAKE_SIGNAL) is _on_wake:
            signal.signal(_WAKE_SIGNAL, signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)


wakes: list[Callable[[FrameType], None]] = []
"""Called in the main thread when `wake_main_thread` has interrupted it, with the frame in which it was.

They may raise KeyboardInterrupt, which then ends the wait of that frame. They must leave other frames alone.
"""


def wake_main_thread() -> None:
    """Make the main thread run the handlers of signals that are due, and `wakes`, also in the middle of a wait.

    Does nothing while handlers are delayed (`nbdist.signals`), or if the user has a handler of this signal.
    """
    if signal.getsignal(_WAKE_SIGNAL) is _on_wake:
        signal.pthread_kill(threading.main_thread().ident or 0, _WAKE_SIGNAL)


def _on_wake(number: int, frame: FrameType | None) -> None:
    if frame is not None and frame is sys._getframe().f_back:  # else it is late: the frame runs on already
        for wake in list(wakes):
            wake(frame)


def _put_back(wakeup_file: int) -> None:
    try:
        signal.set_wakeup_fd(wakeup_file)
    except (OSError, ValueError):  # the owner of this file has closed it meanwhile
        signal.set_wakeup_fd(-1)
