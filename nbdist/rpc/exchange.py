"""Decides how the calls and the references of one agent go on. Pure: events in, what can be done out.

The life of a call. Events are in brackets, the stages of `nbdist.rpc.arrivals.Stage` in capitals::

    caller                                       callee
    ------                                       ------
    [add]       awaited ------ Call -----------> [came]   its forks are not confirmed? ---> CONFIRMING
                                                    |         [confirmed] <--------------------+
                                                 the value it works on is not known? -----> SEEKING
                                                    |         [came], of the call that makes it <--+
                                                 that value is not there? ----------------> AWAITING
                                                    |         [made] <-------------------------+
                                                 READY: the driver runs it
                                                    |
    [answered]  repeated <---- Reply ----------- [refused], if it lacks a definition; then [came] again, or [abandoned]
                                                    |
    [answered]  settled <----- Reply ----------- [answered]: forgotten; what it held is released

The caller's events are methods of `PendingCalls`; its `due` (the time is up) and `pop` (given up, or the callee is
lost) end a call without an answer. The callee's are methods of `Exchange`. `Exchange.lost` ends the calls of a lost
agent that wait here, and lets those go on that wait for a value which that agent was to create.

A reference is counted by `nbdist.rpc.forks.Forks`, whose head tells its life. Here it meets calls in three places: a
call brings forks that must be confirmed, a call works on a value (its target) that must be there, and a call makes a
value (its result).

Each of the three nouns has a file: `calls` what this agent has asked, `arrivals` what it was asked, `forks`
references.

Threads: whoever sends an event here holds `Exchange.lock`, and lets go of it before it runs, encodes or sends
anything. It is the only lock around the state of calls and references; `nbdist.rpc.agent` has the order of all locks.
These need no lock, because each is one operation on a dict: `Exchange.came_alone`, and `answered`, `pop`, `get` and
`all` of `PendingCalls`. A finaliser may run at any moment in any thread, also while that thread holds the lock. So
nbdist has no finalisers of its own that send events: the end of a reference is only noted (`nbdist.holds`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from nbdist.finalisers import guard
from nbdist.ids import GlobalId, IdSource
from nbdist.rpc.arrivals import Arrival, Stage
from nbdist.rpc.calls import PendingCalls
from nbdist.rpc.forks import Forks, Instruction, Standing
from nbdist.wire.messages import Fork

__all__ = ["Exchange"]


class Exchange:
    """The calls and references of one agent."""

    def __init__(self, me: int, ids: IdSource) -> None:
        self.lock = threading.RLock()
        """Guards the calls, references, values and running threads of the agent.

        Reentrant, because a user's ``__del__`` may run in a thread that holds it, and make a call.
        """
        self.is_deciding = guard(self.lock)
        """Returns whether the calling thread holds the lock; so it does where Python has run a finaliser meanwhile."""
        self.calls = PendingCalls(self.lock)
        self.forks = Forks(me, ids)
        self.served = 0
        """How many calls have been answered."""
        self._me = me
        self._numbers = itertools.count()
        self._arrivals: dict[int, Arrival] = {}
        self._by_fork: dict[GlobalId, list[Arrival]] = {}
        """The calls in stage CONFIRMING, by each fork that they wait for."""
        self._by_target: dict[GlobalId, list[Arrival]] = {}
        """The calls in the stages SEEKING and AWAITING."""
        self._refused: dict[tuple[int, int], Fork] = {}
        """The value that a call was to make which was refused for lack of a definition.

        By the caller's incarnation and the caller's number for the call.
        """

    # -- what can be seen ---------------------------------------------------------------------

    @property
    def active(self) -> int:
        """How many calls have come and are not answered."""
        return len(self._arrivals)

    def doing(self) -> list[Arrival]:
        """List the calls that have come and are not answered, the oldest first. Needs no lock."""
        return sorted(self._arrivals.copy().values(), key=lambda arrival: arrival.since)

    # -- a call has come ----------------------------------------------------------------------

    def came_alone(self, arrival: Arrival) -> None:
        """Take a call that has nothing to wait for: no forks, no target, no result. Needs no lock."""
        arrival.number = number = next(self._numbers)
        self._arrivals[number] = arrival

    def came(self, arrival: Arrival, forks: Sequence[GlobalId]) -> list[Arrival]:
        """Take a call that brought ``forks``, and count what it makes; return the calls that can go on.

        These are the call itself, unless it has to wait, and those that waited for what it makes.
        """
        self.came_alone(arrival)
        self._refused.pop((arrival.sender, arrival.call.id), None)
        going_on: list[Arrival] = []
        result = arrival.call.result
        if result is not None:
            if arrival.sender == self._me:
                self.forks.retain(result.rref)
            else:
                self.forks.create(result.rref, result.fork, arrival.sender)
            if result.rref in self._by_target:
                going_on = self._look_again(result.rref)
        if forks:
            arrival.unconfirmed = frozenset(fork for fork in forks if self.forks.standing(fork) is Standing.PENDING)
            for fork in arrival.unconfirmed:
                self._by_fork.setdefault(fork, []).append(arrival)
        if self._advance(arrival):
            going_on.append(arrival)
        return going_on

    def _advance(self, arrival: Arrival) -> bool:
        """Lead a call to the stage where it waits, or to READY; return whether that is where it is."""
        forks, target = self.forks, arrival.call.target
        if arrival.unconfirmed:
            arrival.stage = Stage.CONFIRMING
            return False
        if forks.is_lost(arrival.sender):
            arrival.is_heard = False
        elif target is not None and not arrival.holds_target and not forks.is_gone(target):
            if not forks.owns(target):
                return self._wait(arrival, target, Stage.SEEKING)
            forks.retain(target)
            arrival.holds_target = True
        if arrival.is_heard and target is not None and arrival.holds_target and not forks.is_made(target):
            return self._wait(arrival, target, Stage.AWAITING)
        arrival.stage = Stage.READY
        return True

    def _wait(self, arrival: Arrival, target: GlobalId, stage: Stage) -> bool:
        arrival.stage = stage
        self._by_target.setdefault(target, []).append(arrival)
        return False

    def _look_again(self, target: GlobalId) -> list[Arrival]:
        return [arrival for arrival in self._by_target.pop(target) if self._advance(arrival)]

    # -- what it waited for -------------------------------------------------------------------

    def confirmed(self, fork: GlobalId) -> list[Arrival]:
        """Note that a fork held here is no longer pending; return the calls that can go on."""
        going_on: list[Arrival] = []
        for arrival in self._by_fork.pop(fork, ()):
            arrival.unconfirmed -= {fork}
            if self._advance(arrival):
                going_on.append(arrival)
        return going_on

    def made(self, rref: GlobalId) -> list[Arrival]:
        """Note that a value owned here is there, or the error in its place; return the calls that can go on."""
        self.forks.make(rref)
        return self._look_again(rref) if rref in self._by_target else []

    # -- how it ends --------------------------------------------------------------------------

    def answered(self, arrival: Arrival) -> list[Instruction]:
        """Forget a call that has its answer, and release the value that it worked on and the one that it made."""
        call, forks = arrival.call, self.forks
        del self._arrivals[arrival.number]
        self.served += 1
        instructions: list[Instruction] = []
        if call.result is not None and arrival.makes_result:
            instructions = forks.release_owned(call.result.rref)
        if call.target is not None and arrival.holds_target:
            arrival.holds_target = False
            instructions = instructions + forks.release_owned(call.target)
        return instructions

    def refused(self, arrival: Arrival) -> list[Instruction]:
        """Forget a call that has not run, for lack of a definition; its caller may ask again.

        What it was to make is as if it had not come, until `came` or `abandoned`.
        """
        result = arrival.call.result
        arrival.makes_result = False
        instructions = self.answered(arrival)
        if result is not None:
            instructions += self.forks.uncreate(result.rref, result.fork)
            self._refused[arrival.sender, arrival.call.id] = result
        return instructions

    def abandoned(self, caller: int, id: int) -> tuple[GlobalId | None, list[Arrival]]:
        """Note that a call which was refused will not be asked again.

        Returns the value that it will not make, if that was its purpose, and the calls that can go on.
        """
        result = self._refused.pop((caller, id), None)
        if result is None:
            return None, []
        self.forks.abandon(result.rref, result.fork)
        return result.rref, self._look_again(result.rref) if result.rref in self._by_target else []

    # -- death --------------------------------------------------------------------------------

    def lost(self, agent: int) -> tuple[list[Instruction], list[Arrival]]:
        """Note that an agent is gone, with what it held and owned; return the calls that can go on or must end.

        `Arrival.is_heard` tells the two apart. What that agent was to create here is in `Forks.expected_from`.
        """
        instructions = self.forks.on_lost(agent)
        for key in [key for key in self._refused if key[0] == agent]:
            del self._refused[key]
        waiting = [arrival for arrival in self._arrivals.copy().values() if arrival.stage is not Stage.READY]
        self._by_fork.clear()
        self._by_target.clear()
        going_on: list[Arrival] = []
        for arrival in waiting:
            pending = [fork for fork in arrival.unconfirmed if self.forks.standing(fork) is Standing.PENDING]
            arrival.unconfirmed = frozenset(pending if arrival.sender != agent else ())
            for fork in arrival.unconfirmed:
                self._by_fork.setdefault(fork, []).append(arrival)
            if self._advance(arrival):
                going_on.append(arrival)
        return instructions, going_on

    def clear(self) -> None:
        """Forget what waits: the agent has ended."""
        self._by_fork.clear()
        self._by_target.clear()
        self._refused.clear()
