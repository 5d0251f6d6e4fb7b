"""A launcher whose process ids mean nothing on this host, as those of other hosts: no process here has one of them.

Everything else is as with the local launcher. Whoever uses a worker's pid or host above the launchers fails with it.
"""

import itertools

from nbdist.cluster.processes.launchers import local
from nbdist.cluster.processes.launchers.contract import StartedWorker
from nbdist.cluster.processes.launchers.local import LocalLauncher

__all__ = ["BlindLauncher"]

_numbers = itertools.count(5_000_000)  # more than Linux ever uses


def _blindly(pid: int) -> StartedWorker:
    return StartedWorker(next(_numbers), "elsewhere")


local.StartedWorker = _blindly  # in processes only that load this module


class BlindLauncher(LocalLauncher):
    """The local launcher, but for what it says of its processes."""
