"""Distributed reference counting. Pure: events in, messages and drops out.

Every value that is referenced from elsewhere has one *owner*. Every other place that refers to it is a
*user* holding one *fork*, and the owner counts forks:

- ``remote()`` makes the rref and its first fork; the call itself registers the fork with the owner.
- An owner that hands a reference out registers the new fork before it sends it.
- A user that hands one on makes a child fork. The child asks the owner (`ForkRequest`); once the owner
  knows it (`ForkConfirm`), the child tells its parent (`ChildAccept`). Until then the parent's own fork
  stays, whatever its holder does: so the owner's count cannot reach zero on the way.
- A user that lets go tells the owner (`UserDelete`), and only after it was confirmed itself.

Messages are taken to arrive exactly once or their peer to be lost (`nbdist.wire.peer` sees to that), and
in any order. Two kinds of overtaking matter. A delete may come before the call that creates its fork; it is
remembered. And a request for a child may come before the call that creates the value, from another agent:
the fork is counted, and the value is still to come, unless its creator is lost or it has been here already.
What a lost user held is dropped; what a lost owner held is dead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from nbdist.ids import GlobalId, IdSource
from nbdist.wire.messages import ChildAccept, Fork, ForkConfirm, ForkRequest, RRefState, State, UserDelete

__all__ = ["Drop", "Forks", "Instruction", "Send", "Standing"]

_REMEMBERED = 1024
"""So many dropped values are remembered, to tell a request that comes too late from one that comes too early."""

Control = ForkRequest | ForkConfirm | ChildAccept | UserDelete | RRefState


class Send(NamedTuple):
    """Do: send a control message to the agent of that incarnation."""

    to: int
    message: Control


class Drop(NamedTuple):
    """Do: forget the value of this rref; nobody refers to it."""

    rref: GlobalId


Instruction = Send | Drop


class Standing(Enum):
    """How far a user's fork has come."""

    PENDING = "pending"
    CONFIRMED = "confirmed"
    FAILED = "failed"
    DEAD = "dead"


@dataclass
class _Owned:
    handles: int = 0
    forks: dict[GlobalId, int] = field(default_factory=dict)
    uninformed: dict[int, int] = field(default_factory=dict)
    state: State | None = None
    created: bool = False
    made: bool = False


@dataclass
class _User:
    rref: GlobalId
    owner: int
    parent: int | None
    standing: Standing = Standing.PENDING
    held: bool = True
    children: set[GlobalId] = field(default_factory=set)
    state: State | None = None
    known_to_owner: bool = True


