"""The orderly end of a world, and the departure of one member: none leaves while calls or messages are under way.

The member with the lowest id leads. The rounds, in the names of the constants of `nbdist.rpc.world.survey`::

    RUNNING ── shutdown() is called ──▶ DRAINING ── no call runs anywhere ──▶ RELEASING ──────────▶ CLOSING
                                        round 1                               round 2: no message    all close
                                                                              about references is
                                                                              under way

`Survey` decides when a round is over; `Shutdown` asks the members and answers the leader. If a member is lost
meanwhile, the leader does not wait for it, but `shutdown` of the others raises an error that names it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from nbdist.errors import NbdistError, RendezvousError, WorkerLost
from nbdist.rpc.core.exchange import Exchange
from nbdist.rpc.core.members import Membership
from nbdist.rpc.links import Links, try_post
from nbdist.rpc.references.reference_table import References
from nbdist.rpc.world.survey import CLOSING, DRAINING, RELEASING, RUNNING, Survey
from nbdist.wire.messages import AskShutdown, Record, ShutdownState

_FIRST_PAUSE = 0.002  # seconds until a waiting agent checks again, at first
_LONGEST_PAUSE = 0.05
REMIND_AFTER = 10.0
"""Seconds without a served call after which a waiting `shutdown` logs what it waits for."""

# In an error or a warning. Each question of the leader carries these names, too.
_NAMES_SHOWN = 20

# Seconds for which a departing agent waits until the other members have acknowledged its messages.
_ACKNOWLEDGED_WITHIN = 1.0

_ANSWERS_WITHIN = 2.0  # seconds within which a member answers the leader, unless it hangs

_TO_CALL, _TO_ANSWER = "to call shutdown", "to answer"
_DUTY_IN_ROUND = {DRAINING: "to end the calls that run", RELEASING: "to release their references", CLOSING: "to close"}
"""The duty of a member in each round, for messages: "waiting for worker1 to end the calls that run"."""

_log = logging.getLogger("nbdist.rpc")


class Reminder:
    """Decides when a `shutdown` that waits logs what it waits for. Pure.

    In many programs of torch, workers call shutdown at once and serve calls until the other workers are done, so
    waiting is normal. `shutdown` logs only after `REMIND_AFTER` seconds without a served call in which the reason to
    wait stayed the same, and only once for each reason.
    """

    def __init__(self, now: float) -> None:
        self._quiet_since = now
        self._before: tuple[int, str] | None = None
        self._told: set[str] = set()

    def is_due(self, now: float, served: int, running: int, reason: str) -> bool:
        """Return whether to log now that `shutdown` waits for ``reason``; True once for each reason."""
        if running or (served, reason) != self._before:
            self._quiet_since, self._before = now, (served, reason)
        if now - self._quiet_since <= REMIND_AFTER or reason in self._told:
            return False
        self._told.add(reason)
        return True


@dataclass(eq=False, repr=False)
class Shutdown:
    """One agent's part in ending the world: `shutdown` waits here until no member has anything under way."""

    _membership: Membership
    _links: Links
    _exchange: Exchange
    _references: References
    _turn: AbstractContextManager[Any]  # `Agent._turn`, held while a message is handled
    _doing: Callable[[], str]  # describes the calls that run here
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _reached: int = RUNNING  # the round that this agent has reached
    _wanted: int = RUNNING  # the round that the leader has announced
    # The names of the members for which the leader waits, and what they have to do, as texts.
    _waits_for: tuple[str, str] = "", ""
    # The leader's current look. Answers to earlier looks do not count.
    _look: int = 1
    _looked: float = 0.0  # the time of the leader's last complete look
    _asked: set[int] = field(default_factory=set)  # the members that have been asked in this look
    _answers: dict[int, ShutdownState] = field(default_factory=dict)  # the answers in this look, by member
    # The members that were lost during the end, with the reason, for the error of `end`.
    _lost: list[str] = field(default_factory=list)
    _survey: Survey | None = None  # None in an agent that does not lead
    completed: bool = False
    """True once `end` has gone through both rounds: the goodbye then says that the end was orderly."""

    def __post_init__(self) -> None:
        self.release: Callable[[], None] = self._references.release_all
        """Releases all references to values of other members. `end` calls it once."""

    # -- every member -------------------------------------------------------------------------

    def end(self, timeout: float) -> None:
        """Wait with all other members until a fixed world can end, ``timeout`` seconds at most; 0 for no limit."""
        deadline = time.monotonic() + timeout if timeout > 0 else float("inf")
        with self._changed:
            self._reached = DRAINING
            self._looked = time.monotonic()
            self._lost.clear()
            self._changed.notify_all()
        # Round 1 ends when no call runs anywhere, round 2 when no message about references is under way.
        for round_over in (RELEASING, CLOSING):
            self._wait_for_round(round_over, deadline)
            if round_over == RELEASING:
                self.release()  # before `_reached`: an answer in round 2 must count the releases under way
            with self._changed:
                self._reached = round_over
            self._references.is_ending = True
        self.completed = True
        if not self._is_leader():
            # Without a question, as an answer to the look 0, which does not exist.
            try_post(self._links, self._leader().incarnation, self._state(0))
        else:
            self._tell_the_end(min(deadline, time.monotonic() + 1.0))
        if self._lost:
            raise WorkerLost(
                f"the world has ended, but without {', '.join(self._lost)}: lost before the end; their logs may say why"
            )

    def drain(self, timeout: float) -> None:
        """Wait until all calls of this agent and to it are answered, then release its references; limit as in `end`."""
        deadline = time.monotonic() + timeout if timeout > 0 else float("inf")
        while self._exchange.active or self._exchange.calls.unended:
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"shutdown of {self._membership.me.name} timed out, with {self._doing() or 'calls that it made'} "
                    "still running. Next time, allow more with shutdown(timeout=...), or wait for these calls first"
                )
            time.sleep(0.002)
        self._references.release_all()
        # A member that has not acknowledged in time learns from our Goodbye that the references are released.
        deadline = min(deadline, time.monotonic() + _ACKNOWLEDGED_WITHIN)
        while self._links.outstanding() and time.monotonic() < deadline:
            time.sleep(0.002)

    def _wait_for_round(self, round: int, deadline: float) -> None:
        """Wait until the leader, which may be this agent, begins ``round``. Raises RendezvousError at ``deadline``."""
        pause, reminder = _FIRST_PAUSE, Reminder(time.monotonic())
        while True:
            with self._changed:
                if self._wanted >= round:
                    return
            if self._is_leader():
                self._ask()
            now = time.monotonic()
            if now > deadline:
                raise RendezvousError(
                    f"shutdown: still waiting for {' '.join(self._waiting_for())}. "
                    "Next time, allow more with shutdown(timeout=...)"
                )
            exchange, (who, what) = self._exchange, self._waiting_for()
            if reminder.is_due(now, exchange.served, exchange.active, what):
                _log.warning("%s: shutdown is waiting for %s %s", self._membership.me.name, who, what)
            with self._changed:
                if self._wanted < round:
                    self._changed.wait(min(pause, max(deadline - now, 0.001)))
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _waiting_for(self) -> tuple[str, str]:
        """Return, as two texts, the members that keep the next round from beginning, and what they have to do."""
        if any(self._waits_for):
            return self._waits_for
        return (self._leader().name, _TO_CALL) if not self._is_leader() else ("the others", _TO_ANSWER)

    def _leader(self) -> Record:
        return self._membership.members()[0]  # the living member with the lowest id

    def _is_leader(self) -> bool:
        return self._leader() is self._membership.me

    # -- the leader ---------------------------------------------------------------------------

    def _ask(self) -> None:
        """As the leader, ask the members what they have under way; once all have answered, decide about the round."""
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
            what = _TO_CALL if late and survey.round == DRAINING else _DUTY_IN_ROUND[survey.round]
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
            ask = AskShutdown(survey.round, self._waits_for, self._look)
            # A question says for whom the leader waits, so all are asked again when that changes.
            to_ask = others - self._asked if self._waits_for == before else others
        for member in to_ask:
            with contextlib.suppress(NbdistError):
                self._links.post(member, ask)
                self._asked.add(member)

    def _names(self, members: set[int]) -> str:
        """Return the sorted names of members as one text: at most `_NAMES_SHOWN`, and the number of the others."""
        names = sorted(map(self._membership.name_of, members))
        more = [f"{len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
        return ", ".join([*names[:_NAMES_SHOWN], *more])

    def _tell_the_end(self, deadline: float) -> None:
        """As the leader, tell all others that the world has ended, until each has acknowledged this or has left."""
        while time.monotonic() < deadline:
            with self._changed:
                knowing = {member for member, state in self._answers.items() if state.round >= CLOSING}
            waiting = {record.incarnation for record in self._membership.others()} - knowing
            if not waiting:
                return
            for member in waiting:
                try_post(self._links, member, AskShutdown(CLOSING, ("", ""), self._look))
            with self._changed:
                self._changed.wait(0.02)

    # -- answering the leader -----------------------------------------------------------------

    def _state(self, look: int) -> ShutdownState:
        """Return this member's answer to the leader: its round, how many messages it has sent, what is under way."""
        with self._turn:  # so that every message that was acknowledged has been handled
            active = self._exchange.active + self._exchange.calls.unended
            if self._reached >= RELEASING:
                self._references.reap()
                active += self._references.forks.pending
            self._links.post_waiting()
            sent, outstanding = self._links.traffic()  # last, to count the answer of a call that has ended meanwhile
            return ShutdownState(self._reached, sent, active + outstanding, look)

    def on_ask(self, message: AskShutdown, sender: int, _: list[bytes]) -> None:
        """Answer the leader, which asks what this member has under way."""
        with self._changed:
            self._waits_for = message.waits_for
            if self._reached >= DRAINING:  # else the answer says that this member still runs
                self._wanted = max(self._wanted, message.round)
                self._changed.notify_all()
        try_post(self._links, sender, self._state(message.look))

    def on_state(self, message: ShutdownState, sender: int, _: list[bytes]) -> None:
        """Store a member's answer to the leader, unless it answers an earlier look."""
        with self._changed:
            if message.look != self._look and message.round < CLOSING:
                return
            self._answers[sender] = message
            if self._survey is not None:
                self._changed.notify_all()

    def on_orderly_goodbye(self) -> None:
        """Begin to close: another member closes after an orderly end. The leader's message may still be coming."""
        with self._changed:
            if self._reached >= DRAINING:
                self._wanted = CLOSING
            self._changed.notify_all()

    def on_lost(self, record: Record, why: str) -> None:
        """Stop waiting for a lost member. If the world is ending and not closing yet, `end` raises WorkerLost."""
        with self._changed:
            if DRAINING <= self._reached < CLOSING and self._wanted < CLOSING:
                self._lost.append(f"{record.name}, which {why}")
            self._answers.pop(record.incarnation, None)
            self._changed.notify_all()
