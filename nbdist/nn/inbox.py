"""Stores the inputs of one worker's operations in one step, and lets the step wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from nbdist.errors import NbdistError, RemoteError
from nbdist.nn.schedules import Op
from nbdist.rpc.waits import blocking_wait


class Abandoned(NbdistError):
    """The step was abandoned: it failed on another worker, was interrupted, or its pipeline was deleted."""


class Inbox:
    """The inputs of one worker's operations in one step, by operation; or the error with which the step failed.

    One thread takes; any thread may put or fail.
    """

    def __init__(self) -> None:
        self._failure: tuple[type[NbdistError], str] | None = None
        self._things: dict[Op, Any] = {}
        # Called once, without the lock of this inbox, by the thread that calls `fail` first.
        self.on_fail: Callable[[], None] = lambda: None
        self._changed = threading.Condition(threading.Lock())

    def put(self, op: Op, thing: Any) -> None:
        """Store an operation's input, and wake the thread that waits for it. Dropped if the step has failed."""
        with self._changed:
            if self._failure is None:
                self._things[op] = thing
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let the step fail: drop all inputs, and make `take` and `check` raise a new error with this type and text."""
        # Only the type and text are kept: the error itself, once raised, would hold the step by its traceback.
        text = str(error)
        failure = (
            # nbdist's errors can be made of one text, others perhaps not.
            (type(error), text) if isinstance(error, NbdistError) else (RemoteError, f"{type(error).__name__}: {text}")
        )
        with self._changed:
            if self._failure is not None:  # only the first error counts
                return
            self._failure = failure
            self._things.clear()
            self._changed.notify_all()
        self.on_fail()

    def has(self, op: Op) -> bool:
        """Return whether an operation's input has arrived and has not been taken. False once the step has failed."""
        with self._changed:
            return op in self._things

    def take(self, op: Op) -> Any:
        """Wait for an operation's input, remove and return it. Raises the step's error if the step has failed."""
        with self._changed:
            if op not in self._things and self._failure is None:
                with blocking_wait():  # without a limit: a step ends by its inputs or by `fail`
                    self._changed.wait_for(lambda: op in self._things or self._failure is not None)
            self.check()
            return self._things.pop(op)

    def check(self) -> None:
        """Raise the step's error if the step has failed."""
        if self._failure is not None:
            kind, text = self._failure
            raise kind(text)
