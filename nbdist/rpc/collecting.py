"""Waits for several futures: ours, torch's, or both.

``torch.futures.wait_all`` and ``collect_all`` promise to end at the first error. Torch's C++ does that only for errors
that C++ itself has set, and Python cannot set one on a future that exists: ``set_exception``, torch's and ours, sets
a value, and a function that raises when the value is read. Torch would wait for the rest first, for ever if the rest
never comes. So this module takes the place of ``torch._C._collect_all``, which both functions call. A list with no
future of ours in it goes to torch's own, as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from nbdist import torch_private
from nbdist.errors import RpcTimeout
from nbdist.rpc.futures import Future, Promise, outcome_of

__all__ = ["collect_all", "wait_all"]

T = TypeVar("T")


def collect_all(futures: Iterable[torch.futures.Future[Any]]) -> Future[list[torch.futures.Future[Any]]]:
    """Return a future of the list of ``futures``, done when all of them are.

    It fails as soon as one of them does, with the same error. Torch's own futures may be among them.
    """
    return _Collection(list(futures)).whole


def wait_all(futures: Iterable[torch.futures.Future[T]], timeout: float | None = None) -> list[T]:
    """Wait for all ``futures`` and return their values; raise the first error there is, without waiting for the rest.

    Torch's own futures may be among them. After ``timeout`` seconds this raises `nbdist.RpcTimeout`.
    """
    futures = list(futures)
    collection = _Collection(futures)
    try:
        collection.whole.wait(timeout)
    except RpcTimeout:
        if collection.whole.done():
            raise  # it is the error of one of them
        raise RpcTimeout(f"{collection.missing} of {len(futures)} futures after {timeout:g} s") from None
    finally:
        collection.give_up()
        del collection  # an error would hold it, by its traceback and this frame
    return [future.value() for future in futures]


class _Collection:
    """Futures that are waited for together, and one future for all of them."""

    def __init__(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        self.whole: Future[Any] = Future()
        self.missing = len(futures)
        self._futures = futures
        self._lock = threading.Lock()
        if not futures:
            self.whole.set_result(futures)
        for future in futures:
            future.add_done_callback(self._take)
            if self.whole.done():
                _drop(future, self._take)
                break

    def _take(self, done: torch.futures.Future[Any]) -> None:
        _, error = outcome_of(done)
        if error is not None:
            self.whole.try_settle(None, error)
            self.give_up()
            return
        with self._lock:
            self.missing -= 1
            over = not self.missing
        if over:
            self.whole.try_settle(self._futures, None)

    def give_up(self) -> None:
        """Leave nothing of this with futures that may never be done."""
        with self._lock:
            futures, self._futures = self._futures, []
        for future in futures:
            _drop(future, self._take)


def _drop(future: torch.futures.Future[Any], callback: Callable[[Any], None]) -> None:
    if isinstance(future, Promise):  # torch's own keep what they were given
        future.drop_callback(callback)


def _collect_all(futures: Any, collect_of_torch: Callable[[Any], Any]) -> Any:
    """Collect futures for ``torch.futures``: by `collect_all` where one of them is ours, else by torch's own."""
    if any(isinstance(future, Future) for future in futures):
        return collect_all(futures)
    return collect_of_torch(futures)


torch_private.take_over_collect_all(_collect_all)
