"""An outcome, now or later, for which any number of threads and callbacks may wait."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from nbdist import durations
from nbdist.errors import RpcTimeout, UsageError
from nbdist.finalisers import may_wait
from nbdist.rpc.streams import StreamMarks, mark
from nbdist.rpc.waits import blocking_wait, call_interrupt_hook

_log = logging.getLogger("nbdist.rpc")

T = TypeVar("T")


class Promise(Generic[T]):
    """An outcome, now or later, for which several threads may wait: a `Future` without torch's part."""

    made_at: tuple[str, int] | None = None
    """For a value that this agent owns, the file and line that made the first reference to it, if that was here."""

    def __init__(self) -> None:
        self._latch = threading.Lock()  # locked until the outcome is there
        self._latch.acquire()
        self._setting = threading.Lock()
        self._settled = False
        self._done = False  # the lock cannot tell: each waiting thread takes it for a moment
        self._outcome: Any = None
        self._error: BaseException | None = None
        # The error's traceback when the promise was settled. Each wait starts from it; else each adds its frames.
        self._origin: TracebackType | None = None
        self._callbacks: list[Callable[[Any], Any]] = []
        # The CUDA streams that compute the value, if `note_streams` found tensors on GPUs.
        self._marks: StreamMarks | None = None

    # -- settling -----------------------------------------------------------------------------

    def note_streams(self, value: Any) -> None:
        """Remember the CUDA streams that compute ``value``: the current streams of the calling thread."""
        # Before `try_settle`. In each thread that takes the value, the current streams then wait for these.
        try:
            self._marks = mark(value)
        except Exception:  # CUDA has failed: using the value raises CUDA's error
            self._marks = None

    def try_settle(
        self, outcome: Any, error: BaseException | None, submit: Callable[[Callable[[], None]], None] | None = None
    ) -> bool:
        """Set the outcome or the error, unless one is set; return whether this call has set it.

        The callbacks run in this thread, or with ``submit`` in one job.
        """
        with self._setting:
            if self._settled:
                return False
            self._settled = True
        self._outcome, self._error = outcome, error  # first: whoever sees `_done` reads these without a lock
        if error is not None:
            self._origin = error.__traceback__
        with self._setting:  # so that `add_done_callback` finds either this list or the outcome
            callbacks, self._callbacks = self._callbacks, []
            self._done = True
            self._latch.release()
        self._tell_torch(outcome, error)
        if submit is None:
            _call_all(callbacks, self)
        elif callbacks:
            submit(partial(_call_all, callbacks, self))
        return True

    def _tell_torch(self, outcome: Any, error: BaseException | None) -> None:
        """Pass the outcome on to torch's part in C++, which only a `Future` has."""

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

    def copy_of_error(self) -> BaseException:
        """Return a copy of the error with the traceback with which it came; the error itself if it has no copies."""
        error = self._error
        assert error is not None
        error.__traceback__ = self._origin
        try:
            copied = copy.copy(error)
        except Exception:  # of the class, which may be the user's
            return error
        if type(copied) is not type(error):
            return error
        copied.__traceback__, copied.__cause__, copied.__context__ = self._origin, error.__cause__, error.__context__
        copied.__suppress_context__ = error.__suppress_context__
        if hasattr(error, "__notes__"):  # who adds a note to the copy means the copy
            copied.__notes__ = list(error.__notes__)
        return copied

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

        Any number of threads may wait, and may wait again. Ctrl-C ends the wait with KeyboardInterrupt; in a cluster,
        it also stops the function.

        Args:
            timeout: how long to wait, in seconds; None for no limit, 0 for not at all. A wait that times out changes
                nothing: the call continues, and its own time limit stays.

        Raises:
            RpcTimeout: the outcome did not come within ``timeout`` seconds, or the time limit of the call has passed.
            UsageError: ``timeout`` is negative or NaN; or a finaliser or a signal's handler waits in a thread that is
                sending or receiving messages.
            TypeError: ``timeout`` is no number.

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
                        self._latch.release()  # for the next thread that waits
                    elif not self._done:
                        raise RpcTimeout(
                            f"waited {timeout:g} s for a future: nothing was cancelled, so wait again, or longer"
                        )
            except KeyboardInterrupt as error:
                call_interrupt_hook((self,), error)
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
        """Remove a callback of `add_done_callback`, if it has not been called yet; else do nothing."""
        with self._setting, contextlib.suppress(ValueError):
            self._callbacks.remove(callback)


def _call_all(callbacks: Iterable[Callable[[Any], Any]], outcome: Any) -> None:
    for callback in callbacks:
        try:
            callback(outcome)
        except BaseException:  # the user's callback, whatever it raises: it must not break the thread that settles
            _log.exception("a callback of a future failed")
