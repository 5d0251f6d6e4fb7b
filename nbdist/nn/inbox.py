"""What the stages of one worker are sent in one step, and the waiting for it."""

from __future__ import annotations

import threading
from typing import Any

from nbdist.errors import NbdistError
from nbdist.nn.schedules import Op
from nbdist.rpc.futures import blocking_wait

__all__ = ["Abandoned", "Inbox"]


class Abandoned(NbdistError):
    """The step failed elsewhere, so it does not go on here either."""


class Inbox:
    """By operation, what it needs; or why nothing more will come."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._things: dict[Op, Any] = {}
        self._changed = threading.Condition(threading.Lock())

    def put(self, op: Op, thing: Any) -> None:
        """It has come."""
        with self._changed:
            if self.failure is None:
                self._things[op] = thing
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come."""
        with self._changed:
            if self.failure is None:
                self.failure = error
                self._things.clear()
                self._changed.notify_all()

    def take(self, op: Op) -> Any:
        """What an operation needs, when it is there."""
        with self._changed:
            if op not in self._things and self.failure is None:
                with blocking_wait():
                    while op not in self._things and self.failure is None:
                        self._changed.wait()
            if self.failure is not None:
                raise self.failure
            return self._things.pop(op)

    def check(self) -> None:
        """Raise if the step has failed."""
        if self.failure is not None:
            raise self.failure
