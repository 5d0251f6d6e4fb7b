"""All members of a group tell each other something, by calls: torch's private ``_all_gather``.

Each sends its part to the first member by name; when all parts are there, that one sends the whole to all
others. Every call has the usual time limit; waiting for slow members has one only where it was asked for, but
ends when one of them is lost.
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
from nbdist.rpc.futures import Future

__all__ = ["all_gather", "broadcast_to_followers", "gather_to_leader"]


_LOOK_EVERY = 0.5


class _Round:
    """One gathering, on one member."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}
        self.whole: Future[dict[str, Any]] = Future()


_lock = threading.Lock()
_numbers: defaultdict[tuple[str, ...], itertools.count[int]] = defaultdict(itertools.count)
_rounds: defaultdict[tuple[int, str], _Round] = defaultdict(_Round)


def _round(sequence_id: str) -> _Round:
    """The round of that id in the current agent's life."""
    with _lock:
        return _rounds[api.current_agent().me.incarnation, sequence_id]


def gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: Collection[str]) -> None:
    """On the leader: a member's part has come."""
    gathering = _round(sequence_id)
    with _lock:
        if worker_name in gathering.parts:
            raise RuntimeError(f"{worker_name} has sent its part of {sequence_id} before")
        gathering.parts[worker_name] = obj
        complete = gathering.parts.keys() == set(worker_names)
    if complete:
        gathering.whole.try_settle(dict(gathering.parts), None)


def broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    """On the others: the whole has come."""
    _round(sequence_id).whole.set_result(objects_map)


def all_gather(obj: Any, worker_names: Collection[str] | None, timeout: float) -> dict[str, Any]:
    """What every member of the group has given, by its name."""
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
    """The whole, unless one of ``others`` is lost before it has come."""
    agent, whole = api.current_agent(), _round(sequence_id).whole
    while True:
        left = deadline - time.monotonic()
        try:
            return whole.wait(min(_LOOK_EVERY, max(left, 0.0)))
        except RpcTimeout:
            if left <= 0:
                raise
        for name in others:
            agent.find(name)  # raises if it is lost


def _broadcast(sequence_id: str, whole: dict[str, Any], followers: list[str], timeout: float) -> None:
    calls = {
        name: api.rpc_async(name, broadcast_to_followers, (sequence_id, whole), None, timeout) for name in followers
    }
    errors: dict[str, RuntimeError] = {}
    for name, call in calls.items():
        try:
            call.wait()
        except RuntimeError as error:
            errors[name] = error
    if errors:
        seconds = api.current_agent().timeout_of(timeout)
        raise RpcTimeout(
            f"{', '.join(errors)} timed out in _all_gather after {seconds:.2f} seconds; the first error was: "
            f"{next(iter(errors.values()))}"
        )
