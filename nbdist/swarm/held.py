"""What a server holds of one session: its caches, what is to go in, and who waits for what comes out.

Steps, and what goes into them, come in any order; nothing here waits.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nbdist.errors import NbdistError, UsageError
from nbdist.rpc.futures import Future
from nbdist.swarm.history import Step
from nbdist.swarm.neighbours import Address

__all__ = ["AGAIN", "Asked", "Held", "NoSession", "Reply"]

AGAIN = -1
"""The number of steps that a session is brought back by."""


class NoSession(NbdistError):
    """A server does not know a session, any more."""


class Reply(NamedTuple):
    """What came out of some blocks, and how the server is."""

    result: Any
    seconds: float
    """That it has computed."""
    cache: int
    sessions: int
    steps: int


@dataclass(eq=False)
class Asked:
    """Somebody wants the result of a step."""

    number: int
    tokens: int
    step: Step
    push: bool
    deadline: float
    """Until when what goes in may come;"""
    patience: float
    """and seconds from then on in which it is to be answered."""
    points: float
    answer: Future[Reply] | None

    def settle(self, reply: Reply | None, error: BaseException | None) -> None:
        """Tell whoever asked; once, and let go of them: the frames of an error, which they have, have this."""
        answer, self.answer = self.answer, None
        if answer is not None:
            answer.try_settle(reply, error)


class Held:
    """The caches of one session here, and what is to be done with them."""

    def __init__(self, cache: Any, client: int, expected: int) -> None:
        self.cache = cache
        self.client = client
        self.expected = expected
        """Tokens that it will have, if that was said."""
        self.taken = AGAIN
        """The number of the last step."""
        self.last: torch.Tensor | None = None
        self.next: tuple[Address, int] | None = None
        """Where what comes out goes, and which block that begins with."""
        self.changed = threading.Condition()
        self.asked: list[Asked] = []
        self.given: dict[int, dict[int, torch.Tensor]] = {}
        """What is to go in, by number of step and by its first token."""
        self.busy = False
        """Whether some thread sees to it."""
        self.exported = False
        """Whether another server goes on with it."""
        self.ended = ""
        self.used = time.monotonic()

    def give(self, number: int, at: int, hidden: torch.Tensor) -> None:
        """Some of what is to go in; the same again is no matter."""
        if number > self.taken or number == AGAIN:
            given = self.given.setdefault(number, {})
            if at not in given or given[at].shape[1] < hidden.shape[1]:
                given[at] = hidden

    def take_up(self) -> tuple[Asked, torch.Tensor | None] | None:
        """What can be done now, by whoever calls: a step, with what goes in; or to answer again, without."""
        for asked in list(self.asked):
            known = asked.number != AGAIN and asked.number <= self.taken
            hidden = None if known else self._given_for(asked)
            if not known and hidden is None:
                continue
            self.asked.remove(asked)
            if not known or asked.number == self.taken:
                return asked, hidden
            asked.settle(None, UsageError(f"step {asked.number} comes after step {self.taken}"))
        return None

    def _given_for(self, asked: Asked) -> torch.Tensor | None:
        """What is to go in, if all of it is there."""
        found: list[torch.Tensor] = []
        at, given = 0, self.given.get(asked.number, {})
        while at < asked.tokens:
            if at not in given:
                return None
            found.append(given[at])
            at += given[at].shape[1]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def taken_to(self, number: int, result: torch.Tensor) -> None:
        """A step has been taken."""
        with self.changed:
            self.last = result
            self.taken = max(self.taken, number)
            for known in [known for known in self.given if known <= self.taken]:
                del self.given[known]

    def end(self, why: str) -> None:
        """Nothing is done any more."""
        with self.changed:
            self.ended = self.ended or why
            asked, self.asked = self.asked, []
            self.changed.notify_all()
        for each in asked:
            each.settle(None, NoSession(self.ended))

    def expire(self, now: float) -> None:
        """Whoever waits for what does not come waits no longer."""
        with self.changed:
            late = [each for each in self.asked if each.deadline <= now]
            self.asked = [each for each in self.asked if each not in late]
        for each in late:
            error = TimeoutError(f"what goes into step {each.number} has not come from whoever is before")
            each.settle(None, error)
