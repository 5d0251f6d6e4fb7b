"""Futures that can be awaited, interrupted and chained, and that torch accepts as its own.

===================  ======================================================  =================================
class                who waits                                               where it is used
===================  ======================================================  =================================
`latch.Latch`        one thread, once                                        `rpc_sync`, `to_here`
`promise.Promise`    any number of threads and callbacks                     values of references, `remote`
`Future`             as `Promise`, and torch's functions in C++ and Python   `rpc_async`, `then`
===================  ======================================================  =================================

`Future` is a `torch.futures.Future`, so ``torch.futures.wait_all`` and ``collect_all`` accept it. But torch's ``wait``
sleeps in C++, where neither Ctrl-C nor a time limit ends it. Ours sleeps on a Python lock, and tells the pool of the
thread that it blocks, so that the pool can start another one (`nbdist.rpc.pool`).

`nbdist.rpc.calls.collecting` waits for a list of such futures.

The objects that keep an error alive::

    future ── _error ──> error ── __traceback__ ──> frames that raised it and waited for it ──> their locals
       │                                                                                          (the future, too)
       └── torch's C++ ── unwraps by ──> _raise ╌╌ weak ╌╌> future

Python's garbage collector frees the upper cycle. No strong reference may lead from torch's C++ to the error: the
collector cannot see through C++, and would keep the error, its frames and their tensors for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar
from weakref import WeakMethod

import torch

from nbdist.code_places import is_torchs
from nbdist.gpus.spans import CUDA_IS_BUILT
from nbdist.rpc.failures import text_of_error
from nbdist.rpc.promise import Promise

T = TypeVar("T")
S = TypeVar("S")
E = TypeVar("E", bound=BaseException)

ASYNC_MARK = "_wrapped_async_rpc_function"
"""The attribute by which torch, too, marks a function that returns a Future for its result."""

Surroundings = Callable[[], AbstractContextManager[None]]
"""Returns a context manager to enter around a callback."""

_carrier: Callable[[], Surroundings | None] | None = None


def set_carrier(carrier: Callable[[], Surroundings | None] | None) -> None:
    """Set the function with which `Future.then` runs callbacks in the autograd context of its caller; None removes it.

    ``carrier()`` runs in the thread that calls ``then``, and returns what the thread of the callback enters.
    """
    global _carrier
    _carrier = carrier


class Future(Promise[T], torch.futures.Future[T]):
    """The outcome of a call, now or later; a `torch.futures.Future` that can be interrupted and awaited.

    `rpc_async` returns one. A program can also make one and complete it itself, with `set_result` or `set_exception`;
    until then, a `wait` without a time limit does not end.
    In an ``async def`` function, ``await future`` waits for it.

    Args:
        devices: as in torch, with torch's errors for a bad one; nbdist finds the devices of a value by itself.

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

        Raises RuntimeError if the future is complete already, by whatever means; its outcome stays. An error of a
        callback is logged, not raised; one of a `then` callback is the error of that future. If a GPU still computes
        tensors in the value, the streams of the threads that wait for the future wait for the stream that is current
        here, as in torch.

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

        Errors of callbacks are logged, as for `set_result`.

        Raises:
            TypeError: ``result`` is no exception; a class of exceptions is none, either.
            RuntimeError: the future is complete already; its outcome stays.
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
        # After our own part is done: a thread that torch's ``wait_all`` wakes may ask our `done`. Not torch's
        # ``set_exception``, which would call our ``set_result``.
        if error is not None:
            text = f"{type(error).__qualname__}: {text_of_error(error)}"
            # The method is weak: see the head of this module.
            torch.futures.Future._set_unwrap_func(self, partial(_raise, WeakMethod(self._result), text))
        torch.futures.Future.set_result(self, outcome)

    def __await__(self) -> Generator[Any, None, T]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def arrive(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed at this moment
                loop.call_soon_threadsafe(arrived.set)

        self.add_done_callback(arrive)
        try:
            yield from arrived.wait().__await__()
            return self._result()
        finally:
            self.drop_callback(arrive)
            del self  # as in `_result`

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """Return a future of ``callback(self)``, which is called when this future is done.

        The callback also runs if this future has failed; ``done.wait()`` then raises the error in it. An error of the
        callback, even that it is not callable, becomes the error of the new future; nothing is raised here. The
        callback runs in a thread of the agent or in the thread that
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
            except BaseException as error:  # the user's callback: its error is the child's
                child.try_settle(None, without_first_frame(error))  # this frame refers to the child
            else:
                if CUDA_IS_BUILT:
                    child.note_streams(result)
                child.try_settle(result, None)

        self.add_done_callback(run)
        return child


def _raise(result: WeakMethod[Callable[[], Any]], text: str, _: Any) -> None:
    """Raise the error of a failed future, by its `_result`; if the future is gone, a RuntimeError with ``text``."""
    raise_error = result()
    # Only C++ code that keeps torch's part longer than the future comes here.
    if raise_error is None:
        raise RuntimeError(text)
    try:
        raise_error()
    finally:
        del raise_error  # it refers to the future


def without_first_frame(error: E) -> E:
    """Remove the frame that caught an error from its traceback, and return the error."""
    # That frame refers to the future that gets the error, so the error would keep the future alive.
    caught = error.__traceback__
    return error.with_traceback(caught.tb_next if caught is not None else None)


def outcome_of(done: torch.futures.Future[T]) -> tuple[T | None, BaseException | None]:
    """Return the value of a completed future, ours or torch's, and its error; one of them is None."""
    if isinstance(done, Promise):
        error = done.exception()
        return (None, error) if error is not None else (done.value(), None)
    try:
        return done.value(), None
    except BaseException as error:  # a future fails with whatever its call raised
        # torch's future raises its error through frames that have the future in them, and keeps this error in C++,
        # where nothing would ever free it (test_a_future_that_fails_is_freed).
        last = error.__traceback__
        while last is not None and _is_of_futures(last.tb_frame.f_code.co_filename):
            last = last.tb_next
        return None, error.with_traceback(last)
    finally:
        del done


def _is_of_futures(file: str) -> bool:
    return file == __file__ or is_torchs(file, "futures")
