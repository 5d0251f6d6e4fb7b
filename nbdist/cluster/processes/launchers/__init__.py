"""The launchers, which start the worker processes of a cluster, and `launcher_of`, which finds the one for a spec.

============ =============================================================================
`contract`   `Launcher`: the contract
`local`      processes of this host, forked from a zygote
`remote`     the common part of launchers whose workers run on other hosts
`inviting`   the common part of launchers that invite workers, also into a running cluster
`join`       workers that a person or a batch system starts, and that join
`open_local` processes of this host, and workers that join them
`ray`        workers that Ray places
`ray_actor`  the code in the process that Ray starts for a worker
`ray_room`   waits until Ray has room for the workers, and says why there is none
============ =============================================================================

A package offers a launcher of its own as an entry point in the group ``nbdist.launchers``.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from nbdist.cluster.processes.launchers.contract import Launcher
from nbdist.errors import UsageError

if TYPE_CHECKING:
    from nbdist.cluster.spec import Spec

__all__ = ["find_launcher", "launcher_of"]

GROUP = "nbdist.launchers"
"""The group of the entry points."""
_OURS = ("join", "local", "ray")
"""The launchers that are built in."""


def launcher_of(spec: Spec) -> type[Launcher]:
    """Return the class of the launcher of ``spec``. Raises UsageError if there is none of that name."""
    if spec.is_open_local:
        from nbdist.cluster.processes.launchers.open_local import OpenLocalLauncher

        return OpenLocalLauncher
    return find_launcher(spec.launcher)


def find_launcher(name: str) -> type[Launcher]:
    """Return the class of a launcher, built in or installed. Raises UsageError if there is none of that name."""
    if name == "local":
        from nbdist.cluster.processes.launchers.local import LocalLauncher

        return LocalLauncher
    if name == "join":
        from nbdist.cluster.processes.launchers.join import JoinLauncher

        return JoinLauncher
    if name == "ray":
        from nbdist.cluster.processes.launchers.ray import RayLauncher

        return RayLauncher
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise UsageError(f"there is no launcher {name!r}; the installed ones are {', '.join(sorted({*_OURS, *found}))}")
    launcher: type[Launcher] = found[name].load()
    return launcher
