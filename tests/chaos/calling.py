"""Makes calls and enters them into the ledger: where they go, and how they end."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

from chaos import recorder
from chaos.ledger import Answered, Sent
from nbdist import rpc

_numbers = itertools.count(1)


class Caller:
    """The calls of one member."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def here(cls) -> Caller:
        """Return a caller for the member that this thread works for."""
        return cls(rpc.get_worker_info().name)

    def begin(self, to: str, kind: str, limit: float) -> str:
        """Enter a call that is about to be sent; return the name by which the ledger knows the call."""
        call = f"{self.name}/{os.getpid()}/{next(_numbers)}"
        recorder.write(Sent(call, self.name, os.getpid(), to, kind, limit, time.monotonic()))
        return call

    def end(self, call: str, get: Callable[[], Any]) -> Any:
        """Wait for a call by ``get`` and enter how it ended; its value, or its error, goes to who asked."""
        try:
            value = get()
        except BaseException as error:
            own = isinstance(error, LookupError) and str(error.args[0]) == call
            text = f"{type(error).__name__}: {str(error)[:300]}"
            recorder.write(Answered(call, None, text, own, time.monotonic()))
            raise
        recorder.write(Answered(call, recorder.digest(value), None, False, time.monotonic()))
        return value

    def sync(self, to: str, kind: str, function: Callable[..., Any], *arguments: Any, limit: float) -> Any:
        """Call and wait; the function gets the name of the call first."""
        call = self.begin(to, kind, limit)
        return self.end(call, lambda: rpc.rpc_sync(to, function, args=(call, *arguments), timeout=limit))

    def start(
        self, to: str, kind: str, function: Callable[..., Any], *arguments: Any, limit: float
    ) -> Callable[[], Any]:
        """Call, and return what waits for the call."""
        call = self.begin(to, kind, limit)
        try:
            future = rpc.rpc_async(to, function, args=(call, *arguments), timeout=limit)
        except Exception as error:
            failed = error  # the worker is known to be gone
            return lambda: self.end(call, lambda: _raise(failed))
        return lambda: self.end(call, future.wait)


def _raise(error: Exception) -> None:
    raise error
