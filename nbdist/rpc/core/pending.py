"""The calls that an agent has made and that have no answer yet, and their time limits."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from nbdist.ids import GlobalId
from nbdist.rpc.latch import Latch
from nbdist.rpc.promise import Promise
from nbdist.wire.messages import Fork, Recording


@dataclass(eq=False, slots=True)
class Pending:
    """A call that has no answer yet. `asked` and `spared` change under `Exchange.lock`."""

    id: int  # this agent's number for the call
    to: int  # the callee's incarnation
    worker: str  # the callee's name, for errors
    function: str  # the function's name, for errors
    outcome: Promise[Any] | Latch  # gets the value or the error when the call ends
    started: float  # as of `time.monotonic`
    timeout: float  # seconds; 0 for no limit
    thread: int  # the ident of the thread that made the call
    result: Fork | None = None  # the caller's fork of the value that the call makes; None if the result comes back
    target: GlobalId | None = None  # the id of the value that the call works on, if it works on one
    hold: object = None  # keeps that value alive until the call has ended
    seq: int = 0  # the number of the message that carries the call, for `Links.status`
    # Sends the call once more, with definitions (`repeats`), if that is possible.
    again: Callable[[], None] | None = None
    unsent: Callable[[], None] | None = None  # undoes the forks in the message for the repeat
    asked: bool = False  # True once half of the time is over and the callee was asked what it is doing
    spared: float = 0.0  # seconds for which the call's clock was stopped (`PendingCalls.freeze`)
    recording: Recording | None = None  # the record of the call for a backward pass, if it is part of one
    definitions: Sequence[tuple[str, str]] = ()  # those of ``__main__`` that the callee must have, by name and digest

    @property
    def is_waited_for(self) -> bool:
        """True if only the thread that made the call waits for the outcome, and no other thread can see it."""
        return type(self.outcome) is Latch

    @property
    def deadline(self) -> float:
        """The moment at which the call times out, as of `time.monotonic`; infinite without a limit."""
        return self.started + self.timeout + self.spared if self.timeout > 0 else math.inf

    def next_due(self) -> float:
        """Return when to check the call next: at half of its time, then at its deadline."""
        return self.deadline if self.asked else self.started + self.timeout * 0.5 + self.spared

    def drop_repeat(self) -> None:
        """Record that the call will not be sent again, and free the message that was encoded for that case."""
        unsent, self.again, self.unsent = self.unsent, None, None
        if unsent is not None:
            unsent()


class PendingCalls:
    """A table of the calls that one agent has made and that have no answer yet, with their time limits. Thread-safe.

    Moments are as of `time.monotonic`. Methods that need no lock are one operation on a dict.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        """Make an empty table. ``lock`` is `Exchange.lock`."""
        self.numbers = itertools.count(1)
        """The ids of calls."""
        self.ending: dict[Pending, None] = {}
        """The calls that left the table and that a job will end or send again."""
        self._calls: dict[int, Pending] = {}  # by id
        self.get: Callable[[int], Pending | None] = self._calls.get
        """Returns the call with that id; None if it is not in the table."""
        # A heap of (next moment to check the call, id). Calls that have ended stay in it until their moment.
        self._due: list[tuple[float, int]] = []
        self.frozen_by: set[int] = set()
        """The agents, by incarnation, that want all clocks stopped."""
        self._frozen_at = 0.0
        self._lock = lock

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def unended(self) -> int:
        """The number of calls that have not ended: those in the table, and those in `ending`."""
        return len(self._calls) + len(self.ending)

    def add(self, call: Pending) -> None:
        """Add a call that is about to be sent, for the first time or again."""
        # Computed first: a bad time limit must raise before the call is in the table, and a new object may make Python
        # collect garbage, which must not happen under the lock.
        half = call.started + call.timeout * 0.5, call.id
        with self._lock:
            self._calls[call.id] = call
            if call.timeout > 0:
                heapq.heappush(self._due, half)
                # Calls that have ended pile up in the heap (test_deadlines_of_answered_calls_do_not_pile_up).
                if len(self._due) > 2 * len(self._calls) + 1024:
                    self._sort()

    def _sort(self) -> None:
        # A user's finaliser may run in this thread meanwhile and make a call: then the heap is rebuilt once more
        # (test_a_call_that_a_finaliser_makes_while_deadlines_are_sorted_has_one).
        while True:
            due, size = self._due, len(self._due)
            anew = [(call.next_due(), call.id) for call in self.all() if call.timeout > 0]
            heapq.heapify(anew)
            if self._due is due and len(due) == size:
                self._due = anew
                return

    def pop(self, id: int) -> Pending | None:
        """Take a call out of the table and return it; None if it is not there. Whoever takes it must settle it."""
        return self._calls.pop(id, None)

    def answered(self, id: int, sender: int) -> Pending | None:
        """Take a call out of the table because agent ``sender`` has answered it; None if the answer must be dropped."""
        call = self._calls.get(id)
        return self._calls.pop(id, None) if call is not None and call.to == sender else None

    def to(self, incarnation: int) -> list[Pending]:
        """List the calls that one agent has not answered."""
        return [call for call in self.all() if call.to == incarnation]

    def all(self) -> list[Pending]:
        """List all calls in the table."""
        return list(self._calls.values())  # one operation for the interpreter

    def next_due(self) -> float:
        """Return the earliest moment at which `due` may return a call; infinite if none will be due."""
        due = self._due
        return due[0][0] if due and not self.frozen_by else math.inf

    def freeze(self, who: int, now: float) -> None:
        """Stop the clocks of all calls until `thaw`, because agent ``who`` wants it. A second call changes nothing."""
        with self._lock:
            if not self.frozen_by:
                self._frozen_at = now
            self.frozen_by.add(who)

    def thaw(self, who: int, now: float) -> None:
        """Restart the clocks that ``who`` wanted stopped, unless another agent still wants that."""
        with self._lock:
            is_last = self.frozen_by == {who}
            self.frozen_by.discard(who)
            if is_last:
                for call in self.all():  # a call made meanwhile has its whole time now
                    call.spared += now - max(call.started, self._frozen_at)
                self._sort()

    def due(self, now: float) -> tuple[list[Pending], list[Pending]]:
        """Return the calls that have used half of their time, and those that have timed out, which leave the table."""
        half: list[Pending] = []
        over: list[Pending] = []
        with self._lock:
            while self._due and self._due[0][0] <= now and not self.frozen_by:
                _, id = heapq.heappop(self._due)
                call = self._calls.get(id)
                if call is None:
                    continue  # it has ended
                if now >= call.deadline:
                    if self._calls.pop(id, None) is not None:  # it may be answered at this very moment
                        over.append(call)
                else:
                    if not call.asked:
                        call.asked = True
                        half.append(call)
                    heapq.heappush(self._due, (call.deadline, id))
        return half, over
