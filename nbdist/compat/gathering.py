"""Implements torch's private ``_all_gather``: each member of a group gives one object, and gets those of all.

The members, sorted by name, form a tree in which each one has at most `_FAN_OUT` children. The *leader*, the root of
the tree, is the first member by name. Objects travel up by RPC, and then all of them travel down::

                   ┌── gather_from_subtree: the objects below ───────> parent ── ... ──> leader
    member, child ─┤                                                                       │ has all
                   └── broadcast_to_followers: all objects, by name <─ parent <── ... ─────┘

A member returns the objects only after all members below it have them. So no member leaves before all below it have the
objects. In a group of 17 or fewer, all other members are children of the leader.

Every call by RPC has the usual time limit. The wait for slow members has a time limit only if the caller sets one. The
wait fails when a member is lost:

======================================  ======================================================================
who notices the loss                    what it does
======================================  ======================================================================
the leader, before it has all objects   raises WorkerLost, and tells its children (`fail_gathering`)
a member above or directly below        the same; it tells its parent, too
any other member                        tells the leader, which knows whether it still needs the lost member
======================================  ======================================================================

A member that is told raises the same error, and tells its own parent and children. If it has not called `all_gather`
yet, it tells them at once, and its call then raises the error.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from nbdist import durations
from nbdist.errors import Interrupted, NbdistError, RpcTimeout, UnknownWorker, WorkerLost
from nbdist.rpc import api
from nbdist.rpc.agent import Agent
from nbdist.rpc.asking import ask_each
from nbdist.rpc.futures import Future

# The most children of a member. A group of up to 17 members needs only one round trip to the leader.
_FAN_OUT = 16
_LOOK_FOR_LOST_EVERY = 0.5  # seconds
_LOOKS_UNTIL_REPORT = 3  # checks that find a lost member: the leader has usually noticed by itself meanwhile
_TOLD_WITHIN = 5.0  # seconds, for a call that tells a member of a failure; no thread waits for its end


@dataclass
class TreePlace:
    """The place of a member in the tree of its group. Member i, from 0, is the parent of 16i + 1 to 16i + 16."""

    above: list[str]  # its parent, its parent's parent, and so on, up to the leader; empty for the leader
    children: list[str]
    below: set[str]  # the members of its subtree, itself included

    @property
    def neighbours(self) -> list[str]:
        """Return its parent and its children."""
        return [*self.above[:1], *self.children]


def tree_place(names: Sequence[str], me: str) -> TreePlace:
    """Return the place of member ``me`` in the group of ``names``, which are sorted."""
    size = len(names)
    index = number = names.index(me) if me in names else size
    above = []
    while number > 0:
        number = (number - 1) // _FAN_OUT
        above.append(names[number])
    first, last = index, index
    below = {me}
    while first < size:
        below.update(names[first : last + 1])
        first, last = first * _FAN_OUT + 1, (last + 1) * _FAN_OUT
    return TreePlace(above, list(names[index * _FAN_OUT + 1 : (index + 1) * _FAN_OUT + 1]), below)


class _Round:
    """One call of `all_gather`, on one member. Its id, the same on all members, names the group and the call."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}  # the objects here, by the name of the member that gave each
        self.needed: set[str] | None = None  # the members whose objects this one collects; None until it is known
        self.collected: Future[dict[str, Any]] = Future()  # the objects of all needed members, by name
        self.whole: Future[dict[str, Any]] = Future()  # the objects of the whole group; not used on the leader
        self.timeout = -1.0  # seconds, for each call that passes all objects on to a child

    def fail(self, error: NbdistError, *, on_leader: bool) -> bool:
        """End the waits of this round with an error; return False if the round had ended or failed before."""
        # Both, even if `collected` is done already: a member that has sent its part up waits for `whole`.
        is_new = self.collected.try_settle(None, error)
        return is_new if on_leader else self.whole.try_settle(None, error)


_lock = threading.Lock()  # guards `_numbers`, `_rounds`, and the parts and needed members of all rounds
# The keys have the agent's incarnation: agents of one process, at once or one after another, count apart.
_numbers: defaultdict[tuple[int, str], int] = defaultdict(int)  # of the next round, by the group's id
_rounds: defaultdict[tuple[int, str], _Round] = defaultdict(_Round)  # the unfinished ones, by the round's id


