"""Keeps the handlers of signals, such as the one that raises KeyboardInterrupt, out of what must not be cut short."""

from __future__ import annotations

import _signal as signals  # type: ignore[import-not-found]  # `signal` itself makes enums, twice a call
import os
import signal
import threading
from types import CodeType, FrameType
from typing import Any

__all__ = ["Deferral"]

_DEFERRED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGPROF", "SIGQUIT")
    if hasattr(signal, name)
)
"""The signals whose handlers may raise."""


class Deferral:
    """The time in which the main thread runs no signal's handler; in another thread, which runs none, it does nothing.

    A handler whose signal came meanwhile runs at the end. It costs about 5 µs. One may begin within another.
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
        if self._before:  # it is the main thread
            try:
                self.put_back()
            finally:
                self._run_what_came()

    def put_back(self) -> None:
        """Have all handlers that were there, without those that wait; what one of them raises meanwhile comes last."""
        raised: BaseException | None = None
        self._is_over = True
        while True:
            try:
                for number, before in self._before.items():
                    signals.signal(number, before)
                break
            except BaseException as error:  # from a handler that is there again: the others are still to come
                raised = error
        if raised is not None:
            raise raised

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_over or (frame is not None and frame.f_code is self._sleeps):
            self._before[number](number, frame)
        else:
            self._came.append((number, frame))
            self.is_due = True

    def _run_what_came(self) -> None:
        while self._came:
            number, frame = self._came.pop(0)
            try:
                self._before[number](number, frame)
            finally:
                self._run_what_came()  # also when this one raises


_deferral: Deferral | None = None
"""The innermost of the main thread."""

_main_thread = threading.main_thread().ident
"""The ident of the thread in which handlers of signals run."""


def _after_fork() -> None:
    global _deferral, _main_thread
    _main_thread = threading.get_ident()
    while _deferral is not None:  # another thread has forked, and is the child's main one
        _deferral.put_back()
        _deferral = _deferral._outer


os.register_at_fork(after_in_child=_after_fork)
