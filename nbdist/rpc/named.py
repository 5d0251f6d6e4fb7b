"""Objects that have a name on an agent: other agents call their methods.

::

    agent.named.publish("keeper", keeper, "start", "signal")        where the object lives

    agent.at("worker1", "keeper").call("start", setup)              elsewhere, in another agent: a future
                                 .begin("start", setup)             a latch, which costs less
                                 .ask("start", setup)               waits for the result
                                 .cast("signal", "worker0", 2)      no answer, and no error if nobody is there
                                 .later("step", number)             calls a method that returns a future

The name of one of several objects of a kind has a key behind the kind: ``"server 7f.1"``. Errors and displays call its
method ``server.load``.

A call runs in a thread of the agent's pool, as every call does, so it works while the main thread hangs. Only methods
that were listed when the object was published can be called. Of these, a *client* may cause calls of those listed as
``clients`` only: a process without the members' secret, for which a member calls (`nbdist.swarm.doors`).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any, cast

from nbdist.errors import NbdistError, SecurityError
from nbdist.rpc.futures import ASYNC_MARK, Future
from nbdist.rpc.here import here
from nbdist.rpc.latch import Latch


class NotOffered(NbdistError):
    """A worker offers no such object, or no such method: what offered it has ended, or the worker has restarted."""


_Published = tuple[Callable[[], Any], frozenset[str], frozenset[str]]  # the object, its methods, those for clients
_NOTHING: _Published = lambda: None, frozenset(), frozenset()


class NamedObjects:
    """The objects that one agent has published. Any thread may use it. It owns none of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: dict[str, _Published] = {}

    def publish(self, name: str, owner: object, *methods: str, clients: Collection[str] = ()) -> None:
        """Let other agents call these methods of an object, as long as it lives. It replaces one of the same name.

        ``clients`` are the methods that they may also call for clients. Such a method gets arguments that anybody with
        an invitation has made up.
        """
        with self._lock:
            # Drops the objects that are gone, too.
            self._published = {each: found for each, found in self._published.items() if found[0]() is not None}
            self._published[name] = weakref.ref(owner), frozenset(methods), frozenset(clients)

    def withdraw(self, name: str) -> None:
        """Let no agent call the object of this name any more. Does nothing if there is none."""
        with self._lock:
            self._published.pop(name, None)

    def find(self, name: str) -> Any:
        """Return the object of this name; None if there is none (any more)."""
        return self._published.get(name, _NOTHING)[0]()

    def method(self, name: str, method: str, for_client: bool = False) -> Callable[..., Any]:
        """Return a method that a call names. Raises NotOffered if it was not published, or its object is gone.

        Raises SecurityError if the call is for a client, and the method was not published for clients.
        """
        owner, methods, for_clients = self._published.get(name, _NOTHING)
        alive = owner()
        if alive is None or method not in methods:
            me = here.agent.me.name
            raise NotOffered(f"{me} offers no {_label(name, method)}: what offered it has ended, or {me} has restarted")
        if for_client and method not in for_clients:
            raise SecurityError(
                f"a client of a swarm may not call {_label(name, method)}: only a member of the workers' world may"
            )
        bound: Callable[..., Any] = getattr(alive, method)
        return bound


class NamedObject:
    """An object that another agent has published."""

    def __init__(self, caller: Any, to: str, name: str) -> None:
        self._caller, self._to, self._name = caller, to, name  # a `Caller`, which stands above this module

    def call(self, method: str, *arguments: Any, timeout: float = -1.0, **keywords: Any) -> Future[Any]:
        """Call a method; return the future of its result. Errors and ``timeout`` are those of `Agent.call`."""
        return self._send(call_method, method, arguments, keywords, timeout)

    def later(self, method: str, *arguments: Any, timeout: float = -1.0, **keywords: Any) -> Future[Any]:
        """Call a method that returns a future of its result; return the future of that result."""
        return self._send(_call_later, method, arguments, keywords, timeout)

    def for_client(
        self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any], timeout: float
    ) -> Future[Any]:
        """Call a method for a client; return the future of its result, or of the result's own future.

        It fails with SecurityError if the method was not published for clients.
        """
        return self._send(_call_for_client, method, arguments, keywords, timeout)

    def _send(
        self, function: Any, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any], timeout: float
    ) -> Future[Any]:
        args, label = (self._name, method, *arguments), _label(self._name, method)
        # No variable holds the future: an error of a lost worker keeps this frame, and the future keeps the error.
        return cast(
            "Future[Any]", self._caller.asynchronous(self._to, function, args, keywords or None, timeout, label)
        )

    def begin(self, method: str, *arguments: Any, timeout: float = -1.0) -> Latch:
        """Call a method; return a latch on which one thread waits for the result, as `Agent.begin` does."""
        args, label = (self._name, method, *arguments), _label(self._name, method)
        latch: Latch = self._caller.begin(self._to, call_method, args, timeout, label)
        return latch

    def ask(self, method: str, *arguments: Any, timeout: float = -1.0) -> Any:
        """Call a method, wait for its result, and return it."""
        return self.call(method, *arguments, timeout=timeout).wait()

    def cast(self, method: str, *arguments: Any, timeout: float = -1.0) -> None:
        """Call a method without waiting for it. Its errors are dropped, also if nobody is there."""
        with contextlib.suppress(NbdistError):
            self.call(method, *arguments, timeout=timeout)


def _label(name: str, method: str) -> str:
    return f"{name.partition(' ')[0]}.{method}"


def call_method(name: str, method: str, /, *arguments: Any, **keywords: Any) -> Any:
    """Call a method of an object that the agent of this call has published; for `nbdist.rpc.asking.ask_each`."""
    bound: Callable[..., Any] = here.agent.named.method(name, method)
    return bound(*arguments, **keywords)


def _call_later(name: str, method: str, /, *arguments: Any, **keywords: Any) -> Any:
    return call_method(name, method, *arguments, **keywords)


def _call_for_client(name: str, method: str, /, *arguments: Any, **keywords: Any) -> Any:
    found = here.agent.named.method(name, method, for_client=True)(*arguments, **keywords)
    if not isinstance(found, Future):
        result, found = found, Future()
        found.set_result(result)
    try:
        return found
    finally:
        del found  # the frames of its error must not hold it


for _each in (_call_later, _call_for_client):
    setattr(_each, ASYNC_MARK, True)
