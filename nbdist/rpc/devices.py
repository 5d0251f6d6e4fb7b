"""Finds the devices of a receiver for the tensors of a call, a result or a gradient, and checks device maps.

A device map belongs to the worker that makes calls. It names the callee's device for each argument; for results it is
read backwards. For gradients, the maps of both workers count. `nbdist.wire.devices` has the rules without a map.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.errors import UsageError
from nbdist.wire.devices import CPU_ONLY, SAME, Devices
from nbdist.wire.messages import Record


def for_call(me: Record, to: Record) -> Devices:
    """Return the devices of worker ``to`` for the arguments of a call that ``me`` makes."""
    return Devices(to.name, me.device_maps.get(to.name, {}), _own(me, to))


def for_result(me: Record, caller: Record | None) -> Devices:
    """Return the devices of the caller for the tensors of a result; ``me`` ran the call."""
    if caller is None:
        # The caller is gone. A tensor on a GPU cannot be sent then.
        return CPU_ONLY
    # The caller's own map, read backwards.
    back = {theirs: ours for ours, theirs in caller.device_maps.get(me.name, {}).items()}
    return Devices(caller.name, back, _own(me, caller), results=True)


def for_gradients(me: Record, to: Record | None) -> Devices:
    """Return the devices of worker ``to`` for the gradients that ``me`` sends; `CPU_ONLY` if ``to`` is gone."""
    if to is None:
        return CPU_ONLY
    back = {theirs: ours for ours, theirs in to.device_maps.get(me.name, {}).items()}
    # Where the two maps differ, that of ``me`` wins.
    return Devices(to.name, {**back, **me.device_maps.get(to.name, {})}, _own(me, to))


def takes_gpu_tensors(me: Record, to: Record) -> bool:
    """Return whether tensors on at least some GPUs of ``me`` can be sent to worker ``to``."""
    return bool(_own(me, to) or me.device_maps.get(to.name))


def results_stay_on_gpus(me: Record, to: Record) -> bool:
    """Return whether results on GPUs of worker ``to`` can be sent to ``me``, which calls it."""
    return bool(_own(to, me) or me.device_maps.get(to.name))


def _own(me: Record, to: Record) -> str:
    """Return the device of ``to`` for a GPU that no map names: `SAME`, a name, or empty if tensors cannot be sent."""
    return SAME if to.incarnation == me.incarnation and to.device else to.device


def check(members: Sequence[Record]) -> None:
    """Raise UsageError, in torch's words, if a device map of a member is impossible."""
    by_name = {member.name: member for member in members}
    # In a dynamic world, a map may name a worker that joins later.
    fixed = all(member.world_size is not None for member in members)
    for member in members:
        if len(set(member.devices)) < len(member.devices):
            raise UsageError(f"Node {member.name} has duplicated devices: {', '.join(member.devices)}")
        _require(member, member.devices, f"Node {member.name} has devices with invalid indices")
        if fixed and (unknown := member.device_maps.keys() - by_name.keys()):
            raise UsageError(
                f"Node {member.name} has invalid target node names in its device maps: "
                f"{', '.join(sorted(unknown))}; the workers are {', '.join(sorted(by_name))}"
            )
        for name, device_map in member.device_maps.items():
            where = f"in its device map for {name}"
            if len(set(device_map.values())) < len(device_map):
                raise UsageError(f"Node {member.name} has duplicated target devices {where}: {device_map}")
            _check_side(member, "source", list(device_map), where, member)
            if (target := by_name.get(name)) is not None:
                _check_side(member, "target", list(device_map.values()), where, target)


def _check_side(member: Record, side: str, devices: Sequence[str], where: str, owner: Record) -> None:
    """Raise UsageError unless ``owner`` has all of these ``devices``, which a map of ``member`` names."""
    if not owner.devices:
        _require(owner, devices, f"Node {member.name} has {side} devices with invalid indices {where}")
    elif unexpected := [device for device in devices if device not in owner.devices]:
        raise UsageError(
            f"Node {member.name} has unexpected {side} devices {where}: {', '.join(unexpected)}; the devices of "
            f"{owner.name} are, by its options, {', '.join(owner.devices)}"
        )


def _require(owner: Record, devices: Sequence[str], text: str) -> None:
    """Raise UsageError, which begins with ``text``, unless each device is the CPU or one of the owner's GPUs."""
    if wrong := [device for device in devices if not _exists(device, owner.gpus)]:
        have = "no GPU" if not owner.gpus else f"{owner.gpus} GPU{'s' if owner.gpus > 1 else ''}, numbered from 0"
        raise UsageError(f"{text}: {', '.join(wrong)}; {owner.name} has {have}")


def _exists(device: str, gpus: int) -> bool:
    kind, _, index = device.partition(":")
    return kind == "cpu" or (kind == "cuda" and index.isdecimal() and int(index) < gpus)
