"""Where a module is to live, as users write it: ``"worker1"``, ``"worker1/cuda:0"``, ``"rank:1/cuda:0"``."""

from __future__ import annotations

from nbdist.errors import UsageError
from nbdist.rpc.membership import WorkerInfo

__all__ = ["place_of"]


def place_of(remote_device: str | int | WorkerInfo) -> tuple[str | int, str]:
    """The worker, by name or id, and the device."""
    if isinstance(remote_device, WorkerInfo):
        return remote_device.name, "cpu"
    if isinstance(remote_device, int) and not isinstance(remote_device, bool):
        return remote_device, "cpu"
    worker, _, device = str(remote_device).partition("/")
    if not worker or "/" in device or (":" in worker and not worker.startswith("rank:")):
        raise UsageError(
            f"{remote_device!r} is not a place for a module: write 'worker1', 'worker1/cuda:0' or 'rank:1/cuda:0'"
        )
    if worker.startswith("rank:"):
        rank = worker.removeprefix("rank:")
        if not rank.isdecimal():
            raise UsageError(f"{remote_device!r}: the rank must be a number")
        return int(rank), device or "cpu"
    return worker, device or "cpu"