def _group_id(names: Sequence[str]) -> str:
    if len(names) <= _FAN_OUT + 1:
        return ",".join(names)
    digest = hashlib.sha256(",".join(names).encode()).hexdigest()[:32]
    return f"{names[0]} to {names[-1]}, {len(names)} members, {digest}"


def _sequence_id(names: Sequence[str], number: int) -> str:
    return f"{_group_id(names)} #{number}"


def _find_round(sequence_id: str) -> _Round | None:
    """Return the current agent's round with this id, made if there is none; None if it has ended. `_lock` is held."""
    incarnation = api.current_agent().me.incarnation
    group, _, number = sequence_id.rpartition(" #")
    has_ended = number.isdecimal() and int(number) < _numbers.get((incarnation, group), 0)
    if has_ended and (incarnation, sequence_id) not in _rounds:
        return None
    return _rounds[incarnation, sequence_id]  # messages may arrive before this worker itself calls `all_gather`


def gather_from_subtree(sequence_id: str, worker_name: str, objects: dict[str, Any]) -> None:
    """Add the objects of a member and of all below it; end this member's wait when it has those of its own subtree."""
    # A child calls this on its parent by RPC.
    with _lock:
        if (gathering := _find_round(sequence_id)) is None:
            return  # this member has given up
        if gathering.parts.keys() & objects.keys():
            raise RuntimeError(
                f"{worker_name} has sent its part of {sequence_id} before: all workers must call _all_gather equally "
                "often"
            )
        gathering.parts.update(objects)
        complete = gathering.needed == gathering.parts.keys()
        parts = dict(gathering.parts) if complete else {}
    if complete:  # outside of the lock: settling runs callbacks
        gathering.collected.try_settle(parts, None)


def broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    """Pass the objects of all members to the members below this one; then end this member's own wait."""
    # A parent calls this on each child by RPC.
    agent = api.current_agent()
    with _lock:
        gathering = _rounds.get((agent.me.incarnation, sequence_id))
    try:
        timeout = -1.0 if gathering is None else gathering.timeout
        _broadcast(sequence_id, objects_map, tree_place(sorted(objects_map), agent.me.name).children, timeout)
    finally:
        if gathering is not None:  # else this member has sent its objects, and then given up
            gathering.whole.try_settle(objects_map, None)


def fail_gathering(names: Sequence[str], number: int, worker_name: str, error: NbdistError) -> None:
    """End round ``number`` of a group on this member with an error, and tell its parent and its children the same."""
    # ``worker_name`` is the caller, if the caller's own round has failed; else empty. Nothing happens on a leader that
    # has all objects: it needs the lost member no longer.
    agent = api.current_agent()
    with _lock:
        gathering = _find_round(_sequence_id(names, number))
    if gathering is not None and gathering.fail(error, on_leader=agent.me.name == names[0]):
        near = [name for name in tree_place(names, agent.me.name).neighbours if name != worker_name]
        _tell_failed(near, names, number, agent.me.name, error)


def _tell_failed(to: Sequence[str], names: Sequence[str], number: int, teller: str, error: NbdistError) -> None:
    """Tell members that a round has failed; they tell their neighbours, except the ``teller``. Does not wait."""
    agent = api.current_agent()
    plain = type(error)(str(error))  # without frames, notes and causes, which do not concern other members
    for name in to:
        with contextlib.suppress(NbdistError):  # if this member is lost, nobody must tell it
            agent.call(name, fail_gathering, list(names), number, teller, plain, timeout=_TOLD_WITHIN)


