"""Decorators for functions that others call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nbdist.rpc.executor import ASYNC_MARK

__all__ = ["async_execution"]


def async_execution(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that returns a Future: its result is the future's, and it holds no thread meanwhile.

    Under ``@staticmethod`` and ``@classmethod`` this decorator comes second, next to the function.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, True)
    return wrapper
