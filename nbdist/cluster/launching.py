"""Finds the launcher of a cluster: a built-in one, or one that a package offers.

A package offers a launcher of its own as an entry point in the group ``nbdist.launchers``.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from nbdist.cluster.processes.launchers.contract import Launcher
from nbdist.cluster.spec import Spec
from nbdist.errors import UsageError

GROUP = "nbdist.launchers"  # of the entry points
_OURS = ("join", "local", "ray")  # the launchers that are built in


def launcher_of(spec: Spec) -> type[Launcher]:
    """Return the class of the launcher of ``spec``. Raises UsageError if there is none of that name."""
    name = spec.launcher
    launcher: type[Launcher]
    if spec.is_open_local:
        from nbdist.cluster.hosts.launchers.open_local import OpenLocalLauncher as launcher
    elif name == "local":
        from nbdist.cluster.processes.launchers.local import LocalLauncher as launcher
    elif name == "join":
        from nbdist.cluster.hosts.launchers.join import JoinLauncher as launcher
    elif name == "ray":
        from nbdist.cluster.hosts.launchers.ray import RayLauncher as launcher
    else:
        found = {entry.name: entry for entry in entry_points(group=GROUP)}
        if name not in found:
            installed = ", ".join(sorted({*_OURS, *found}))
            raise UsageError(f"there is no launcher {name!r}; the installed ones are {installed}")
        launcher = found[name].load()
    return launcher