def all_gather(obj: Any, worker_names: Collection[str] | None, timeout: float) -> dict[str, Any]:
    """Return the object that each member of the group has given, by the member's name.

    All members must call this, with the same ``worker_names`` (None for all workers). Raises RpcTimeout after
    ``timeout`` seconds; with 0 or less, waits for slow members without a limit. If a member is lost before the leader,
    the first member by name, has all objects, all members raise WorkerLost.
    """
    timeout = durations.limit(timeout)
    agent = api.current_agent()
    everybody = [record.name for record in agent.members()]
    names = sorted(set(worker_names) if worker_names else everybody)
    me = agent.me.name
    place = tree_place(names, me)
    group = agent.me.incarnation, _group_id(names)
    with _lock:
        number = _numbers[group]
        _numbers[group] += 1
        sequence_id = _sequence_id(names, number)
        gathering = _rounds[agent.me.incarnation, sequence_id]
        gathering.timeout, gathering.needed = timeout, place.below
    near = [record.incarnation for name in place.neighbours if (record := agent.membership.names.get(name))]
    wait = _Wait(agent, names, number, place, time.monotonic() + timeout if timeout > 0 else math.inf)
    try:
        with agent.links.attend(near):
            objects = {me: obj}
            if me == names[0] or place.children:
                gather_from_subtree(sequence_id, me, objects)
                objects = wait.until(gathering.collected)
            if me == names[0]:
                _broadcast(sequence_id, objects, place.children, timeout)
                return objects
            api.rpc_sync(place.above[0], gather_from_subtree, (sequence_id, me, objects), timeout=timeout)
            return wait.until(gathering.whole)
    except (WorkerLost, UnknownWorker) as error:
        if gathering.fail(error, on_leader=me == names[0]):  # False if another member has told this one and the others
            _tell_failed(place.neighbours, names, number, me, error)
        raise
    except (KeyboardInterrupt, RpcTimeout) as error:
        # Those below and above would wait for ever: nothing goes past this member, which has not all objects below it.
        is_own = isinstance(error, KeyboardInterrupt) or bool(place.above)
        if place.children and is_own and not gathering.collected.done():
            left = error if isinstance(error, RpcTimeout) else Interrupted(f"{me} was interrupted in _all_gather")
            if gathering.fail(left, on_leader=me == names[0]):
                _tell_failed(place.neighbours, names, number, me, left)
        raise
    finally:
        with _lock:
            _rounds.pop((agent.me.incarnation, sequence_id), None)


class _Wait:
    """The waits of one member in one call of `all_gather`."""

    def __init__(self, agent: Agent, names: Sequence[str], number: int, place: TreePlace, deadline: float) -> None:
        self._agent = agent
        self._names = names
        self._number = number
        # Members that leave before this one has the objects only if they fail. Others may have finished and left.
        self._near = [*place.above, *place.children] if place.above else names
        self._deadline = deadline  # a time of `time.monotonic`
        self._looks = 0  # checks that have found a member outside of `_near` gone

    def until(self, outcome: Future[dict[str, Any]]) -> dict[str, Any]:
        """Wait for the objects, and return them by name. Raises WorkerLost if a member of `_near` is lost."""
        while True:
            left = self._deadline - time.monotonic()
            try:
                return outcome.wait(min(_LOOK_FOR_LOST_EVERY, max(left, 0.0)))
            except RpcTimeout:
                if left <= 0:
                    raise
            for name in self._near:
                self._agent.find(name)  # raises if the member is lost
            self._look_for_others()

    def _look_for_others(self) -> None:
        """Tell the leader, once, that a member outside of `_near` is gone: it may have died, or finished and left."""
        if self._near is self._names or self._looks >= _LOOKS_UNTIL_REPORT:
            return
        membership = self._agent.membership
        for name in self._names:
            why = membership.why_gone(name)  # None, too, for a member that may join later
            if why is not None:
                self._looks += 1
                if self._looks == _LOOKS_UNTIL_REPORT:
                    error = WorkerLost(f"{name} {why}")
                    # Without a teller: the leader must not skip this member, whose own round has not failed yet.
                    _tell_failed(self._names[:1], self._names, self._number, "", error)
                return


def _broadcast(sequence_id: str, whole: dict[str, Any], children: list[str], timeout: float) -> None:
    agent = api.current_agent()
    told = dict.fromkeys(children, (sequence_id, whole))
    errors = ask_each(agent, broadcast_to_followers, told, timeout=timeout).errors
    if errors:
        seconds = agent.timeout_of(timeout)
        raise RpcTimeout(
            f"{', '.join(errors)} timed out in _all_gather after {seconds:.2f} seconds; the first error was: "
            f"{next(iter(errors.values()))}"
        )
