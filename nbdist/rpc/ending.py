"""How a world ends in order: nobody leaves while anything is under way.

The member with the lowest id leads. Round 1 is reached by calling ``shutdown``; it is over when all have reached it
and no call runs. Round 2 lets go of all references, and is over when no message about that is under way. Then all
close. `Survey` decides; `Ending` asks and answers. A member that is lost on the way is not waited for, but it is told.

Members answer at different moments, so the leader looks twice. A look is an answer of every member, and the questions
of the second go out after the last answer of the first has come. The round is over where in both looks no member had
anything under way, and none has sent a message that must arrive between its two answers. "Under way" are calls that run
or are awaited, such messages that are not acknowledged, and in round 2 forks that are not confirmed. So when the last
answer of the first look came nothing ran, and nothing was on its way: what a member had sent before its first answer
had arrived, and after that it sent nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from nbdist.errors import NbdistError, RendezvousError, WorkerLost
from nbdist.rpc.exchange import Exchange
from nbdist.rpc.links import Links
from nbdist.rpc.membership import Membership
from nbdist.rpc.references import References
from nbdist.wire.messages import AskShutdown, Record, ShutdownState

__all__ = ["Ending", "Reminder", "Survey"]

RUNNING, DRAINING, RELEASING, CLOSING = range(4)

_ASK_FIRST = 0.002
_ASK_MOST = 0.05
QUIET = 10.0
"""Seconds without a call after which a shutdown that waits says so."""

_ANSWERS_WITHIN = 2.0
"""Seconds within which a member answers the leader, unless it stands still."""

_TO_CALL, _TO_ANSWER = "to call shutdown", "to answer"
_TO_END = {
    DRAINING: "to end the calls that run",
    RELEASING: "to end what they say of references",
    CLOSING: "to close",
}
"""What the members are to do that keep a round from ending."""

_log = logging.getLogger("nbdist.rpc")


class Survey:
    """The leader's view of a round. Pure."""

    def __init__(self, members: set[int]) -> None:
        self.members = members
        self.round = DRAINING
        self._states: dict[int, ShutdownState] = {}
        self._before: int | None = None

    def missing(self) -> set[int]:
        """The members that have not reached this round."""
        return {
            member for member in self.members if (state := self._states.get(member)) is None or state.round < self.round
        }

    def busy(self) -> set[int]:
        """Return the members that have something under way; all of them, if none has in this look."""
        return {member for member in self.members if self._states[member].active} or set(self.members)

    def forget(self, member: int) -> None:
        """A member is gone."""
        self.members.discard(member)
        self._states.pop(member, None)
        self._before = None

    def look(self, states: dict[int, ShutdownState]) -> bool:
        """Take one look at all members; whether the round is over, and the next has begun."""
        self._states.update(states)
        if self.missing():
            self._before = None
            return False
        current = [self._states[member] for member in self.members]
        sent = sum(state.sent for state in current)
        quiet = not any(state.active for state in current)
        if quiet and self._before == sent:
            self.round += 1
            self._before = None
            return True
        self._before = sent if quiet else None
        return False


class Reminder:
    """Decides when a shutdown that waits tells what it waits for. Pure.

    Programs of torch have workers that call shutdown at once and serve calls until the others are done, so waiting
    is what they are there for. A line comes when this agent has served no call for `QUIET` seconds and waited for the
    same reason all the time, and once for each reason.
    """

    def __init__(self, now: float) -> None:
        self._quiet_since = now
        self._before: tuple[int, str] | None = None
        self._told: set[str] = set()

    def is_due(self, now: float, served: int, running: int, reason: str) -> bool:
        """Return whether to tell ``reason`` now, after ``served`` calls; ``running`` calls run at this moment."""
        if running or (served, reason) != self._before:
            self._quiet_since, self._before = now, (served, reason)
        if now - self._quiet_since <= QUIET or reason in self._told:
            return False
        self._told.add(reason)
        return True


