"""Waits until Ray has room for workers. If there is none, says what its nodes have free, and which nodes are starting.

A Ray cluster may have an autoscaler, which starts nodes for a placement group that has no room. Ray has two kinds of
autoscaler. Each reports what it does in another place: see `nodes_starting`.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from nbdist import trace
from nbdist.amounts import counted
from nbdist.errors import ResourceError

_LOOK_EVERY = 1.0  # seconds between two looks; Ctrl-C takes as long, as it does not interrupt a wait of Ray's
_ASKED_WITHIN = 2  # seconds for Ray to report what its autoscaler does
_LONGER = 300.0  # the least ``-t``, in seconds, that the error proposes; twice the time that was too short, if more


def wait_for_room(ray: Any, group: Any, needs: Mapping[str, float], count: int, within: float) -> None:
    """Wait until Ray has room for a placement group of ``count`` workers, for ``within`` seconds at most."""
    show = trace.steps()
    deadline = time.monotonic() + within
    before, starting, shown = len(_living(ray)), 0, ""
    while not group.wait(max(0.0, min(_LOOK_EVERY, deadline - time.monotonic()))):
        starting = nodes_starting(ray)
        if time.monotonic() >= deadline:
            room = say_room(_free_of_nodes(ray), needs, count)
            if not starting:
                raise ResourceError(f"{room}. It waited for {within:g} s; -t SECONDS waits longer, -n N asks for fewer")
            nodes, longer = counted(starting, "node"), max(_LONGER, 2 * within)
            raise ResourceError(
                f"{room}. After {within:g} s its autoscaler was still starting {nodes}; -t {longer:g} waits longer, "
                "-n N asks for fewer"
            )
        line = f"Ray's autoscaler is starting {counted(starting, 'node')}; waiting up to {within:g} s for room"
        if starting and line != shown:
            shown = line
            show(line)
    if shown:
        started = counted(len(_living(ray)) - before, "node")
        show(f"Ray's autoscaler has started {started}: there is room for all workers")


def nodes_starting(ray: Any) -> int:
    """Return how many nodes Ray's autoscaler is starting: 0 without an autoscaler, or if Ray does not say."""
    try:
        from ray.experimental.internal_kv import _internal_kv_get

        if told := _internal_kv_get("__autoscaling_status"):  # the autoscaler that `ray up` starts
            report: dict[str, Any] = json.loads(told).get("autoscaler_report") or {}
            launches: dict[str, int] = report.get("pending_launches", {})
            return sum(launches.values()) + len(report.get("pending_nodes", ()))
        from ray.autoscaler.v2.sdk import get_cluster_status

        status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=_ASKED_WITHIN)
        return sum(launch.count for launch in status.pending_launches) + len(status.pending_nodes)
    except Exception:  # Ray may change these functions at any time, and only a line depends on them
        return 0


def say_room(free: list[dict[str, float]], needs: Mapping[str, float], count: int) -> str:
    """Return how many of ``count`` workers Ray has room for, and what its nodes have free. Pure."""
    room = sum(min(int(node.get(name, 0.0) / needed) for name, needed in needs.items()) for node in free)
    shown = "GPU" if "GPU" in needs else "CPU"
    groups = Counter(node.get(shown, 0.0) for node in free)
    nodes = ", ".join(
        f"{counted(many, 'node')} with {each:g} free {shown}{'' if each == 1 else 's'}{' each' if many > 1 else ''}"
        for each, many in sorted(groups.items(), reverse=True)
    )
    return f"Ray has room for {min(room, count)} of {counted(count, 'worker')}: {nodes or 'no node'}"


def _living(ray: Any) -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def _free_of_nodes(ray: Any) -> list[dict[str, float]]:
    from ray._private import state

    find: Any = state.available_resources_per_node
    free: Mapping[str, dict[str, float]] = find()
    return [free.get(node, {}) for node in _living(ray)]
