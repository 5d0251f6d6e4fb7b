"""Parses the places that users give for modules: ``"worker1"``, ``"worker1/cuda:0"``, ``"rank:1/cuda:0"``."""

from __future__ import annotations

from nbdist.errors import UsageError
from nbdist.rpc.core.members import WorkerInfo


def place_of(remote_device: str | int | WorkerInfo) -> tuple[str | int, str]:
    """Return the name or id of the worker, and the device (``"cpu"`` if none is named), that a place stands for."""
    if isinstance(remote_device, WorkerInfo):
        return remote_device.name, "cpu"
    if isinstance(remote_device, int) and not isinstance(remote_device, bool):  # bool is an int
        return remote_device, "cpu"
    worker, _, device = str(remote_device).partition("/")
    kind, colon, rank = worker.partition(":")
    if not worker or "/" in device or (colon and kind != "rank"):
        raise UsageError(
            f"{remote_device!r} is not a place for a module. Write 'worker1', 'worker1/cuda:0' or 'rank:1/cuda:0'"
        )
    if colon and not rank.isdecimal():
        raise UsageError(f"{remote_device!r} is not a place for a module: the rank must be a number, as in 'rank:1'")
    return int(rank) if colon else worker, device or "cpu"
