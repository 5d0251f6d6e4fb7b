"""Futures that can be awaited, interrupted, and chained, and that torch takes for its own.

`Future` is a `torch.futures.Future`, so ``torch.futures.wait_all`` and ``collect_all`` take it. But torch's
``wait`` sleeps in C++, deaf to Ctrl-C and blind to deadlines; ours sleeps on a Python lock, and tells the
pool of the thread it blocks, so that the pool can grow (`nbdist.rpc.dispatch`).

A list of such futures is waited for in `nbdist.rpc.collecting`.

What an error holds::

    future ── _error ──> error ── __traceback__ ──> frames that raised it and waited for it ──> their locals
       │                                                                                          (the future, too)
       └── torch's C++ ── value ──> _Failure ╌╌ weak ╌╌> future

The upper circle is Python's, and the garbage collector frees it. No strong reference may lead from torch's C++ to
the error: the collector cannot see through C++, and would keep the error, its frames and their tensors for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import torch

from nbdist import durations
from nbdist.errors import RpcTimeout, UsageError
from nbdist.finalisers import may_wait

__all__ = [
    "Future",
    "Latch",
    "Promise",
    "blocking_wait",
    "outcome_of",
    "set_blocking_hook",
    "set_carrier",
    "set_interrupt_hook",
    "without_first_frame",
]

_log = logging.getLogger("nbdist.rpc")

T = TypeVar("T")
S = TypeVar("S")


class _PerThread(threading.local):
    blocking: Callable[[], AbstractContextManager[None]] | None = None


_thread = _PerThread()


def set_blocking_hook(hook: Callable[[], AbstractContextManager[None]] | None) -> None:
    """Have ``hook()`` entered around every wait of the calling thread."""
    _thread.blocking = hook


def blocking_wait() -> AbstractContextManager[None]:
    """What to enter around anything that may block the calling thread for the sake of another call."""
    hook = _thread.blocking
    return hook() if hook is not None else nullcontext()


Surroundings = Callable[[], AbstractContextManager[None]]
"""Makes what to enter around a callback."""

_carrier: Callable[[], Surroundings | None] | None = None


def set_carrier(carrier: Callable[[], Surroundings | None] | None) -> None:
    """Have ``carrier()`` asked, where a callback is given, for what goes along from there to where it is called."""
    global _carrier
    _carrier = carrier


_interrupt_hook: Callable[[object, BaseException], None] | None = None


def set_interrupt_hook(hook: Callable[[object, BaseException], None] | None) -> None:
    """Have ``hook(outcome, error)`` called when Ctrl-C has ended a wait for an outcome."""
    global _interrupt_hook
    _interrupt_hook = hook


def _interrupted(outcome: object, error: BaseException) -> None:
    if _interrupt_hook is not None:
        _interrupt_hook(outcome, error)


class Latch:
    """An outcome that one thread waits for: what is left of a future that nobody else will see."""

    __slots__ = ("_error", "_lock", "_outcome", "_setting", "is_settled", "on_interrupt", "on_send", "on_settle")

    def __init__(self, on_send: Callable[[], None] | None = None) -> None:
        """Wait for nothing yet.

        ``on_send`` is called right before the call goes out whose outcome this is. It is for a thread that calls
        `wait` directly after that.
        """
        self._lock = threading.Lock()
        self._lock.acquire()
        self._setting = threading.Lock()
        self.is_settled = False
        self.on_settle: Callable[[], None] | None = None
        """What to call when it is settled."""
        self.on_send = on_send
        self.on_interrupt: Callable[[], object] | None = None
        """What to do first when Ctrl-C ends the wait."""
        self._outcome: Any = None
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """Why it failed, for others than the one who waits, before that one is told."""
        return self._error

    def try_settle(self, outcome: Any, error: BaseException | None) -> bool:
        """Let the waiting thread go on, unless it has been let already."""
        with self._setting:
            if self.is_settled:
                return False
            self._outcome, self._error = outcome, error
            self.is_settled = True
        self._lock.release()
        on_settle = self.on_settle
        if on_settle is not None:
            on_settle()
        return True

    def wait(self, read: Callable[[Latch], None] | None = None) -> Any:
        """Return the outcome, once; Ctrl-C ends the wait. ``read`` may do something before this thread sleeps."""
        hook = _thread.blocking
        try:
            try:
                if hook is None:  # the main thread, as a rule
                    if read is not None:
                        read(self)
                    self._lock.acquire()
                else:
                    with hook():
                        if read is not None:
                            read(self)
                        self._lock.acquire()
            except KeyboardInterrupt as error:
                if self.on_interrupt is not None:
                    self.on_interrupt()
                _interrupted(self, error)
                raise
            failed, self._error = self._error, None
            if failed is not None:
                raise failed
            return self._outcome
        finally:
            failed = None  # or the error, by its traceback and this frame, would hold itself


class Promise(Generic[T]):
    """An outcome, now or later, that several may wait for: a future without torch's side."""

    def __init__(self) -> None:
        self._latch = threading.Lock()
        self._latch.acquire()
        self._setting = threading.Lock()
        self._settled = False
        self._done = False  # the latch cannot tell: who waits takes it for a moment
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._origin: TracebackType | None = None
        """The error's traceback when it came: each wait begins from that, else each would add its frames."""
        self._callbacks: list[Callable[[Any], Any]] = []

    # -- settling -----------------------------------------------------------------------------

    def try_settle(
        self,
        outcome: Any,
        error: BaseException | None,
        submit: Callable[[Callable[[], None]], None] | None = None,
    ) -> bool:
        """Complete it unless it is complete; callbacks are called at once, or in a job that is submitted."""
        with self._setting:
            if self._settled:
                return False
            self._settled = True
        self._publish(outcome, error, submit)
        return True

    def _publish(
        self, outcome: Any, error: BaseException | None, submit: Callable[[Callable[[], None]], None] | None
    ) -> None:
        self._outcome, self._error = outcome, error
        if error is not None:
            self._origin = error.__traceback__
        with self._setting:
            callbacks, self._callbacks = self._callbacks, []
            self._done = True
            self._latch.release()
        self._tell_torch(outcome, error)
        if submit is None:
            _call_all(callbacks, self)
        elif callbacks:
            submit(partial(_call_all, callbacks, self))

    def _tell_torch(self, outcome: Any, error: BaseException | None) -> None:
        """For who is a future of torch's as well."""

    # -- looking ------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether the outcome is there."""
        return self._done

    def value(self) -> T:
        """The value of a completed future; raises its error."""
        if not self.done():
            raise RuntimeError("value() of a future that is not done; wait() for it")
        return self._result()

    def exception(self) -> BaseException | None:
        """The error of a completed future, if it has one."""
        if not self.done():
            raise RuntimeError("exception() of a future that is not done; wait() for it")
        return self._error

    def _result(self) -> T:
        try:
            if self._error is not None:
                raise self._error.with_traceback(self._origin)
            return cast(T, self._outcome)
        finally:
            del self  # else the error would hold its future, by its traceback and this frame

    # -- waiting ------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the value and return it; raise its error.

        Ctrl-C ends the wait, and so does ``timeout`` (seconds), with `nbdist.RpcTimeout`; None is for no limit.
        """
        if timeout is not None:
            timeout = durations.patience(timeout)
        if not self._done:
            if not may_wait():
                raise UsageError(
                    "a finaliser (a __del__, or what a weak reference calls) or a signal's handler waited for a future "
                    "while this thread was sending or reading messages; the outcome might never come. Do not wait there"
                )
            try:
                with blocking_wait():
                    if self._latch.acquire(timeout=-1 if timeout is None else timeout):
                        self._latch.release()
                    elif not self._done:
                        raise RpcTimeout(f"waited {timeout:g} s for a future")
            except KeyboardInterrupt as error:
                _interrupted(self, error)
                raise
        try:
            return self._result()
        finally:
            del self  # as in `_result`

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call ``callback(self)`` once the future is done, at once if it is."""
        with self._setting:
            if not self._done:
                self._callbacks.append(callback)
                return
        _call_all([callback], self)

    def drop_callback(self, callback: Callable[[Any], Any]) -> None:
        """Forget a callback that was added, unless it has been called."""
        with self._setting, contextlib.suppress(ValueError):
            self._callbacks.remove(callback)


