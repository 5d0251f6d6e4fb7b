"""Calls methods of objects that the callback must not keep alive: a swarm ends when nobody uses it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method, and returns False once the method's object is gone."""
    known = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        return False if (found := known()) is None else found(*arguments)

    return call
