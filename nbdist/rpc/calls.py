"""The calls that an agent awaits answers to, and when to stop waiting."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from nbdist.ids import GlobalId
from nbdist.rpc.futures import Latch, Promise
from nbdist.wire.messages import Fork, Recording

__all__ = ["Pending", "PendingCalls"]


@dataclass(eq=False, slots=True)
class Pending:
    """One call that has not been answered."""

    id: int
    to: int
    worker: str
    function: str
    outcome: Promise[Any] | Latch
    started: float
    timeout: float
    thread: int
    result: Fork | None = None
    target: GlobalId | None = None
    hold: object = None
    """What keeps the target."""
    seq: int = 0
    again: Callable[[], None] | None = None
    unsent: Callable[[], None] | None = None
    asked: bool = False
    spared: float = 0.0
    """Seconds for which its time did not run."""
    recording: Recording | None = None
    definitions: Sequence[tuple[str, str]] = ()
    """Those that the callee has to have."""

    @property
    def is_waited_for(self) -> bool:
        """Whether one thread waits for the outcome, and nobody else can see it."""
        return type(self.outcome) is Latch

    @property
    def deadline(self) -> float:
        """When its time is up."""
        return self.started + self.timeout + self.spared if self.timeout > 0 else math.inf

    def next_due(self) -> float:
        """Return when to look at it next.

        Half way, whoever runs it is asked what it is doing, so that a timeout can say so.
        """
        return self.deadline if self.asked else self.started + self.timeout * 0.5 + self.spared

    def drop_repeat(self) -> None:
        """It will not be sent once more, with definitions."""
        unsent, self.again, self.unsent = self.unsent, None, None
        if unsent is not None:
            unsent()


class PendingCalls:
    """A table of calls by id, and a heap of their deadlines. Thread-safe."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        """Await nothing; ``lock`` is taken where more than one operation on a dict is needed."""
        self.numbers = itertools.count(1)
        """The ids of calls; take the next one with `next`."""
        self.ending: dict[Pending, None] = {}
        """The calls that are awaited no longer and that a job is going to end, or to send once more."""
        self._calls: dict[int, Pending] = {}
        self._due: list[tuple[float, int]] = []
        self._frozen: set[int] = set()
        self._frozen_at = 0.0
        self._lock = lock

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def unended(self) -> int:
        """How many calls have not ended: those that are awaited, and those whose answer is still being read."""
        return len(self._calls) + len(self.ending)

    def add(self, call: Pending) -> None:
        """Await the answer to a call that is about to be sent, perhaps once more."""
        # First: what cannot be computed must not be awaited, and a new object may have Python collect garbage.
        half = call.started + call.timeout * 0.5, call.id
        with self._lock:
            self._calls[call.id] = call
            if call.timeout > 0:
                heapq.heappush(self._due, half)
                if len(self._due) > 2 * len(self._calls) + 1024:
                    self._sort()

    def _sort(self) -> None:
        """With the lock held: make the heap of deadlines anew, of the calls that are awaited.

        A finaliser of the user's may run in this thread meanwhile, and make a call: then it is made once more.
        """
        while True:
            due, size = self._due, len(self._due)
            anew = [(call.next_due(), call.id) for call in self.all() if call.timeout > 0]
            heapq.heapify(anew)
            if self._due is due and len(due) == size:
                self._due = anew
                return

    def pop(self, id: int) -> Pending | None:
        """Return the call of that id, which is awaited no longer; None if it was not. Needs no lock."""
        return self._calls.pop(id, None)

    def answered(self, id: int, sender: int) -> Pending | None:
        """Return the call that an agent has answered, as `pop` does; None if it did not go to that agent."""
        call = self._calls.get(id)
        return self._calls.pop(id, None) if call is not None and call.to == sender else None

    def get(self, id: int) -> Pending | None:
        """Return the call of that id, if it is awaited. Needs no lock."""
        return self._calls.get(id)

    def to(self, incarnation: int) -> list[Pending]:
        """List the calls that one agent has not answered."""
        return [call for call in self.all() if call.to == incarnation]

    def all(self) -> list[Pending]:
        """List all calls that are awaited."""
        return list(self._calls.values())  # one operation, as the interpreter sees it

    def next_due(self) -> float:
        """When `due` has something to say."""
        due = self._due
        return due[0][0] if due and not self._frozen else math.inf

    def freeze(self, who: int, now: float) -> None:
        """Let nobody's time run, as ``who``, an agent, wants it."""
        with self._lock:
            if not self._frozen:
                self._frozen_at = now
            self._frozen.add(who)

    def thaw(self, who: int, now: float) -> None:
        """Let it run again, unless others have had it stopped, too."""
        with self._lock:
            if who not in self._frozen:
                return
            self._frozen.discard(who)
            if self._frozen:
                return
            for call in self.all():
                call.spared += now - max(call.started, self._frozen_at)
            self._sort()

    def due(self, now: float) -> tuple[list[Pending], list[Pending]]:
        """The calls whose half time, and those whose time, has come; the latter are awaited no longer."""
        half: list[Pending] = []
        over: list[Pending] = []
        with self._lock:
            while self._due and self._due[0][0] <= now and not self._frozen:
                _, id = heapq.heappop(self._due)
                call = self._calls.get(id)
                if call is None:
                    continue
                if now >= call.deadline:
                    if self._calls.pop(id, None) is not None:  # it may be answered at this moment
                        over.append(call)
                else:
                    if not call.asked:
                        call.asked = True
                        half.append(call)
                    heapq.heappush(self._due, (call.deadline, id))
        return half, over
