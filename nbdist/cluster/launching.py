"""Finds the launcher of a cluster: a built-in one, or one that a package offers.

A package offers a launcher of its own as an entry point in the group ``nbdist.launchers``.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from nbdist.cluster.processes.launchers.contract import Launcher
from nbdist.errors import UsageError

if TYPE_CHECKING:
    from nbdist.cluster.spec import Spec

GROUP = "nbdist.launchers"  # of the entry points
_OURS = ("join", "local", "ray")  # the launchers that are built in


def launcher_of(spec: Spec) -> type[Launcher]:
    """Return the class of the launcher of ``spec``. Raises UsageError if there is none of that name."""
    if spec.is_open_local:
        from nbdist.cluster.hosts.launchers.open_local import OpenLocalLauncher

        return OpenLocalLauncher
    name = spec.launcher
    if name == "local":
        from nbdist.cluster.processes.launchers.local import LocalLauncher

        return LocalLauncher
    if name == "join":
        from nbdist.cluster.hosts.launchers.join import JoinLauncher

        return JoinLauncher
    if name == "ray":
        from nbdist.cluster.hosts.launchers.ray import RayLauncher

        return RayLauncher
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise UsageError(f"there is no launcher {name!r}; the installed ones are {', '.join(sorted({*_OURS, *found}))}")
    launcher: type[Launcher] = found[name].load()
    return launcher
