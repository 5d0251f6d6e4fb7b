"""Implements torch's private ``_all_gather``: all members of a group exchange an object each, by calls.

The *leader* is the first member by name; all others are *followers*::

    follower ── gather_to_leader: its part ───────────────────> leader
                                                                  │ has all parts
    follower <── broadcast_to_followers: all parts, by name ──────┘

Every call has the usual time limit. The wait for slow members has a time limit only if the caller sets one, but it
fails when one of the members is lost.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from nbdist import durations
from nbdist.errors import RpcTimeout
from nbdist.rpc import api
from nbdist.rpc.asking import ask_each
from nbdist.rpc.futures import Future

__all__ = ["all_gather", "broadcast_to_followers", "gather_to_leader"]


_LOOK_FOR_LOST_EVERY = 0.5
"""Seconds after which a waiting member looks whether another one is lost."""


class _Round:
    """One call of `all_gather`, on one member."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}
        """The parts that the leader has, by the member's name."""
        self.whole: Future[dict[str, Any]] = Future()
        """All parts, by the member's name."""


_lock = threading.Lock()
"""Guards `_numbers`, `_rounds` and the parts of all rounds."""
_numbers: defaultdict[tuple[str, ...], itertools.count[int]] = defaultdict(itertools.count)
"""The number of the next round of each group, by the agent's incarnation and the members' names."""
_rounds: defaultdict[tuple[int, str], _Round] = defaultdict(_Round)
"""The rounds that run, by the agent's incarnation and the round's id, which is the same on all members."""


def _round(sequence_id: str) -> _Round:
    """Return the current agent's state of one call of `all_gather`, the round with this id; make it at the first call.

    The parts of other members may arrive before this worker itself calls `all_gather`, so either makes it.
    """
    with _lock:
        return _rounds[api.current_agent().me.incarnation, sequence_id]


def gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: Collection[str]) -> None:
    """Add the object of one member to one call of `all_gather`, on the leader: the first member by name.

    The other members call this on the leader; it returns at once. The objects of all ``worker_names`` end the leader's
    wait. All members use the same ``sequence_id`` for one call of `all_gather`. Raises RuntimeError if the member has
    sent its object before.
    """
    gathering = _round(sequence_id)
    with _lock:
        if worker_name in gathering.parts:
            raise RuntimeError(
                f"{worker_name} has sent its part of {sequence_id} before: all workers must call _all_gather equally "
                "often"
            )
        gathering.parts[worker_name] = obj
        complete = gathering.parts.keys() == set(worker_names)
    if complete:
        gathering.whole.try_settle(dict(gathering.parts), None)


def broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    """End a follower's wait in `all_gather` with the objects of all members, by name.

    The leader, which is the first member by name, calls this on each other member, once for each `all_gather`:
    the one with this ``sequence_id``.
    """
    _round(sequence_id).whole.set_result(objects_map)


def all_gather(obj: Any, worker_names: Collection[str] | None, timeout: float) -> dict[str, Any]:
    """Return the object that each member of the group has given, by the member's name.

    All members must call this, with the same ``worker_names`` (None for all workers). Raises RpcTimeout after
    ``timeout`` seconds; with 0 or less, it waits for slow members without a limit. The first member by name, the
    leader, raises WorkerLost if any member is lost, the others only if the leader is lost.
    """
    timeout = durations.limit(timeout)
    agent = api.current_agent()
    everybody = [record.name for record in agent.members()]
    names = sorted(set(worker_names) if worker_names else everybody)
    leader, me = names[0], agent.me.name
    key = (f"{agent.me.incarnation:x}", *names)
    with _lock:
        sequence_id = f"{','.join(names)} #{next(_numbers[key])}"
    deadline = time.monotonic() + timeout if timeout > 0 else math.inf
    try:
        if me != leader:
            api.rpc_sync(leader, gather_to_leader, (sequence_id, me, obj, names), timeout=timeout)
            return _wait(sequence_id, [leader], deadline)
        gather_to_leader(sequence_id, me, obj, names)
        whole = _wait(sequence_id, names, deadline)
        _broadcast(sequence_id, whole, names[1:], timeout)
        return whole
    finally:
        with _lock:
            _rounds.pop((agent.me.incarnation, sequence_id), None)


def _wait(sequence_id: str, others: list[str], deadline: float) -> dict[str, Any]:
    """Wait until this worker has the objects of all members in one call of `all_gather`; return them by name.

    Raises WorkerLost if one of ``others`` is lost, UnknownWorker if one was never a member, and RpcTimeout at the
    ``deadline``, a time of `time.monotonic`.
    """
    agent, whole = api.current_agent(), _round(sequence_id).whole
    while True:
        left = deadline - time.monotonic()
        try:
            return whole.wait(min(_LOOK_FOR_LOST_EVERY, max(left, 0.0)))
        except RpcTimeout:
            if left <= 0:
                raise
        for name in others:
            agent.find(name)  # raises if it is lost


def _broadcast(sequence_id: str, whole: dict[str, Any], followers: list[str], timeout: float) -> None:
    """Send the objects of all members to the followers, and wait until they have them; for the leader's `all_gather`.

    Raises RpcTimeout, with torch's text, if that fails for any follower. ``timeout`` is in seconds, for each call.
    """
    agent = api.current_agent()
    told = dict.fromkeys(followers, (sequence_id, whole))
    errors = ask_each(agent, broadcast_to_followers, told, timeout=timeout).errors
    if errors:
        seconds = agent.timeout_of(timeout)
        raise RpcTimeout(
            f"{', '.join(errors)} timed out in _all_gather after {seconds:.2f} seconds; the first error was: "
            f"{next(iter(errors.values()))}"
        )
