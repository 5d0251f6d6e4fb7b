"""Waits for several futures: ours, torch's, or both.

``torch.futures.wait_all`` and ``collect_all`` promise to end at the first error. torch's C++ keeps this promise only
for errors that C++ itself has set. Python cannot set such an error on an existing future: ``set_exception``, torch's
and ours, sets a value, and a function that raises the error when the value is read. So torch would first wait for all
other futures, for ever if one of them never completes.

Therefore this module replaces ``torch._C._collect_all``, which both functions call. A list without any future of ours
goes to torch's own function, as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from nbdist import torch_private
from nbdist.errors import RpcTimeout
from nbdist.rpc.futures import Future, outcome_of
from nbdist.rpc.latch import Latch
from nbdist.rpc.promise import Promise

T = TypeVar("T")


def collect_all(futures: Iterable[torch.futures.Future[Any]]) -> Future[list[torch.futures.Future[Any]]]:
    """Return a future of the list ``futures``, done once all of them are; it fails as soon as one of them fails."""
    whole: Future[Any] = Future()
    Collection(list(futures), whole)
    return whole


def wait_all(futures: Iterable[torch.futures.Future[T]], timeout: float | None = None) -> list[T]:
    """Wait for all ``futures`` and return their values, or raise the first error without waiting for the rest.

    Whatever is raised, the other calls go on; only Ctrl-C in a cluster stops the functions that this thread has called.
    Without futures, this returns an empty list.

    Args:
        futures: futures of nbdist, of torch, or both.
        timeout: how long to wait, in seconds; None for no limit.

    Raises:
        RpcTimeout: not all are done after ``timeout`` seconds; the text says how many are missing.
        Exception: the error of the first future that failed.
        UsageError: ``timeout`` is negative or NaN; or in a finaliser, as in `Future.wait`.
        TypeError, AttributeError: ``timeout`` is no number, or ``futures`` is no list of futures.

    Example:
        >>> rpc.wait_all([rpc.rpc_async("worker1", max, args=(n, 5)) for n in (3, 7)])
        [5, 7]
    """
    futures = list(futures)
    whole: Future[Any] = Future()
    collection = Collection(futures, whole)
    try:
        whole.wait(timeout)
    except RpcTimeout:
        if whole.done():
            raise  # this is the error of one of the futures
        raise RpcTimeout(
            f"{collection.missing} of {len(futures)} futures are not done after {timeout:g} s; their calls go on"
        ) from None
    finally:
        collection.give_up()
        del collection, whole  # else an error would keep them alive, through its traceback and this frame
    return [future.value() for future in futures]


class Collection:
    """Several futures, of nbdist, of torch, or both, for which a thread waits together.

    ``whole`` is settled with the list of the futures once all have a value, or with the first error at once.
    """

    def __init__(self, futures: Sequence[torch.futures.Future[Any]], whole: Future[Any] | Latch) -> None:
        self._whole = whole
        self.missing = len(futures)
        self._futures = futures
        self._lock = threading.Lock()
        if not futures:
            whole.try_settle(futures, None)
        for future in futures:
            future.add_done_callback(self._count_done)
            if not self._futures:  # given up, since this future or one before it has failed
                _drop(future, self._count_done)
                break

    def _count_done(self, done: torch.futures.Future[Any]) -> None:
        _, error = outcome_of(done)
        if error is not None:
            self._whole.try_settle(None, error)
            self.give_up()
            return
        with self._lock:
            self.missing -= 1
            over = not self.missing
        # Without the lock: callbacks of ``whole`` may run any code.
        if over:
            self._whole.try_settle(self._futures, None)

    def give_up(self) -> None:
        """Remove our callbacks from all futures; their calls continue. This does not settle ``whole``."""
        with self._lock:
            futures, self._futures = self._futures, []  # some may never be done, and would keep this object
        for future in futures:
            _drop(future, self._count_done)


def _drop(future: torch.futures.Future[Any], callback: Callable[[Any], None]) -> None:
    if isinstance(future, Promise):  # a future of torch cannot remove a callback
        future.drop_callback(callback)


def _collect_all(futures: Any, collect_of_torch: Callable[[Any], Any]) -> Any:
    """Collect futures for ``torch.futures``: with `collect_all` if one of them is ours, else with torch's function."""
    if any(isinstance(future, Future) for future in futures):
        return collect_all(futures)
    return collect_of_torch(futures)


torch_private.take_over_collect_all(_collect_all)