class Future(Promise[T], torch.futures.Future[T]):
    """The outcome of a call, now or later."""

    def __init__(self, *, devices: list[int | str | torch.device] | None = None) -> None:
        torch.futures.Future.__init__(self, devices=devices)
        Promise.__init__(self)

    def set_result(self, result: T) -> None:
        """Complete the future with a value."""
        self._settle(result, None)

    def set_exception(self, result: Any) -> None:
        """Complete the future with an exception."""
        if not isinstance(result, BaseException):
            raise TypeError(f"{result!r} is of type {type(result)}, not an Exception.")
        self._settle(None, result)

    def _settle(self, outcome: Any, error: BaseException | None) -> None:
        if not self.try_settle(outcome, error):
            raise RuntimeError("Future can only be marked completed once")

    def _tell_torch(self, outcome: Any, error: BaseException | None) -> None:
        """torch's own waiters see the same, and not before us: whoever its `wait_all` wakes may ask `done` of us."""
        # Its ``set_exception`` would call our ``set_result``.
        if error is not None:
            torch.futures.Future._set_unwrap_func(self, _raise)
            torch.futures.Future.set_result(self, cast(T, _Failure(self, error)))
        else:
            torch.futures.Future.set_result(self, outcome)

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def arrive(_: Any) -> None:
            loop.call_soon_threadsafe(tell)

        def tell() -> None:
            if not arrived.done():
                arrived.set_result(None)

        self.add_done_callback(arrive)
        try:
            yield from arrived
            return self._result()
        finally:
            del self  # as in `_result`

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """A future for ``callback(self)``, called once this one is done."""
        child: Future[S] = Future()
        carried = _carrier() if _carrier is not None else None

        def run(done: Future[T]) -> None:
            try:
                with carried() if carried is not None else nullcontext():
                    result = callback(done)
            except BaseException as error:
                child.try_settle(None, without_first_frame(error))  # this frame has the child
            else:
                child.try_settle(result, None)

        self.add_done_callback(run)
        return child


