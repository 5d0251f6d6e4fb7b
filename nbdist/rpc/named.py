"""Objects that have a name on an agent: other agents call their methods.

::

    agent.named.publish("keeper", keeper, "start", "signal")        where the object lives

    agent.at("worker1", "keeper").call("start", setup)              elsewhere, in another agent: a future
                                 .ask("start", setup)               waits for the result
                                 .cast("signal", "worker0", 2)      no answer, and no error if nobody is there

A call runs in a thread of the agent's pool, as every call does, so it works while the main thread hangs. Only methods
that were listed when the object was published can be called.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

from nbdist.errors import NbdistError, UsageError
from nbdist.rpc.futures import Future
from nbdist.rpc.here import here

__all__ = ["NamedObject", "NamedObjects"]


class NamedObjects:
    """The objects that one agent has published. Any thread may use it. It owns none of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: dict[str, tuple[weakref.ref[Any], frozenset[str]]] = {}

    def publish(self, name: str, owner: object, *methods: str) -> None:
        """Let other agents call these methods of an object, as long as it lives.

        An earlier object of this name is replaced.
        """
        with self._lock:
            self._published[name] = weakref.ref(owner), frozenset(methods)

    def method(self, name: str, method: str) -> Callable[..., Any]:
        """Return a method that a call names. Raises UsageError if it was not published, or its object is gone."""
        with self._lock:
            owner, methods = self._published.get(name, (lambda: None, frozenset[str]()))
        alive = owner()
        if alive is None or method not in methods:
            raise UsageError(f"{here.agent.me.name} offers no {name}.{method}, or what offered it has ended")
        bound: Callable[..., Any] = getattr(alive, method)
        return bound


class NamedObject:
    """An object that another agent has published."""

    def __init__(self, call: Callable[..., Future[Any]], to: str, name: str) -> None:
        """Name the object ``name`` of the agent called ``to``; ``call`` is `Caller.asynchronous` of this process."""
        self._call, self._to, self._name = call, to, name

    def call(self, method: str, *arguments: Any, timeout: float = -1.0) -> Future[Any]:
        """Call a method; return the future of its result. Errors and ``timeout`` are those of `Agent.call`."""
        return self._call(self._to, _call, (self._name, method, *arguments), None, timeout, f"{self._name}.{method}")

    def ask(self, method: str, *arguments: Any, timeout: float = -1.0) -> Any:
        """Call a method, wait for its result, and return it."""
        return self.call(method, *arguments, timeout=timeout).wait()

    def cast(self, method: str, *arguments: Any) -> None:
        """Call a method without waiting for it. Its errors are dropped, also if nobody is there."""
        with contextlib.suppress(NbdistError):
            self.call(method, *arguments)


def _call(name: str, method: str, *arguments: Any) -> Any:
    """Call a method of an object that the agent of this call has published."""
    bound: Callable[..., Any] = here.agent.named.method(name, method)
    return bound(*arguments)