class Forks:
    """The references that one agent owns and uses."""

    def __init__(self, me: int, ids: IdSource) -> None:
        self._me = me
        self._ids = ids
        self._owned: dict[GlobalId, _Owned] = {}
        self._users: dict[GlobalId, _User] = {}
        self._children: dict[GlobalId, tuple[GlobalId, int]] = {}
        self._early: dict[GlobalId, int] = {}
        self._lost: set[int] = set()
        self._dropped: dict[GlobalId, None] = {}

    # -- what can be seen ---------------------------------------------------------------------

    @property
    def owners(self) -> int:
        """How many values are owned here and referenced from elsewhere."""
        return sum(1 for owned in list(self._owned.values()) if owned.forks)

    @property
    def forks(self) -> int:
        """How many forks other agents hold of values owned here."""
        return sum(len(owned.forks) for owned in list(self._owned.values()))

    @property
    def users(self) -> int:
        """How many forks are held here."""
        return len(self._users)

    @property
    def pending(self) -> int:
        """How many of them the owner has not confirmed, plus children that have not accepted."""
        return sum(1 for user in list(self._users.values()) if user.standing is Standing.PENDING) + len(self._children)

    def owns(self, rref: GlobalId) -> bool:
        """Whether this agent keeps the value of ``rref``."""
        return rref in self._owned

    def is_made(self, rref: GlobalId) -> bool:
        """Return whether a value owned here is there, or the error in its place."""
        owned = self._owned.get(rref)
        return owned is not None and owned.made

    def is_gone(self, rref: GlobalId) -> bool:
        """Whether a value that is not here has been here, or can no longer come to be."""
        owned = self._owned.get(rref)
        if owned is not None:
            return not owned.created and rref.incarnation in self._lost
        return rref.incarnation == self._me or rref.incarnation in self._lost or rref in self._dropped

    def is_lost(self, agent: int) -> bool:
        """Return whether `on_lost` has been called for the agent of that incarnation."""
        return agent in self._lost

    def expected_from(self, creator: int) -> list[GlobalId]:
        """The values that are referred to already, and that this agent has still to create here."""
        return [rref for rref, owned in self._owned.items() if rref.incarnation == creator and not owned.created]

    def holders_of(self, rref: GlobalId) -> set[int]:
        """Which other agents hold forks of an owned value."""
        owned = self._owned.get(rref)
        return set(owned.forks.values()) if owned is not None else set()

    def handed_out(self, to: int | None = None) -> list[tuple[GlobalId, GlobalId]]:
        """List the forks, each behind its value's id, that other agents hold of values owned here; all, or ``to``'s."""
        return [
            (rref, fork)
            for rref, owned in self._owned.items()
            for fork, holder in owned.forks.items()
            if to is None or holder == to
        ]

    def forks_of(self, rref: GlobalId) -> int:
        """How many forks of an owned value are out."""
        owned = self._owned.get(rref)
        return len(owned.forks) if owned is not None else 0

    def standing(self, fork: GlobalId) -> Standing | None:
        """How far a fork held here has come."""
        user = self._users.get(fork)
        return user.standing if user is not None else None

    def state(self, rref: GlobalId, fork: GlobalId | None) -> State | None:
        """What is known of the value."""
        if fork is None:
            owned = self._owned.get(rref)
            return owned.state if owned is not None else None
        user = self._users.get(fork)
        return user.state if user is not None else None

    def held(self) -> list[GlobalId]:
        """The forks that objects here still hold."""
        return [fork for fork, user in self._users.items() if user.held]

    # -- the owner ----------------------------------------------------------------------------

    def retain(self, rref: GlobalId) -> None:
        """One more object here refers to the value."""
        self._owned.setdefault(rref, _Owned()).handles += 1

    def release_owned(self, rref: GlobalId) -> list[Instruction]:
        """One less."""
        owned = self._owned.get(rref)
        if owned is None:
            return []
        owned.handles -= 1
        return self._drop_if_free(rref, owned)

    def create(self, rref: GlobalId, fork: GlobalId, creator: int) -> None:
        """A remote call came that makes ``rref`` here; the running call itself holds a handle."""
        self.retain(rref)
        self._owned[rref].created = True
        if self._early.pop(fork, None) is None:
            self._owned[rref].forks[fork] = creator

    def uncreate(self, rref: GlobalId, fork: GlobalId) -> list[Instruction]:
        """The call that made ``rref`` could not run yet and will be repeated: as if it had not come."""
        owned = self._owned[rref]
        owned.handles -= 1
        owned.created = False
        owned.forks.pop(fork, None)
        return self._drop_if_free(rref, owned)

    def abandon(self, rref: GlobalId, fork: GlobalId) -> None:
        """Note that the call which was to make ``rref`` will not be repeated: the value never comes.

        Others may refer to the value already. They keep their forks until they release them.
        """
        self._early.pop(fork, None)
        owned = self._owned.get(rref)
        if owned is not None:
            owned.created = True  # nobody needs to wait for the call any more
        else:
            self._remember_dropped(rref)

    def set_state(self, rref: GlobalId, state: State) -> list[Instruction]:
        """The value has come to be: tell those that were confirmed before it did."""
        owned = self._owned.get(rref)
        if owned is None:
            return []
        owned.state = state
        told, owned.uninformed = owned.uninformed, {}
        return [Send(holder, RRefState(rref, state)) for holder in told]

    def make(self, rref: GlobalId) -> None:
        """Note that the value is there, or the error in its place."""
        owned = self._owned.get(rref)
        if owned is not None:
            owned.made = True

    def on_fork_request(self, message: ForkRequest, sender: int) -> list[Instruction]:
        """A user asks to be counted."""
        if self.is_gone(message.rref):
            return [Send(sender, ForkConfirm(message.rref, message.fork, gone=True))]
        owned = self._owned.setdefault(message.rref, _Owned())
        owned.forks[message.fork] = sender
        self._remember_uninformed(owned, sender)
        return [Send(sender, ForkConfirm(message.rref, message.fork, owned.state))]

    def on_user_delete(self, message: UserDelete, sender: int) -> list[Instruction]:
        """A user has let go."""
        owned = self._owned.get(message.rref)
        if owned is None or message.fork not in owned.forks:
            if message.rref not in self._dropped and (owned is None or not owned.created):
                self._early[message.fork] = sender
            return []
        del owned.forks[message.fork]
        return self._drop_if_free(message.rref, owned)

    @staticmethod
    def _remember_uninformed(owned: _Owned, holder: int) -> None:
        if owned.state is None:
            owned.uninformed[holder] = owned.uninformed.get(holder, 0) + 1

    def _drop_if_free(self, rref: GlobalId, owned: _Owned) -> list[Instruction]:
        if owned.handles > 0 or owned.forks:
            return []
        del self._owned[rref]
        if owned.created and rref.incarnation not in self._lost:
            self._remember_dropped(rref)
        return [Drop(rref)]

    def _remember_dropped(self, rref: GlobalId) -> None:
        self._dropped[rref] = None
        if len(self._dropped) > _REMEMBERED:
            del self._dropped[next(iter(self._dropped))]

    # -- the user -----------------------------------------------------------------------------

    def begin(self, rref: GlobalId, fork: GlobalId, owner: int) -> None:
        """This agent calls ``remote()``: the reply will confirm the fork."""
        self._users[fork] = _User(rref, owner, parent=None)

    def confirm(self, fork: GlobalId, state: State | None) -> list[Instruction]:
        """The reply to ``remote()`` has come."""
        return self._settle(fork, Standing.CONFIRMED, state)

    def fail(self, fork: GlobalId, *, may_exist: bool) -> list[Instruction]:
        """``remote()`` failed; where the call may still arrive, the owner must hear of the end of the fork."""
        user = self._users.get(fork)
        if user is not None:
            user.known_to_owner = may_exist
        return self._settle(fork, Standing.FAILED, None)

    def _settle(self, fork: GlobalId, standing: Standing, state: State | None) -> list[Instruction]:
        user = self._users.get(fork)
        if user is None or user.standing not in (Standing.PENDING, Standing.FAILED):
            return []
        user.standing = standing
        user.state = state or user.state
        return self._delete_if_free(fork, user)

    def on_fork_confirm(self, message: ForkConfirm) -> list[Instruction]:
        """The owner counts a fork held here: its parent may let go."""
        user = self._users.get(message.fork)
        if user is None or user.standing is not Standing.PENDING:
            return []
        instructions: list[Instruction] = []
        if user.parent is not None:
            instructions.append(Send(user.parent, ChildAccept(message.fork)))
        if message.gone:
            user.standing = Standing.DEAD
            if not user.held and not user.children:
                del self._users[message.fork]
            return instructions
        return instructions + self._settle(message.fork, Standing.CONFIRMED, message.state)

    def on_child_accept(self, message: ChildAccept) -> list[Instruction]:
        """A child that was handed out is counted."""
        return self._end_child(message.fork)

    def on_state(self, message: RRefState) -> list[GlobalId]:
        """The value came to be; the forks here that now know what it is."""
        told = [fork for fork, user in self._users.items() if user.rref == message.rref]
        for fork in told:
            self._users[fork].state = message.state
        return told

    def release(self, fork: GlobalId) -> list[Instruction]:
        """The object here that held ``fork`` is gone."""
        user = self._users.get(fork)
        if user is None:
            return []
        user.held = False
        return self._delete_if_free(fork, user)

    def _delete_if_free(self, fork: GlobalId, user: _User) -> list[Instruction]:
        if user.held or user.children or user.standing is Standing.PENDING:
            return []
        del self._users[fork]
        if user.standing is Standing.DEAD or not user.known_to_owner:
            return []
        return [Send(user.owner, UserDelete(user.rref, fork))]

    def _end_child(self, child: GlobalId) -> list[Instruction]:
        parent, _ = self._children.pop(child, (None, 0))
        user = self._users.get(parent) if parent is not None else None
        if user is None or parent is None:
            return []
        user.children.discard(child)
        return self._delete_if_free(parent, user)

    # -- handing over -------------------------------------------------------------------------

    def hand_over(self, rref: GlobalId, fork: GlobalId | None, to: int, child: GlobalId | None = None) -> Fork:
        """Describe the reference for a message to ``to``; ``fork`` is None where this agent owns the value.

        Whoever sends the message keeps the reference alive until it has arrived; what must live longer than
        that is seen to here. ``child`` is the id of the new fork; where it is None, one is made.
        """
        child = child or self._ids.next()
        if fork is None:
            owned = self._owned[rref]
            if to != self._me:
                owned.forks[child] = to
                self._remember_uninformed(owned, to)
            return Fork(rref, child, self._me, self._me, owned.state)
        user = self._users[fork]
        if to != user.owner:
            self._children[child] = (fork, to)  # first: `take_back` looks here, also after Ctrl-C
            user.children.add(child)
        return Fork(rref, child, user.owner, self._me, user.state)

    def take_back(self, handed: Fork, to: int) -> list[Instruction]:
        """The message with that fork was never sent; nothing happens where the fork was never made."""
        if handed.owner != self._me:
            return self._end_child(handed.fork)
        owned = self._owned.get(handed.rref)
        if owned is None or to == self._me:
            return []
        owned.forks.pop(handed.fork, None)
        return self._drop_if_free(handed.rref, owned)

    def accept(self, handed: Fork) -> list[Instruction]:
        """A message with that fork has come; an object here is going to hold it."""
        if handed.owner == self._me:
            self.retain(handed.rref)
            return []
        if handed.owner in self._lost:
            self._users[handed.fork] = _User(
                handed.rref, handed.owner, handed.parent, Standing.DEAD, state=handed.state
            )
            return [Send(handed.parent, ChildAccept(handed.fork))]
        if handed.parent == handed.owner:
            self._users[handed.fork] = _User(
                handed.rref, handed.owner, handed.parent, Standing.CONFIRMED, state=handed.state
            )
            return []
        self._users[handed.fork] = _User(handed.rref, handed.owner, handed.parent, state=handed.state)
        return [Send(handed.owner, ForkRequest(handed.rref, handed.fork))]

    # -- death --------------------------------------------------------------------------------

    def on_lost(self, incarnation: int) -> list[Instruction]:
        """An agent is gone, and with it what it held and what it owned."""
        instructions: list[Instruction] = []
        self._lost.add(incarnation)
        for rref in [rref for rref in self._dropped if rref.incarnation == incarnation]:
            del self._dropped[rref]
        for rref, owned in list(self._owned.items()):
            owned.uninformed.pop(incarnation, None)
            gone = [fork for fork, holder in owned.forks.items() if holder == incarnation]
            for fork in gone:
                del owned.forks[fork]
            if gone:
                instructions += self._drop_if_free(rref, owned)
        for fork, holder in list(self._early.items()):
            if holder == incarnation:
                del self._early[fork]
        for child, (_, holder) in list(self._children.items()):
            if holder == incarnation:
                instructions += self._end_child(child)
        for fork, user in list(self._users.items()):
            if user.owner == incarnation:
                if user.standing is Standing.PENDING and user.parent is not None:
                    instructions.append(Send(user.parent, ChildAccept(fork)))  # it need not wait for us
                user.standing = Standing.DEAD
                for child in user.children:  # they will never be confirmed
                    self._children.pop(child, None)
                user.children.clear()
                instructions += self._delete_if_free(fork, user)
        return instructions
