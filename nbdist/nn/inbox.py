"""What the stages of one worker are sent in one step, and the waiting for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from nbdist.errors import NbdistError, RemoteError
from nbdist.nn.schedules import Op
from nbdist.rpc.futures import blocking_wait

__all__ = ["Abandoned", "Inbox"]


class Abandoned(NbdistError):
    """The step failed elsewhere, so it does not go on here either."""


class Inbox:
    """By operation, what it needs; or why nothing more will come."""

    def __init__(self) -> None:
        self._failure: tuple[type[NbdistError], str] | None = None
        self._things: dict[Op, Any] = {}
        self.on_fail: Callable[[], None] = lambda: None
        """Called once, when nothing more will come."""
        self._changed = threading.Condition(threading.Lock())

    def put(self, op: Op, thing: Any) -> None:
        """It has come."""
        with self._changed:
            if self._failure is None:
                self._things[op] = thing
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come."""
        # The error itself, once raised, would hold by its traceback the step, and all that it has kept.
        text = str(error)
        failure = (
            (type(error), text) if isinstance(error, NbdistError) else (RemoteError, f"{type(error).__name__}: {text}")
        )
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            self._things.clear()
            self._changed.notify_all()
        self.on_fail()

    def has(self, op: Op) -> bool:
        """Whether what an operation needs has come."""
        with self._changed:
            return op in self._things

    def take(self, op: Op) -> Any:
        """What an operation needs, when it is there."""
        with self._changed:
            if op not in self._things and self._failure is None:
                with blocking_wait():
                    while op not in self._things and self._failure is None:
                        self._changed.wait()
            self.check()
            return self._things.pop(op)

    def check(self) -> None:
        """Raise if the step has failed."""
        if self._failure is not None:
            kind, text = self._failure
            raise kind(text)
