"""When a round of ending the world is over, as its leader decides.

Members answer at different moments, so the leader looks twice. A *look* is one answer of every member. The leader asks
for the second look after the last answer of the first look has arrived. The round is over if in both looks no member
had anything under way, and no member sent a message that must arrive between its two answers. *Under way* are calls
that run or have no answer, messages that must arrive and are not acknowledged, and in round 2 forks that are not
confirmed. This is why two looks are enough: what a member had sent before its first answer had arrived, and it sent
nothing after that. So when the last answer of the first look arrived, nothing ran and no message was on its way.
"""

from __future__ import annotations

from nbdist.wire.messages import ShutdownState

RUNNING, DRAINING, RELEASING, CLOSING = range(4)
"""The rounds; `nbdist.rpc.world.shutdown` draws them."""


class Survey:
    """Decides when a round of ending the world is over, from the members' answers. Pure.

    Only the leader, the living member with the lowest id, has one. A look is one answer of every member.
    """

    def __init__(self, members: set[int]) -> None:
        self.members = members
        self.round = DRAINING
        self._states: dict[int, ShutdownState] = {}
        # The number of messages that the members had sent by the look before; None unless all were quiet in it.
        self._before: int | None = None

    def missing(self) -> set[int]:
        """Return the members that have not reached this round or have not answered yet, by their incarnations."""
        return {
            member for member in self.members if (state := self._states.get(member)) is None or state.round < self.round
        }

    def busy(self) -> set[int]:
        """Return the members that have calls or messages under way; all members, if none has."""
        return {member for member in self.members if self._states[member].active} or set(self.members)

    def forget(self, member: int) -> None:
        """Remove a member that is gone. The round then needs two more looks."""
        self.members.discard(member)
        self._states.pop(member, None)
        self._before = None  # the round then needs two more looks

    def look(self, states: dict[int, ShutdownState]) -> bool:
        """Take a look, one answer of every member; return whether the round is over. If it is, begin the next round."""
        self._states.update(states)
        if self.missing():
            self._before = None
            return False
        current = [self._states[member] for member in self.members]
        sent = sum(state.sent for state in current)
        quiet = not any(state.active for state in current)
        is_over = quiet and self._before == sent
        self._before = sent if quiet and not is_over else None
        if is_over:
            self.round += 1
        return is_over
