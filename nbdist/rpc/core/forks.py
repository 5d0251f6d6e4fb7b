"""Distributed reference counting. Pure: an event goes in, messages to send and values to drop come out.

Each value that other agents refer to has one *owner*. An agent that refers to it is a *user*, and each hand-over of the
reference to a user is a *fork*. The owner counts forks. It drops the value when no fork is left, and no object or call
of the owner itself refers to the value.

- ``remote()`` makes the reference and its first fork; the call itself registers the fork with the owner.
- An owner that gives a reference to another agent counts the new fork before it sends it.
- A user that passes a reference on makes a child fork. The receiver asks the owner to count the child (`ForkRequest`).
  Once the owner has confirmed it (`ForkConfirm`), the receiver tells the agent from which the reference came
  (`ChildAccept`). Until then the parent fork stays, even if it is released. So the owner's count cannot reach zero
  while the child is on its way.
- A user that releases a reference tells the owner (`UserDelete`), but not before its own fork is confirmed.

The life of a user's fork:

====================================  =================  ==================
event                                 standing before    standing after
====================================  =================  ==================
`begin`: ``remote()`` is called                          PENDING
`accept`, from another user                              PENDING
`accept`, from the owner                                 CONFIRMED
`accept`, owner lost before                              DEAD
`confirm`: the reply has come         PENDING, FAILED    CONFIRMED
`fail`: ``remote()`` failed           PENDING            FAILED
`on_fork_confirm`                     PENDING            CONFIRMED
`on_fork_confirm`, value gone         PENDING            DEAD
`on_lost`, of the owner               any                DEAD
====================================  =================  ==================

A fork that has been released (`release`), has no children and is not PENDING is forgotten. The owner is then sent a
`UserDelete`, unless the fork is DEAD or the owner never heard of it.

This module assumes that every message arrives exactly once, in any order, unless its receiver is lost
(`nbdist.wire.peer`). Two messages may arrive too early:

- A `UserDelete` may arrive before the call that creates its fork. The owner remembers it.
- A `ForkRequest` may arrive before the call that creates the value, because another agent sends that call. The owner
  counts the fork and expects the value, unless the agent that was to create the value is lost, or the value was here
  and is dropped.

When a user is lost, its forks are dropped. When an owner is lost, references to its values are dead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from nbdist.ids import GlobalId, IdSource
from nbdist.wire.messages import ChildAccept, Fork, ForkConfirm, ForkRequest, RRefState, State, UserDelete

_DROPPED_VALUES_REMEMBERED = 1024  # so that a late message about one is not taken for an early one

Control = ForkRequest | ForkConfirm | ChildAccept | UserDelete | RRefState


class Send(NamedTuple):
    """Instruction: send a control message to the agent with the incarnation ``to``."""

    to: int
    message: Control


class Drop(NamedTuple):
    """Instruction: forget the value with the id ``rref``; nothing refers to it any more."""

    rref: GlobalId


Instruction = Send | Drop


class ForkStanding(Enum):
    """Names how far a user's fork has come. The table at the head of this module has the transitions."""

    PENDING = "pending"
    CONFIRMED = "confirmed"
    FAILED = "failed"
    DEAD = "dead"


@dataclass
class _Owned:
    """A value that this agent owns or is about to own."""

    handles: int = 0  # the objects and calls of this agent that refer to the value
    forks: dict[GlobalId, int] = field(default_factory=dict)  # held by other agents, each with its holder's incarnation
    # The agents that must be sent the value's description once it exists, and how many forks each got before.
    uninformed: dict[int, int] = field(default_factory=dict)
    state: State | None = None  # the description of the value, once it exists
    created: bool = False  # True once another agent's call to make the value has arrived, or is known never to arrive
    made: bool = False  # True once the value exists, or the error in its place