class Ending:
    """One agent's part in ending the world."""

    def __init__(
        self,
        membership: Membership,
        links: Links,
        exchange: Exchange,
        references: References,
        turn: AbstractContextManager[Any],
    ) -> None:
        """Begin no round; ``turn`` is held while a message is handled."""
        self._turn = turn
        self._membership = membership
        self._links = links
        self._exchange = exchange
        self._references = references
        self._changed = threading.Condition()
        self._reached = RUNNING
        self._wanted = RUNNING
        self._waits_for = "", ""
        self._look = 1
        self._looked = 0.0
        self._asked: set[int] = set()
        self._answers: dict[int, ShutdownState] = {}
        self._lost: list[str] = []
        self._survey: Survey | None = None
        self.completed = False
        self.release: Callable[[], None] = references.release_all
        """Lets go of all references to other members' values; `end` calls it once, when no call runs any more."""

    # -- the one that ends --------------------------------------------------------------------

    def end(self, timeout: float) -> None:
        """Go through both rounds with all others, within ``timeout`` seconds (0: as long as it takes)."""
        deadline = time.monotonic() + timeout if timeout > 0 else float("inf")
        with self._changed:
            self._reached = DRAINING
            self._looked = time.monotonic()
            self._lost.clear()
            self._changed.notify_all()
        for round_over in (RELEASING, CLOSING):
            self._until(round_over, deadline)
            if round_over == RELEASING:
                self.release()
            with self._changed:
                self._reached = round_over
            self._references.is_ending = True
        self.completed = True
        if not self._is_leader():
            self._tell(self._leader())
        else:
            self._farewell(min(deadline, time.monotonic() + 1.0))
        if self._lost:
            raise WorkerLost(f"the world ended without {', '.join(self._lost)}")

    def _until(self, round: int, deadline: float) -> None:
        """Wait until the leader, perhaps this agent itself, begins ``round``."""
        pause, reminder = _ASK_FIRST, Reminder(time.monotonic())
        while True:
            with self._changed:
                if self._wanted >= round:
                    return
            if self._is_leader():
                self._ask()
            now = time.monotonic()
            if now > deadline:
                raise RendezvousError(f"shutdown: still waiting for {' '.join(self._waiting_for())}")
            exchange, (who, what) = self._exchange, self._waiting_for()
            if reminder.is_due(now, exchange.served, exchange.active, what):
                _log.warning("%s: shutdown is waiting for %s %s", self._membership.me.name, who, what)
            with self._changed:
                if self._wanted < round:
                    self._changed.wait(min(pause, max(deadline - now, 0.001)))
            pause = min(pause * 1.5, _ASK_MOST)

    def _waiting_for(self) -> tuple[str, str]:
        """Return who keeps the next round from beginning, and what they are to do."""
        if any(self._waits_for):
            return self._waits_for
        return (self._leader().name, _TO_CALL) if not self._is_leader() else ("the others", _TO_ANSWER)

    def _leader(self) -> Record:
        return self._membership.members()[0]

    def _is_leader(self) -> bool:
        return self._leader() is self._membership.me

    # -- the leader ---------------------------------------------------------------------------

    def _ask(self) -> None:
        """Collect one look, and begin the next round if it may; ask for the next look."""
        me = self._membership.me.incarnation
        with self._changed:
            others = {record.incarnation for record in self._membership.others()}
            if self._survey is None:
                self._survey = Survey({me, *others})
            survey = self._survey
            for member in survey.members - others - {me}:
                survey.forget(member)
            answers, before = dict(self._answers), self._waits_for
        if others <= answers.keys():
            answers[me] = self._state(self._look)
            survey.look(answers)
            late = survey.missing() - {me}
            what = _TO_CALL if late and survey.round == DRAINING else _TO_END[survey.round]
            with self._changed:
                self._looked = time.monotonic()
                self._look += 1
                self._answers.clear()
                self._asked.clear()
                self._wanted = max(self._wanted, survey.round)
                self._waits_for = self._names(late or survey.busy()), what
                self._changed.notify_all()
        elif time.monotonic() - self._looked > _ANSWERS_WITHIN:
            self._waits_for = self._names(others - answers.keys()), _TO_ANSWER
        with self._changed:
            ask = AskShutdown(survey.round, survey.round >= CLOSING, self._waits_for, self._look)
            to_ask = others - self._asked if self._waits_for == before else others
        for member in to_ask:
            with contextlib.suppress(NbdistError):
                self._links.post(member, ask)
                self._asked.add(member)

    def _names(self, members: set[int]) -> str:
        return ", ".join(sorted(map(self._membership.name_of, members)))

    def _farewell(self, deadline: float) -> None:
        """Keep telling that it is over until all others have said that they know, or have gone."""
        while time.monotonic() < deadline:
            with self._changed:
                knowing = {member for member, state in self._answers.items() if state.round >= CLOSING}
            waiting = {record.incarnation for record in self._membership.others()} - knowing
            if not waiting:
                return
            for member in waiting:
                with contextlib.suppress(NbdistError):
                    self._links.post(member, AskShutdown(CLOSING, True, ("", ""), self._look))
            with self._changed:
                self._changed.wait(0.02)

    # -- the members --------------------------------------------------------------------------

    def _state(self, look: int) -> ShutdownState:
        with self._turn:  # a message that is acknowledged has been acted upon
            active = self._exchange.active + self._exchange.calls.unended
            if self._reached >= RELEASING:
                self._references.reap()
                active += self._references.forks.pending
            self._links.post_waiting()
            sent, outstanding = self._links.traffic()  # last: a call that has ended meanwhile has been answered
            return ShutdownState(self._reached, sent, active + outstanding, look)

    def _tell(self, leader: Record) -> None:
        with contextlib.suppress(NbdistError):
            self._links.post(leader.incarnation, self._state(0))

    def on_ask(self, message: AskShutdown, sender: int, _: list[bytes]) -> None:
        """Answer the leader, which asks how far this member is."""
        with self._changed:
            self._waits_for = message.waits_for
            if self._reached >= DRAINING:
                self._wanted = max(self._wanted, message.round)
                self._changed.notify_all()
        with contextlib.suppress(NbdistError):
            self._links.post(sender, self._state(message.look))

    def on_state(self, message: ShutdownState, sender: int, _: list[bytes]) -> None:
        """Store a member's answer to the leader."""
        with self._changed:
            if message.look != self._look and message.round < CLOSING:
                return
            self._answers[sender] = message
            if self._survey is not None:
                self._changed.notify_all()

    def on_orderly_goodbye(self) -> None:
        """A member closes because the world has ended; the leader's word for that may yet be on its way."""
        with self._changed:
            if self._reached >= DRAINING:
                self._wanted = CLOSING
            self._changed.notify_all()

    def on_lost(self, record: Record, why: str) -> None:
        """Stop waiting for a member that is lost."""
        with self._changed:
            if DRAINING <= self._reached < CLOSING and self._wanted < CLOSING:
                self._lost.append(f"{record.name}, which {why}")
            self._answers.pop(record.incarnation, None)
            self._changed.notify_all()
