"""Keeps the handlers of signals, such as the one that raises KeyboardInterrupt, out of what must not be cut short."""

from __future__ import annotations

import _signal as signals  # type: ignore[import-not-found]  # `signal` itself makes enums, twice a call
import contextlib
import os
import signal
import threading
from types import CodeType, FrameType
from typing import Any

__all__ = ["Deferral"]

_DEFERRED = tuple(
    getattr(signal, name)
    for name in (
        *("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGPROF", "SIGQUIT"),
        *("SIGXCPU", "SIGIO", "SIGPIPE", "SIGWINCH", "SIGTSTP", "SIGCONT", "SIGTTIN", "SIGTTOU", "SIGURG"),
    )
    if hasattr(signal, name)
)
"""The signals that another process, the user or a clock may send, and whose handlers may raise.

That of SIGCHLD does where torch's DataLoader has workers.
"""


_TRIES = 1000
"""The number of handlers that may raise while the others are put back, or run."""


class Deferral:
    """While it is entered, the main thread runs no handlers of signals.

    In other threads, which run none, it does nothing. A handler whose signal came meanwhile runs at the end. It costs
    about 2 µs. One may begin within another.
    """

    __slots__ = ("_before", "_came", "_is_over", "_outer", "_sleeps", "is_due")

    def __init__(self, sleeps: CodeType | None = None) -> None:
        """Begin with ``with``; handlers may run all the same while the thread is in ``sleeps``, a function's code."""
        self.is_due = False
        """Whether a signal has come whose handler waits."""
        self._sleeps = sleeps
        self._outer: Deferral | None = None
        self._before: dict[int, Any] = {}
        self._came: list[tuple[int, FrameType | None]] = []
        self._is_over = False

    def __enter__(self) -> Deferral:
        global _deferral
        if threading.get_ident() == _main_thread:
            try:
                self._outer, _deferral = _deferral, self
                for number in _DEFERRED:
                    before = signals.getsignal(number)
                    if callable(before):
                        self._before[number] = before
                        signals.signal(number, self._note)
            except BaseException:  # from a handler that is not deferred yet
                self.__exit__()
                raise
        return self

    def __exit__(self, *exception: object) -> None:
        global _deferral
        if _deferral is self:
            _deferral = self._outer
        if not self._before:  # it is not the main thread
            return
        raised: BaseException | None = None
        for _ in range(_TRIES):
            try:
                self.put_back()
                if self._came:
                    self._run_what_came()
                break
            except BaseException as error:  # from a handler: the others are still to be put back, or to run
                raised = error
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # or the error, its traceback and this frame would keep each other

    def put_back(self) -> None:
        """Put the handlers back that were there before, except where somebody has set another one meanwhile."""
        for number, before in self._before.items():
            if signals.getsignal(number) == self._note:
                signals.signal(number, before)
        self._is_over = True

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
                del self._came[0]  # not before: a handler that another one keeps from running runs later


_deferral: Deferral | None = None
"""The innermost of the main thread."""

_main_thread = threading.main_thread().ident
"""The ident of the thread in which handlers of signals run."""


def _after_fork() -> None:
    global _deferral, _main_thread
    _main_thread = threading.get_ident()
    while _deferral is not None:  # another thread has forked, and is the child's main one
        ended, _deferral = _deferral, _deferral._outer
        with contextlib.suppress(BaseException):  # from a handler: the outer ones are still to be put back
            ended.put_back()


os.register_at_fork(after_in_child=_after_fork)
