"""Decides the next step of the calls and references of one agent. Pure: takes an event and returns what to do.

The life of a call. Events are in brackets, the stages of `nbdist.rpc.core.arrivals.ArrivalStage` in capitals::

    caller                                       callee
    ------                                       ------
    [add]       awaited ------ Call -----------> [came]   its forks are not confirmed? ---> CONFIRMING
                                                    |         [confirmed] <--------------------+
                                                 the value it works on is not known? -----> SEEKING
                                                    |         [came], of the call that makes it <--+
                                                 that value does not exist yet? ----------> AWAITING
                                                    |         [made] <-------------------------+
                                                 READY: the executor runs it
                                                    |
    [answered]  repeated <---- Reply ----------- [refused], if it lacks a definition; then [came] again, or [abandoned]
                                                    |
    [answered]  settled <----- Reply ----------- [answered]: forgotten; the values that it held are released

The events on the left are methods of `PendingCalls`. Its `due` (the call has timed out) and `pop` (the user gave up, or
the callee is lost) end a call without an answer. The events on the right are methods of `Exchange`. `Exchange.lost`
ends the waiting calls that a lost agent has made. It also ends the wait of calls for a value that the lost agent was to
create; these calls then run, and fail.

`nbdist.rpc.core.forks.Forks` counts references; its head draws their life. References and calls meet here in
three places: a call brings forks that must be confirmed, a call works on a value (its target) that must exist, and a
call makes a value (its result).

Three modules have the state: `pending` has the calls that this agent has made, `arrivals` the calls that
have arrived here, `forks` the references.

Threads: the caller of a method holds `Exchange.lock`, and releases it before it runs, encodes or sends anything. This
is the only lock around the state of calls and references; `nbdist.rpc.agent` has the order of all locks. Some methods
need no lock, because each is one operation on a dict: `Exchange.came_alone` and `doing`, and `answered`, `pop`, `get`
and `all` of `PendingCalls`. A finaliser may run at any moment in any thread, even while that thread holds the lock. So
nbdist's own finalisers never call these methods: the end of a reference is only noted in a queue (`nbdist.holds`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from nbdist.finalisers import guard
from nbdist.ids import GlobalId, IdSource
from nbdist.rpc.core.arrivals import Arrival, ArrivalStage
from nbdist.rpc.core.forks import Forks, ForkStanding, Instruction
from nbdist.rpc.core.pending import PendingCalls
from nbdist.wire.messages import Fork


class Exchange:
    """The calls and references of one agent: what each waits for. Callers hold `lock`, unless a method needs none.

    Without the lock, the caller passes calls that a method returns to `References.resume`, or runs them, and
    instructions to `References.perform`.
    """

    def __init__(self, me: int, ids: IdSource) -> None:
        # Guards the agent's calls, references and values, and the table of running threads (`Stopping`). Reentrant,
        # because a user's ``__del__`` may run in a thread that holds it, and make a call.
        self.lock = threading.RLock()
        self.is_deciding = guard(self.lock)
        """Returns whether the calling thread holds the lock: then Python runs a finaliser in the middle of an event."""
        self.calls = PendingCalls(self.lock)
        self.forks = Forks(me, ids)
        self.served = 0
        """The number of calls that have been answered or refused."""
        self._me = me
        self._numbers = itertools.count()
        # The calls that are not answered, by the number that this agent gave them.
        self._arrivals: dict[int, Arrival] = {}
        # The calls in stage CONFIRMING, by each fork that they wait for.
        self._by_fork: dict[GlobalId, list[Arrival]] = {}
        # The calls in the stages SEEKING and AWAITING, by the value that they wait for.
        self._by_target: dict[GlobalId, list[Arrival]] = {}
        # The results of refused calls that may be repeated, by the caller's incarnation and the caller's number for the
        # call.
        self._refused: dict[tuple[int, int], Fork] = {}

    # -- inspecting ---------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """The number of calls that have arrived and are not answered. Needs no lock."""
        return len(self._arrivals)

    def awaited(self) -> set[int]:
        """Return the agents, by incarnation, for whose answers or confirmations this agent waits. Takes the lock."""
        callees = {call.to for call in self.calls.all()}
        with self.lock:
            owners = (self.forks.owner(fork) for fork in list(self._by_fork))
            return callees.union(owner for owner in owners if owner is not None)

    def doing(self) -> list[Arrival]:
        """List the calls that have arrived and are not answered, the oldest first. Needs no lock."""
        return sorted(self._arrivals.copy().values(), key=lambda arrival: arrival.since)

    # -- a call arrives -----------------------------------------------------------------------

    def came_alone(self, arrival: Arrival) -> None:
        """Register a call that refers to no values, so it can run. Needs no lock; `answered` must follow."""
        arrival.number = number = next(self._numbers)
        self._arrivals[number] = arrival  # one operation for the interpreter

    def came(self, arrival: Arrival, forks: Sequence[GlobalId]) -> list[Arrival]:
        """Register a call that brought ``forks``, and count the value that it makes; return calls that can continue."""
        self.came_alone(arrival)
        self._refused.pop((arrival.sender, arrival.call.id), None)  # this may be the repeat of a refused call
        going_on: list[Arrival] = []
        result = arrival.call.result
        if result is not None:
            if arrival.sender == self._me:
                self.forks.retain(result.rref)
            else:
                self.forks.create(result.rref, result.fork, arrival.sender)
            if result.rref in self._by_target:  # calls that came earlier seek this value
                going_on = self._look_again(result.rref)
        if forks:
            arrival.unconfirmed = frozenset(fork for fork in forks if self.forks.standing(fork) is ForkStanding.PENDING)
            for fork in arrival.unconfirmed:
                self._by_fork.setdefault(fork, []).append(arrival)
        # The call itself is one of them unless it must wait.
        if self._advance(arrival):
            going_on.append(arrival)
        return going_on

    def _advance(self, arrival: Arrival) -> bool:
        """Move a call to the stage in which it has to wait, or to READY; return whether it is READY."""
        forks, target = self.forks, arrival.call.target
        if arrival.unconfirmed:
            arrival.stage = ArrivalStage.CONFIRMING
            return False
        if forks.is_lost(arrival.sender):
            arrival.is_heard = False  # READY all the same: it ends without running
        # A call whose value is gone becomes READY: it runs, and fails.
        elif target is not None and not arrival.holds_target and not forks.is_gone(target):
            if not forks.owns(target):
                return self._wait(arrival, target, ArrivalStage.SEEKING)
            forks.retain(target)
            arrival.holds_target = True
        if arrival.is_heard and target is not None and arrival.holds_target and not forks.is_made(target):
            return self._wait(arrival, target, ArrivalStage.AWAITING)
        arrival.stage = ArrivalStage.READY
        return True

    def _wait(self, arrival: Arrival, target: GlobalId, stage: ArrivalStage) -> bool:
        arrival.stage = stage
        self._by_target.setdefault(target, []).append(arrival)
        return False  # the call is not READY

    def _look_again(self, target: GlobalId) -> list[Arrival]:
        """Return the calls that waited for a value and can continue. The others wait for the next thing they need."""
        return [arrival for arrival in self._by_target.pop(target) if self._advance(arrival)]

    # -- the events that calls wait for -------------------------------------------------------

    def confirmed(self, fork: GlobalId) -> list[Arrival]:
        """Record that a fork held here is confirmed by its owner, or is dead; return the calls that can continue."""
        going_on: list[Arrival] = []
        for arrival in self._by_fork.pop(fork, ()):
            arrival.unconfirmed -= {fork}
            if self._advance(arrival):
                going_on.append(arrival)
        return going_on

    def made(self, rref: GlobalId) -> list[Arrival]:
        """Record that a value owned here exists, or the error in its place; return the calls that can continue."""
        self.forks.make(rref)
        return self._look_again(rref) if rref in self._by_target else []

    # -- a call ends --------------------------------------------------------------------------

    def answered(self, arrival: Arrival) -> list[Instruction]:
        """Forget a call that has its answer; release the values that it worked on and made. Called once for a call."""
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
        """Forget a call that has not run, for lack of a definition of ``__main__``. Its caller may repeat it."""
        result = arrival.call.result
        arrival.makes_result = False
        instructions = self.answered(arrival)
        if result is not None:
            # The value is then in the same state as before the call came, until `came` or `abandoned`
            # (test_a_refused_creation_is_as_if_it_had_not_come).
            instructions += self.forks.uncreate(result.rref, result.fork)
            self._refused[arrival.sender, arrival.call.id] = result
        return instructions

    def abandoned(self, caller: int, id: int) -> tuple[GlobalId | None, list[Arrival]]:
        """Record that a refused call will not be repeated; return the value it never makes, and calls to resume."""
        result = self._refused.pop((caller, id), None)
        if result is None:
            return None, []
        self.forks.abandon(result.rref, result.fork)
        # The caller makes the value fail (`References.settle`).
        return result.rref, self._look_again(result.rref) if result.rref in self._by_target else []

    # -- losing members -----------------------------------------------------------------------

    def lost(self, agent: int) -> tuple[list[Instruction], list[Arrival]]:
        """Record that an agent is lost, and drop its forks; return the calls that can continue or must end."""
        instructions = self.forks.on_lost(agent)
        self._refused = {key: result for key, result in self._refused.items() if key[0] != agent}
        waiting = [arrival for arrival in self._arrivals.copy().values() if arrival.stage is not ArrivalStage.READY]
        # The loss may have ended any wait, so every waiting call is looked at again.
        self._by_fork.clear()
        self._by_target.clear()
        for arrival in waiting:
            pending = [fork for fork in arrival.unconfirmed if self.forks.standing(fork) is ForkStanding.PENDING]
            arrival.unconfirmed = frozenset(pending if arrival.sender != agent else ())
            for fork in arrival.unconfirmed:
                self._by_fork.setdefault(fork, []).append(arrival)
        # A call that the lost agent has made must end: its `Arrival.is_heard` is False. Another one may have waited for
        # a value that the lost agent was to create (`Forks.expected_from`).
        return instructions, [arrival for arrival in waiting if self._advance(arrival)]

    def clear(self) -> None:
        """Forget all calls that wait, and all refused ones: the agent has ended, so they never run."""
        self._by_fork.clear()
        self._by_target.clear()
        self._refused.clear()
