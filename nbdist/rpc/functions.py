"""Decorators for functions that other workers call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nbdist.rpc.futures import ASYNC_MARK

__all__ = ["async_execution"]


def async_execution(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the function ``fn``, which returns a `Future`, so that its caller receives the future's value instead.

    While the future is open, the function holds no thread of its worker. So one worker can have many such calls open at
    a time, for example to collect the gradients of all trainers in one batch.

    With ``@staticmethod`` or ``@classmethod``, write this decorator below them, next to the function. A marked function
    that returns no Future makes the call fail with UsageError; an error of the function or its future becomes the
    caller's. Called without RPC, it returns the Future itself. ``fn`` is not checked: a call of a wrapper of something
    that is not callable fails with TypeError.

    Example:
        >>> @rpc.functions.async_execution
        ... def add_on(worker, x, y):
        ...     return rpc.rpc_async(worker, torch.add, args=(x, y)).then(lambda done: done.wait() + 1)
        >>> rpc.rpc_sync("worker1", add_on, args=("worker0", torch.ones(2), 1))
        tensor([3., 3.])
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, True)
    return wrapper
