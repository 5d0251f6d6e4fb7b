"""Delays signal handlers, such as the one of Ctrl-C, while code runs that must not be interrupted."""

from __future__ import annotations

import _signal as signals  # type: ignore[import-not-found]  # the functions of `signal` make enums, twice a call
import contextlib
import os
import signal
import threading
from types import CodeType, FrameType
from typing import Any

# The signals that another process, the user or a timer may send, and whose handlers may raise an error. The handler of
# SIGCHLD raises one where torch's DataLoader has workers.
_NAMES = (
    *("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGPROF", "SIGQUIT"),
    *("SIGXCPU", "SIGIO", "SIGPIPE", "SIGWINCH", "SIGTSTP", "SIGCONT", "SIGTTIN", "SIGTTOU", "SIGURG"),
)
_DEFERRED = tuple(getattr(signal, name) for name in _NAMES)


# So many handlers may raise an error, one after the other, while the others are restored or run.
_HANDLERS_THAT_MAY_RAISE = 1000


class DeferredSignals:
    """A context manager: inside of it, the main thread runs no handlers of signals.

    A handler whose signal came meanwhile runs at the end. In other threads, which never run handlers, this does
    nothing. Deferrals may be nested. Entering and leaving takes about 2 µs.

    ``sleeps`` is the code of a function in which the thread may sleep: there, handlers run at once all the same.
    """

    __slots__ = ("_before", "_came", "_is_over", "_sleeps", "is_due")

    def __init__(self, sleeps: CodeType | None = None) -> None:
        self.is_due = False
        """True once a signal has arrived whose handler waits for the end of the block."""
        self._sleeps = sleeps
        self._before: dict[int, Any] = {}
        self._came: list[tuple[int, FrameType | None]] = []
        self._is_over = False

    def __enter__(self) -> DeferredSignals:
        if threading.get_ident() == _main_thread:
            try:
                # Before the first handler is replaced: a child that is forked here restores the handlers of `_open`.
                _open.append(self)
                for number in _DEFERRED:
                    before = signals.getsignal(number)
                    if callable(before):  # not SIG_DFL or SIG_IGN, nor None, which is a handler in C
                        self._before[number] = before
                        signals.signal(number, self._note)
            except BaseException:  # from a handler that is not replaced yet
                self.__exit__()
                raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self in _open:
            del _open[-1]  # not `pop`: after a call, a handler could raise before the others are restored
        if not self._before:  # not the main thread
            return
        raised: BaseException | None = None
        for _ in range(_HANDLERS_THAT_MAY_RAISE):
            try:
                self.put_back()
                if self._came:
                    self._run_what_came()
                break
            except BaseException as error:  # from a handler: the others must still be restored, or run
                raised = error
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # else the error, its traceback and this frame would keep each other alive

    def put_back(self) -> None:
        """Restore the handlers that signals had before this deferral. The deferral is over then.

        Called at the end of the block, and in a forked child.
        """
        for number, before in self._before.items():
            # A handler that other code has set inside of the block stays. `==`, since each look makes another bound
            # method.
            if signals.getsignal(number) == self._note:
                signals.signal(number, before)
        self._is_over = True  # a signal that still reaches `_note` calls its handler at once

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_over or (frame is not None and frame.f_code is self._sleeps):
            self._before[number](number, frame)
        else:
            self._came.append((number, frame))
            self.is_due = True

    def _run_what_came(self) -> None:
        while self._came:
            number, frame = self._came[0]
            try:
                self._before[number](number, frame)
            finally:
                del self._came[0]  # only now: if an error keeps a handler from running, it runs later


_open: list[DeferredSignals] = []  # the deferrals of the main thread; the innermost is last

_main_thread = threading.main_thread().ident  # the thread that runs the handlers of signals


def _after_fork() -> None:
    global _main_thread
    _main_thread = threading.get_ident()
    while _open:  # another thread has forked, and is the child's main thread
        ended = _open.pop()
        with contextlib.suppress(BaseException):  # from a handler: the outer deferrals must still be ended
            ended.put_back()


os.register_at_fork(after_in_child=_after_fork)
