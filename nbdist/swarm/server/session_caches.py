"""One session on one server: its caches, the calls for steps, and the inputs that have arrived.

Calls for steps, and their inputs, arrive in any order. Nothing here waits: `ServerSession.take_up` returns a step whose
input is complete, and `nbdist.swarm.server.server` computes it.
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
from nbdist.swarm.server.neighbours import Address

REPLAYED = -1  # the number of all steps that are replayed from a history; new steps have 1, 2, ...


class NoSession(NbdistError):
    """A server does not have a session: it was closed, dropped, moved away, or never opened there."""


class StepReply(NamedTuple):
    """The output of some blocks, and some numbers about the server."""

    result: Any  # a tensor, or a tuple of tensors
    seconds: float  # spent on computing; 0 for an answer that was stored already
    cache: int  # bytes reserved for caches on the server
    sessions: int  # on the server
    steps: int  # that the server has computed
    reserved: int = 0  # bytes of these caches that the session's span has


@dataclass(eq=False)
class StepCall:
    """A call for a step. It waits for its input and for its turn."""

    number: int
    step: Step
    push: bool
    deadline: float  # as of `time.monotonic`: until then, the input must arrive
    patience: float  # seconds that the client allows for a step; half of it may pass in waiting for cache memory
    points: float  # that the client spends on the call, which decide its priority
    answer: Future[StepReply] | None

    def settle(self, reply: StepReply | None, error: BaseException | None) -> None:
        """Complete the caller's future with the reply, or with ``error`` if there is one. Only the first call does."""
        # The frames of the error refer to this object: if it kept the future, the two would keep each other alive.
        answer, self.answer = self.answer, None
        if answer is not None:
            answer.try_settle(reply, error)


class ServerSession:
    """One session on a server, for one span: its caches and its queue of steps.

    `changed` guards the queue: ``asked``, ``given``, ``taken``, ``last``, ``busy`` and ``ended``. The caller of `give`
    and `take_up` holds it; the other methods acquire it.
    """

    def __init__(self, cache: Any, client: int, expected: int) -> None:
        self.cache = cache
        self.client = client
        self.expected = expected  # tokens that the session will have at its end, as its client says; 0 if unknown
        self.taken = REPLAYED  # the last step that was computed
        self.last: torch.Tensor | None = None  # the output of that step, in case a client asks for it again
        # Where the output is pushed: a server, and the first block of the span there; None for the last span.
        self.next: tuple[Address, int] | None = None
        self.changed = threading.Condition()
        self.asked: list[StepCall] = []
        self.given: dict[int, torch.Tensor] = {}  # hidden states that have arrived, by number of the step
        self.busy = False  # True while a thread is computing steps of the session
        self.ended = ""  # the reason why the session is over on this server; empty while it is not
        self.used = time.monotonic()  # the time of the last call, as of `time.monotonic`

    def give(self, number: int, hidden: torch.Tensor) -> None:
        """Store the input of step ``number``, if the step is still to be computed. Storing it twice is harmless."""
        if number > self.taken or number == REPLAYED:
            self.given[number] = hidden

    def take_up(self) -> tuple[StepCall, torch.Tensor | None] | None:
        """Remove from the queue a call that can be answered now; return it with its input, or None if there is none.

        The caller computes the step and answers the call. The input is None for the last step, whose output is stored.
        """
        if self.ended:
            return None
        for asked in list(self.asked):
            # Replayed steps all have the number -1, so none of them counts as taken.
            known = asked.number != REPLAYED and asked.number <= self.taken
            hidden = None if known else self.given.get(asked.number)
            if not known and hidden is None:
                continue
            self.asked.remove(asked)
            if not known or asked.number == self.taken:
                return asked, hidden
            asked.settle(
                None,
                UsageError(
                    f"the call for step {asked.number} comes after step {self.taken} was computed: "
                    "the numbers of a session's steps have to go up"
                ),
            )
        return None

    def taken_to(self, number: int, result: torch.Tensor) -> None:
        """Record that step ``number`` was computed, with its output; drop the inputs up to it."""
        with self.changed:
            self.last = result
            self.taken = max(self.taken, number)  # a replayed step's number, -1, changes nothing
            self.given = {each: hidden for each, hidden in self.given.items() if each > self.taken}

    def end(self, why: str) -> None:
        """End the session: waiting and later calls fail with `NoSession`. A second call keeps the first reason."""
        with self.changed:
            self.ended = self.ended or why
            asked, self.asked = self.asked, []
            self.changed.notify_all()
        # Without the lock: settling a future runs the callbacks of others.
        for each in asked:
            each.settle(None, NoSession(self.ended))

    def expire(self, now: float) -> None:
        """Fail the calls whose input has not arrived by their deadline with TimeoutError."""
        with self.changed:
            late = [each for each in self.asked if each.deadline <= now]
            self.asked = [each for each in self.asked if each.deadline > now]
        for each in late:
            error = TimeoutError(
                f"the input of step {each.number} has not arrived in time, neither from the server before this one nor "
                "from the client, which sends it again by itself if it still waits"
            )
            each.settle(None, error)