class _Failure:
    """What torch's side of a failed future holds: a way to the error, and the error's text.

    Nobody needs the text but C++ code that keeps the future's C++ part longer than the future.
    """

    __slots__ = ("_future", "_text")

    def __init__(self, future: Future[Any], error: BaseException) -> None:
        self._future = weakref.ref(future)
        try:
            self._text = f"{type(error).__qualname__}: {error}"
        except Exception:  # a user's class may fail to say what it is
            self._text = type(error).__qualname__

    def throw(self) -> None:
        """Raise the error; a RuntimeError with its text if the future is gone."""
        future = self._future()
        if future is None:
            raise RuntimeError(self._text)
        try:
            future._result()
        finally:
            del future


def _raise(outcome: Any) -> Any:
    if isinstance(outcome, _Failure):
        outcome.throw()
    return outcome


def without_first_frame(error: BaseException) -> BaseException:
    """Drop the frame that caught an error from its traceback; that frame would hold what the error is given to."""
    caught = error.__traceback__
    return error.with_traceback(caught.tb_next if caught is not None else None)


def _call_all(callbacks: Iterable[Callable[[Any], Any]], outcome: Any) -> None:
    """A user's callback must not break the thread that happens to run it."""
    for callback in callbacks:
        try:
            callback(outcome)
        except BaseException:
            _log.exception("a callback of a future failed")


def outcome_of(done: torch.futures.Future[T]) -> tuple[T | None, BaseException | None]:
    """Return the value of a completed future, ours or torch's, and its error; one of them is None.

    Torch's future raises its error, which thereby gets a traceback with the future in it, and keeps that error in C++,
    where nobody would ever free it. So those frames are taken off again.
    """
    if isinstance(done, Promise):
        error = done.exception()
        return (None, error) if error is not None else (done.value(), None)
    try:
        return done.value(), None
    except BaseException as error:
        last = error.__traceback__
        while last is not None and last.tb_frame.f_code.co_filename in (__file__, torch.futures.__file__):
            last = last.tb_next
        return None, error.with_traceback(last)
    finally:
        del done
