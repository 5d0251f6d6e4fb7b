"""Futures that can be awaited, interrupted and chained, and that torch accepts as its own.

=========  ======================================================  ===============================================
class      who waits                                               where it is used
=========  ======================================================  ===============================================
`Latch`    one thread, once                                        `rpc_sync`, `to_here`
`Promise`  any number of threads and callbacks                     values of references, `remote`
`Future`   as `Promise`, and torch's functions in C++ and Python   `rpc_async`, `then`
=========  ======================================================  ===============================================

`Future` is a `torch.futures.Future`, so ``torch.futures.wait_all`` and ``collect_all`` accept it. But torch's ``wait``
sleeps in C++, where neither Ctrl-C nor a time limit ends it. Ours sleeps on a Python lock, and tells the pool of the
thread that it blocks, so that the pool can start another one (`nbdist.rpc.pool`).

`nbdist.rpc.calls.collecting` waits for a list of such futures.

The objects that keep an error alive::

    future ── _error ──> error ── __traceback__ ──> frames that raised it and waited for it ──> their locals
       │                                                                                          (the future, too)
       └── torch's C++ ── value ──> _Failure ╌╌ weak ╌╌> future

Python's garbage collector frees the upper cycle. No strong reference may lead from torch's C++ to the error: the
collector cannot see through C++, and would keep the error, its frames and their tensors for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import torch

from nbdist import durations
from nbdist.code_places import is_torchs
from nbdist.errors import RpcTimeout, UsageError
from nbdist.finalisers import may_wait
from nbdist.gpus.spans import CUDA_IS_BUILT
from nbdist.rpc.streams import StreamMarks, mark

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
E = TypeVar("E", bound=BaseException)


class _PerThread(threading.local):
    blocking: Callable[[], AbstractContextManager[None]] | None = None


_thread = _PerThread()


def set_blocking_hook(hook: Callable[[], AbstractContextManager[None]] | None) -> None:
    """Enter the context manager ``hook()`` around every wait of the calling thread; None removes the hook.

    The pool of an agent sets one in each of its threads, to count the threads that are blocked.
    """
    _thread.blocking = hook


def blocking_wait() -> AbstractContextManager[None]:
    """Return a context manager to enter around code in which the calling thread waits for another call.

    In a thread of an agent's pool, it lets another thread run a job meanwhile. In any other thread, it does nothing.
    """
    hook = _thread.blocking
    return hook() if hook is not None else nullcontext()


Surroundings = Callable[[], AbstractContextManager[None]]
"""Returns a context manager to enter around a callback."""

_carrier: Callable[[], Surroundings | None] | None = None


def set_carrier(carrier: Callable[[], Surroundings | None] | None) -> None:
    """Set the function with which `Future.then` runs callbacks in the autograd context of its caller; None removes it.

    It holds for all threads. ``carrier()`` runs in the thread that calls ``then``. It returns None, or a function that
    returns a context manager. The thread that runs the callback enters that context manager around it.
    """
    global _carrier
    _carrier = carrier


_interrupt_hook: Callable[[Sequence[object], BaseException], None] | None = None


def set_interrupt_hook(hook: Callable[[Sequence[object], BaseException], None] | None) -> None:
    """Set ``hook(outcomes, error)``, called when Ctrl-C has ended a wait for outcomes; None removes the hook.

    ``outcomes`` are each a `Latch` or a `Promise`, and ``error`` is the KeyboardInterrupt, which is raised afterwards.
    The hook runs in the thread that waited.
    """
    global _interrupt_hook
    _interrupt_hook = hook


def _interrupted(outcomes: Sequence[object], error: BaseException) -> None:
    if _interrupt_hook is not None:
        _interrupt_hook(outcomes, error)


class Latch:
    """The outcome of a call for which one thread waits once. It costs less than a `Future`."""

    __slots__ = ("_error", "_lock", "_outcome", "_setting", "is_settled", "on_interrupt", "on_send", "on_settle")

    def __init__(self, on_send: Callable[[], None] | None = None) -> None:
        """Make a latch that is not settled.

        ``on_send`` is called in the sending thread, right before it sends the call that this latch waits for. Give it
        only if that thread calls `wait` directly afterwards and reads the answer itself.
        """
        self._lock = threading.Lock()
        self._lock.acquire()
        self._setting = threading.Lock()
        self.is_settled = False
        self.on_settle: Callable[[], None] | None = None
        """A function to call once, in the thread that settles the latch."""
        self.on_send = on_send
        self.on_interrupt: Callable[[], object] | None = None
        """A function to call first when Ctrl-C ends the wait."""
        self._outcome: Any = None
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """The error with which the call failed; None if it has not failed (yet), and once `wait` has raised it."""
        return self._error

    def try_settle(self, outcome: Any, error: BaseException | None) -> bool:
        """Set the outcome or the error and wake the waiting thread; return False if the latch was settled before.

        Any thread may call this. ``error`` is None if the call has succeeded.
        """
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

    def wait(
        self, read: Callable[[Latch], None] | None = None, timeout: float = -1.0, others: Sequence[Latch] = ()
    ) -> Any:
        """Wait for the outcome, and return it or raise the error.

        Only one thread may wait, and only once: a second wait would never end. Ctrl-C ends the wait with
        KeyboardInterrupt.

        Args:
            read: Called with the latch before this thread sleeps; it may read messages until the answer has come.
            timeout: Seconds to sleep before this raises RpcTimeout; negative for no limit. The time that ``read`` takes
                does not count.
            others: Other latches for which this thread waits: Ctrl-C stops the calls of these, too, on the workers.
        """
        hook = _thread.blocking
        try:
            try:
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
                _interrupted((self, *others), error)
                raise
            if not in_time:
                raise RpcTimeout(f"waited {timeout:g} s for an answer")
            failed, self._error = self._error, None
            if failed is not None:
                raise failed
            return self._outcome
        finally:
            failed = None  # or the error would keep itself alive, through its traceback and this frame


class Promise(Generic[T]):
    """An outcome, now or later, for which several threads may wait: a `Future` without torch's part."""

    def __init__(self) -> None:
        self._latch = threading.Lock()
        self._latch.acquire()
        self._setting = threading.Lock()
        self._settled = False
        self._done = False  # the lock cannot tell: each waiting thread takes it for a moment
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._origin: TracebackType | None = None
        """The error's traceback when the promise was settled. Each wait starts from it; else each adds its frames."""
        self._callbacks: list[Callable[[Any], Any]] = []
        self._marks: StreamMarks | None = None
        """The CUDA streams that compute the value, if `note_streams` was called and it has tensors on GPUs."""

    # -- settling -----------------------------------------------------------------------------

    def note_streams(self, value: Any) -> None:
        """Remember the CUDA streams that compute ``value``: the current streams of the calling thread.

        Call this before `try_settle`, for a value that this process has computed. In each thread that takes the value,
        the current streams then wait for these. If CUDA has failed, nothing is remembered; using the value then
        raises CUDA's error.
        """
        try:
            self._marks = mark(value)
        except Exception:
            self._marks = None

    def try_settle(
        self, outcome: Any, error: BaseException | None, submit: Callable[[Callable[[], None]], None] | None = None
    ) -> bool:
        """Set the outcome or the error, unless one is set; return whether this call has set it.

        The callbacks run in this thread; with ``submit``, they run in one job that is passed to ``submit``.
        """
        with self._setting:
            if self._settled:
                return False
            self._settled = True
        self._publish(outcome, error, submit)
        return True

    def _publish(
        self, outcome: Any, error: BaseException | None, submit: Callable[[Callable[[], None]], None] | None
    ) -> None:
        """Make the outcome visible, wake the waiting threads, and call the callbacks. `try_settle` calls this once."""
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
        """Do nothing here; a `Future` passes the outcome on to its part in C++."""

    # -- looking ------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether the outcome is there, be it a value or an error.

        It is True before the callbacks are called.
        """
        return self._done

    def value(self) -> T:
        """Return the value of a future that is done, or raise its error.

        Raises RuntimeError if the future is not done.
        """
        if not self.done():
            raise RuntimeError("value() was called on a future that is not done: call wait() instead")
        return self._result()

    def exception(self) -> BaseException | None:
        """Return the error of a future that is done; None if it has a value.

        Raises RuntimeError if the future is not done.
        """
        if not self.done():
            raise RuntimeError("exception() was called on a future that is not done: call wait() first")
        return self._error

    def _result(self) -> T:
        """Return the value of a promise that is done, or raise its error with the traceback with which it came."""
        try:
            if self._error is not None:
                raise self._error.with_traceback(self._origin)
            if self._marks is not None:
                self._marks.wait()
            return cast(T, self._outcome)
        finally:
            del self  # else the error would keep its future alive, through its traceback and this frame

    # -- waiting ------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the value and return it, or raise the error with which the call failed.

        Any number of threads may wait, and may wait again. Ctrl-C ends the wait with KeyboardInterrupt.

        Args:
            timeout: how long to wait, in seconds; None for no limit, 0 for not at all. A wait that times out changes
                nothing: the call continues, and its own time limit stays.

        Raises:
            RpcTimeout: the outcome did not come within ``timeout`` seconds, or the time limit of the call has passed.
            UsageError: ``timeout`` is negative; or a finaliser or a signal's handler waits in a thread that is sending
                or receiving messages.

        Example:
            >>> rpc.rpc_async("worker1", torch.add, args=(torch.ones(2), 1)).wait()
            tensor([2., 2.])
        """
        if timeout is not None:
            timeout = durations.patience(timeout)
        if not self._done:
            if not may_wait():
                raise UsageError(
                    "a finaliser (a __del__, or the callback of a weak reference) or a signal's handler waited for a "
                    "future while this thread was sending or receiving messages, so the outcome might never come. Do "
                    "not wait there; use add_done_callback"
                )
            try:
                with blocking_wait():
                    if self._latch.acquire(timeout=-1 if timeout is None else timeout):
                        self._latch.release()
                    elif not self._done:
                        raise RpcTimeout(
                            f"waited {timeout:g} s for a future: nothing was cancelled, so wait again, or longer"
                        )
            except KeyboardInterrupt as error:
                _interrupted((self,), error)
                raise
        try:
            return self._result()
        finally:
            del self  # as in `_result`

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call ``callback(self)`` when the future is done, or at once if it is done already.

        The callback runs in a thread of the agent or in the thread that settles the future; if the future is done
        already, in the calling thread. An error that it raises is logged and goes no further. Use `Future.then` for a
        callback whose result or error matters.
        """
        with self._setting:
            if not self._done:
                self._callbacks.append(callback)
                return
        _call_all([callback], self)

    def drop_callback(self, callback: Callable[[Any], Any]) -> None:
        """Remove a callback of `add_done_callback`, if it has not been called yet.

        If it has been called, or was never added, nothing happens.
        """
        with self._setting, contextlib.suppress(ValueError):
            self._callbacks.remove(callback)


class Future(Promise[T], torch.futures.Future[T]):
    """The outcome of a call, now or later; a `torch.futures.Future` that can be interrupted and awaited.

    `rpc_async` returns one. A program can also make one and complete it itself, with `set_result` or `set_exception`.
    In an ``async def`` function, ``await future`` waits for it.

    Args:
        devices: as in torch; nbdist finds the devices of a value by itself.

    Example:
        >>> future = rpc.rpc_async("worker1", max, args=(1, 2))
        >>> future.wait()
        2
        >>> future.done()
        True
    """

    def __init__(self, *, devices: list[int | str | torch.device] | None = None) -> None:
        torch.futures.Future.__init__(self, devices=devices)
        Promise.__init__(self)

    def set_result(self, result: T) -> None:
        """Complete the future with the value ``result``, and call its callbacks.

        Raises RuntimeError if the future is complete already. If a GPU still computes tensors in the value, the streams
        of the threads that wait for the future wait for the stream that is current here, as in torch.

        Example:
            >>> future = rpc.Future()
            >>> future.set_result(3)
            >>> future.wait()
            3
        """
        if CUDA_IS_BUILT and not self._done:
            self.note_streams(result)
        self._settle(result, None)

    def set_exception(self, result: Any) -> None:
        """Complete the future with an error, which `wait` then raises, and call its callbacks.

        Raises:
            TypeError: ``result`` is no exception.
            RuntimeError: the future is complete already.
        """
        if not isinstance(result, BaseException):
            raise TypeError(
                f"{result!r} is of type {type(result)}, not an Exception. Call set_exception with an exception."
            )
        self._settle(None, result)

    def _settle(self, outcome: Any, error: BaseException | None) -> None:
        if not self.try_settle(outcome, error):
            raise RuntimeError("Future can only be marked completed once")

    def _tell_torch(self, outcome: Any, error: BaseException | None) -> None:
        """Complete torch's part of the future, after ours: a thread that ``wait_all`` wakes may ask our `done`."""
        # torch's own ``set_exception`` would call our ``set_result``.
        if error is not None:
            torch.futures.Future._set_unwrap_func(self, _raise)
            torch.futures.Future.set_result(self, cast(T, _Failure(self, error)))
        else:
            torch.futures.Future.set_result(self, outcome)

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def arrive(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed at this moment
                loop.call_soon_threadsafe(tell)

        def tell() -> None:
            if not arrived.done():
                arrived.set_result(None)

        self.add_done_callback(arrive)
        try:
            yield from arrived
            return self._result()
        finally:
            self.drop_callback(arrive)
            del self  # as in `_result`

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """Return a future of ``callback(self)``, which is called when this future is done.

        The callback also runs if this future has failed; ``done.wait()`` then raises the error in it. An error of the
        callback becomes the error of the new future. The callback runs in a thread of the agent or in the thread that
        settles this future; at once, in the calling thread, if this future is done already. It runs in the autograd
        context in which ``then`` was called.

        Example:
            >>> future = rpc.rpc_async("worker1", max, args=(1, 2))
            >>> future.then(lambda done: done.wait() + 1).wait()
            3
        """
        child: Future[S] = Future()
        carried = _carrier() if _carrier is not None else None

        def run(done: Future[T]) -> None:
            try:
                with carried() if carried is not None else nullcontext():
                    result = callback(done)
            except BaseException as error:
                child.try_settle(None, without_first_frame(error))  # this frame refers to the child
            else:
                if CUDA_IS_BUILT:
                    child.note_streams(result)
                child.try_settle(result, None)

        self.add_done_callback(run)
        return child


class _Failure:
    """The value that torch's part of a failed future holds: a weak reference to our part, and the error's text.

    Only C++ code that keeps torch's part longer than the future needs the text.
    """

    __slots__ = ("_future", "_text")

    def __init__(self, future: Future[Any], error: BaseException) -> None:
        self._future = weakref.ref(future)
        try:
            self._text = f"{type(error).__qualname__}: {error}"
        except Exception:  # the __str__ of a user's class may fail
            self._text = type(error).__qualname__

    def throw(self) -> None:
        """Raise the error, or, if the future is gone, a RuntimeError with the error's text."""
        future: Future[Any] | None = self._future()
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


def without_first_frame(error: E) -> E:
    """Remove the frame that caught an error from its traceback, and return the error.

    That frame refers to the future that gets the error, so the error would keep the future alive.
    """
    caught = error.__traceback__
    return error.with_traceback(caught.tb_next if caught is not None else None)


def _call_all(callbacks: Iterable[Callable[[Any], Any]], outcome: Any) -> None:
    """Call each callback with ``outcome``. An error is logged: it must not break the thread that settled the future."""
    for callback in callbacks:
        try:
            callback(outcome)
        except BaseException:
            _log.exception("a callback of a future failed")


def outcome_of(done: torch.futures.Future[T]) -> tuple[T | None, BaseException | None]:
    """Return the value of a completed future, ours or torch's, and its error; one of them is None.

    A future of torch raises its error, which adds frames with the future in them to the error's traceback. torch keeps
    this error in C++, where nothing would ever free it. So this function removes these frames again.
    """
    if isinstance(done, Promise):
        error = done.exception()
        return (None, error) if error is not None else (done.value(), None)
    try:
        return done.value(), None
    except BaseException as error:
        last = error.__traceback__
        while last is not None and _is_of_futures(last.tb_frame.f_code.co_filename):
            last = last.tb_next
        return None, error.with_traceback(last)
    finally:
        del done


def _is_of_futures(file: str) -> bool:
    """Return whether a file is this one or one of torch's futures; frames of other files of nbdist stay."""
    return file == __file__ or is_torchs(file, "futures")