@dataclass
class _User:
    """A fork that this agent holds of another agent's value."""

    rref: GlobalId
    owner: int  # the incarnation of the value's owner
    parent: int | None  # the incarnation of the agent from which the fork came; None after ``remote()``
    standing: ForkStanding = ForkStanding.PENDING
    held: bool = True  # True while objects or messages here refer to the fork
    children: set[GlobalId] = field(default_factory=set)  # passed on and not accepted yet: they keep this fork
    state: State | None = None  # the description of the value, once it is known here
    known_to_owner: bool = True  # False if the owner certainly never heard of the fork: no `UserDelete` then


class Forks:
    """The references that one agent owns and uses. Not thread-safe: the caller holds `Exchange.lock`.

    Methods that return instructions change only the counts. The caller passes the instructions, often none, to
    `References.perform`, without the lock; that sends the messages and drops the values. On the user's side, an event
    about a fork that is not held here (any more) changes nothing.
    """

    def __init__(self, me: int, ids: IdSource) -> None:
        self._me = me
        self._ids = ids
        self.owned: dict[GlobalId, _Owned] = {}
        """The values that this agent owns, or will own once the calls that make them have arrived."""
        self.users: dict[GlobalId, _User] = {}
        """The forks that this agent holds, of values of other agents."""
        # The parent fork and the receiver of each fork that was passed on and is not accepted yet.
        self._children: dict[GlobalId, tuple[GlobalId, int]] = {}
        self.early: dict[GlobalId, int] = {}
        """The forks whose delete arrived before the call that creates them, each with its holder's incarnation."""
        self._lost: set[int] = set()  # the incarnations of lost agents
        # The values that were dropped lately, or will never be made, the oldest first.
        self._dropped: dict[GlobalId, None] = {}

    # -- inspecting ---------------------------------------------------------------------------

    @property
    def owners(self) -> int:
        """The number of values that are owned here and of which other agents hold forks."""
        return sum(1 for owned in list(self.owned.values()) if owned.forks)

    @property
    def forks(self) -> int:
        """The number of forks that other agents hold of values owned here."""
        return sum(len(owned.forks) for owned in list(self.owned.values()))

    @property
    def pending(self) -> int:
        """The number of pending forks held here, plus the number of forks passed on from here and not accepted yet."""
        standings = [user.standing for user in list(self.users.values())]
        return standings.count(ForkStanding.PENDING) + len(self._children)

    def owner(self, fork: GlobalId) -> int | None:
        """Return the incarnation of the owner of a value, given a fork that is held here; None for any other fork."""
        user = self.users.get(fork)
        return user.owner if user is not None else None

    def owns(self, rref: GlobalId) -> bool:
        """Return whether this agent owns the value, or is about to own it."""
        return rref in self.owned

    def is_made(self, rref: GlobalId) -> bool:
        """Return whether a value owned here exists, or the error in its place."""
        owned = self.owned.get(rref)
        return owned is not None and owned.made

    def is_gone(self, rref: GlobalId) -> bool:
        """Return whether a value that this agent should own was dropped, or can never be made any more."""
        owned = self.owned.get(rref)
        if owned is not None:
            # Something refers to the value: the call that makes it may still come, unless its maker is lost.
            return not owned.created and rref.incarnation in self._lost
        return rref.incarnation == self._me or rref.incarnation in self._lost or rref in self._dropped

    def is_lost(self, agent: int) -> bool:
        """Return whether `on_lost` has been called for the agent of that incarnation."""
        return agent in self._lost

    def expected_from(self, creator: int) -> list[GlobalId]:
        """List the values that agents refer to already and that agent ``creator`` has not yet created here."""
        return [rref for rref, owned in self.owned.items() if rref.incarnation == creator and not owned.created]

    def holders_of(self, rref: GlobalId) -> set[int]:
        """Return the incarnations of the agents that hold forks of an owned value."""
        owned = self.owned.get(rref)
        return set(owned.forks.values()) if owned is not None else set()

    def handed_out(self, to: int | None = None) -> list[tuple[GlobalId, GlobalId]]:
        """List the forks that other agents, or agent ``to``, hold of values owned here: the ids of value and fork."""
        return [
            (rref, fork)
            for rref, owned in self.owned.items()
            for fork, holder in owned.forks.items()
            if to is None or holder == to
        ]

    def forks_of(self, rref: GlobalId) -> int:
        """Return how many forks of an owned value other agents hold."""
        owned = self.owned.get(rref)
        return len(owned.forks) if owned is not None else 0

    def standing(self, fork: GlobalId) -> ForkStanding | None:
        """Return how far a fork held here has come; None if this agent does not hold the fork (any more)."""
        user = self.users.get(fork)
        return user.standing if user is not None else None

    def state(self, rref: GlobalId, fork: GlobalId | None) -> State | None:
        """Return the description of a value; None if this agent does not know it. ``fork`` is None on the owner."""
        entry: _Owned | _User | None = self.owned.get(rref) if fork is None else self.users.get(fork)
        return entry.state if entry is not None else None

    def held(self) -> list[GlobalId]:
        """List the forks that objects here still refer to."""
        return [fork for fork, user in self.users.items() if user.held]

    # -- the owner's side ---------------------------------------------------------------------

    def retain(self, rref: GlobalId) -> None:
        """Count one more object or call of this agent that refers to a value. `release_owned` must follow."""
        self.owned.setdefault(rref, _Owned()).handles += 1

    def release_owned(self, rref: GlobalId) -> list[Instruction]:
        """Undo one `retain`; drop the value if nothing else refers to it. Does nothing for a value not owned here."""
        owned = self.owned.get(rref)
        if owned is None:
            return []
        owned.handles -= 1
        return self._drop_if_free(rref, owned)

    def create(self, rref: GlobalId, fork: GlobalId, creator: int) -> None:
        """Record that the call which makes ``rref`` has arrived, and count its caller's fork."""
        self.retain(rref)  # the call itself refers to the value until it is answered
        self.owned[rref].created = True
        # A fork whose delete came first is not counted (test_a_delete_that_overtakes_the_creation_ends_it).
        if self.early.pop(fork, None) is None:
            self.owned[rref].forks[fork] = creator

    def uncreate(self, rref: GlobalId, fork: GlobalId) -> list[Instruction]:
        """Undo `create`: the call lacks a definition of its caller's ``__main__``, and may be repeated."""
        self.owned[rref].created = False
        self.owned[rref].forks.pop(fork, None)
        return self.release_owned(rref)

    def abandon(self, rref: GlobalId, fork: GlobalId) -> None:
        """Record that the call which was to make ``rref`` will not be repeated: the value will never exist."""
        self.early.pop(fork, None)  # of the caller's fork, which is never made now
        owned = self.owned.get(rref)
        if owned is not None:
            owned.created = True  # calls for the value need not wait for the creating call any more
        else:
            self._remember_dropped(rref)

    def set_state(self, rref: GlobalId, state: State) -> list[Instruction]:
        """Store the description of a value that now exists; return messages for the agents that do not have it yet."""
        owned = self.owned.get(rref)
        if owned is None:
            return []
        owned.state = state
        told, owned.uninformed = owned.uninformed, {}
        return [Send(holder, RRefState(rref, state)) for holder in told]

    def make(self, rref: GlobalId) -> None:
        """Record that the value exists, or the error in its place."""
        owned = self.owned.get(rref)
        if owned is not None:
            owned.made = True

    def on_fork_request(self, message: ForkRequest, sender: int) -> list[Instruction]:
        """Count the fork that another agent got from a third agent; return the message that confirms it."""
        if self.is_gone(message.rref):
            return [Send(sender, ForkConfirm(message.rref, message.fork, gone=True))]
        owned = self.owned.setdefault(message.rref, _Owned())  # the request may overtake the call that makes the value
        owned.forks[message.fork] = sender
        self._remember_uninformed(owned, sender)
        return [Send(sender, ForkConfirm(message.rref, message.fork, owned.state))]

    def on_user_delete(self, message: UserDelete, sender: int) -> list[Instruction]:
        """Drop a fork that its user has released; remember the delete if the fork is not known yet."""
        owned = self.owned.get(message.rref)
        if owned is None or message.fork not in owned.forks:
            # The delete is early if the value may still be created. If the value was here, it is late, and ignored.
            if message.rref not in self._dropped and (owned is None or not owned.created):
                self.early[message.fork] = sender
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
        del self.owned[rref]
        # A value that was never created may still come. If its creator is lost, `is_gone` knows it without this.
        if owned.created and rref.incarnation not in self._lost:
            self._remember_dropped(rref)
        return [Drop(rref)]

    def _remember_dropped(self, rref: GlobalId) -> None:
        self._dropped[rref] = None
        if len(self._dropped) > _DROPPED_VALUES_REMEMBERED:
            del self._dropped[next(iter(self._dropped))]

    # -- the user's side ----------------------------------------------------------------------

    def begin(self, rref: GlobalId, fork: GlobalId, owner: int) -> None:
        """Register the fork of a ``remote()`` call that is about to be sent; `confirm` or `fail` must follow."""
        self.users[fork] = _User(rref, owner, parent=None)

    def confirm(self, fork: GlobalId, state: State | None) -> list[Instruction]:
        """Mark the fork of a ``remote()`` call as confirmed, because the reply has arrived."""
        return self._settle(fork, ForkStanding.CONFIRMED, state)

    def fail(self, fork: GlobalId, may_exist: bool) -> list[Instruction]:
        """Mark the fork of a ``remote()`` call as failed; a late reply may still confirm it."""
        user = self.users.get(fork)
        if user is not None:
            # If the owner may have made the value, it is told of the release.
            user.known_to_owner = may_exist
        return self._settle(fork, ForkStanding.FAILED, None)

    def _settle(self, fork: GlobalId, standing: ForkStanding, state: State | None) -> list[Instruction]:
        """Set the standing of a pending or failed fork. A ``state`` of None leaves the description as it is."""
        user = self.users.get(fork)
        if user is None or user.standing not in (ForkStanding.PENDING, ForkStanding.FAILED):
            return []
        user.standing = standing
        user.state = state or user.state
        return self._delete_if_free(fork, user)

    def on_fork_confirm(self, message: ForkConfirm) -> list[Instruction]:
        """Mark a fork held here as counted by its owner, or as dead, and tell the agent from which it came."""
        user = self.users.get(message.fork)
        if user is None or user.standing is not ForkStanding.PENDING:
            return []
        to_parent = [Send(user.parent, ChildAccept(message.fork))] if user.parent is not None else []
        standing = ForkStanding.DEAD if message.gone else ForkStanding.CONFIRMED
        return [*to_parent, *self._settle(message.fork, standing, message.state)]

    def on_child_accept(self, message: ChildAccept) -> list[Instruction]:
        """Forget a child, a fork that this agent has passed on: the owner counts it, or the child is dead."""
        return self._end_child(message.fork)

    def on_state(self, message: RRefState) -> list[GlobalId]:
        """Store the description of another agent's value that now exists; return the forks here that refer to it."""
        told = [fork for fork, user in self.users.items() if user.rref == message.rref]
        for fork in told:
            self.users[fork].state = message.state
        return told

    def release(self, fork: GlobalId) -> list[Instruction]:
        """Record that nothing here refers to ``fork`` any more."""
        user = self.users.get(fork)
        if user is None:
            return []
        user.held = False
        return self._delete_if_free(fork, user)

    def _delete_if_free(self, fork: GlobalId, user: _User) -> list[Instruction]:
        # Until its children are accepted, this fork keeps the value for them; and no delete goes to the owner before
        # the fork is confirmed (see the head of this module).
        if user.held or user.children or user.standing is ForkStanding.PENDING:
            return []
        del self.users[fork]
        if user.standing is ForkStanding.DEAD or not user.known_to_owner:
            return []
        return [Send(user.owner, UserDelete(user.rref, fork))]

    def _end_child(self, child: GlobalId) -> list[Instruction]:
        """Forget a fork made from a fork that this agent holds; forget the parent, too, if nothing needs it."""
        parent, _ = self._children.pop(child, (None, 0))
        user = self.users.get(parent) if parent is not None else None
        if user is None or parent is None:
            return []
        user.children.discard(child)
        return self._delete_if_free(parent, user)

    # -- handing over -------------------------------------------------------------------------

    def hand_over(self, rref: GlobalId, fork: GlobalId | None, to: int, child: GlobalId | None = None) -> Fork:
        """Make a fork for agent ``to`` from ``fork``, which is held here; if that is None, from a value owned here.

        The caller puts the fork into a message to ``to``, or calls `take_back` if the message is not sent. Raises
        KeyError if the fork or the value is not held here any more.
        """
        child = child or self._ids.next()
        if fork is None:
            owned = self.owned[rref]
            if to != self._me:
                # Counted before it is sent: the count must not reach zero while the fork is on its way.
                owned.forks[child] = to
                self._remember_uninformed(owned, to)
            return Fork(rref, child, self._me, self._me, owned.state)
        user = self.users[fork]
        if to != user.owner:
            self._children[child] = (fork, to)  # first, because `take_back` looks here, also after Ctrl-C
            user.children.add(child)
        return Fork(rref, child, user.owner, self._me, user.state)

    def take_back(self, handed: Fork, to: int) -> list[Instruction]:
        """Undo a fork whose message to agent ``to`` was never sent. Does nothing if the fork was never made."""
        if handed.owner != self._me:
            return self._end_child(handed.fork)
        owned = self.owned.get(handed.rref)
        if owned is None or to == self._me:
            return []
        owned.forks.pop(handed.fork, None)
        return self._drop_if_free(handed.rref, owned)

    def accept(self, handed: Fork) -> list[Instruction]:
        """Register a fork that a message brought; return the message that asks its owner to count it, if needed."""
        # The reference has come back to its owner: an object here refers to the value.
        if handed.owner == self._me:
            self.retain(handed.rref)
            return []
        user = self.users[handed.fork] = _User(handed.rref, handed.owner, handed.parent, state=handed.state)
        if handed.owner in self._lost:
            user.standing = ForkStanding.DEAD
            return [Send(handed.parent, ChildAccept(handed.fork))]  # the parent need not wait for this fork
        # The owner counted this fork before it sent it.
        if handed.parent == handed.owner:
            user.standing = ForkStanding.CONFIRMED
            return []
        return [Send(handed.owner, ForkRequest(handed.rref, handed.fork))]

    # -- losing members -----------------------------------------------------------------------

    def on_lost(self, incarnation: int) -> list[Instruction]:
        """Drop the forks of a lost agent, mark references to its values as dead, free forks that waited for it."""
        instructions: list[Instruction] = []
        self._lost.add(incarnation)
        for rref in [rref for rref in self._dropped if rref.incarnation == incarnation]:
            del self._dropped[rref]
        for rref, owned in list(self.owned.items()):
            owned.uninformed.pop(incarnation, None)
            gone = [fork for fork, holder in owned.forks.items() if holder == incarnation]
            for fork in gone:
                del owned.forks[fork]
            if gone:
                instructions += self._drop_if_free(rref, owned)
        # Its early deletes, and the children that it was to accept.
        self.early = {fork: holder for fork, holder in self.early.items() if holder != incarnation}
        for child, (_, holder) in list(self._children.items()):
            if holder == incarnation:
                instructions += self._end_child(child)
        # References to its values.
        for fork, user in list(self.users.items()):
            if user.owner == incarnation:
                if user.standing is ForkStanding.PENDING and user.parent is not None:
                    instructions.append(Send(user.parent, ChildAccept(fork)))  # the parent need not wait for this fork
                user.standing = ForkStanding.DEAD
                for child in user.children:  # the owner will never confirm them
                    self._children.pop(child, None)
                user.children.clear()
                instructions += self._delete_if_free(fork, user)
        return instructions
