"""The launchers, which start the worker processes of a cluster, and `find_launcher`, which finds one by name.

===========  =========================================================================
`contract`   `Launcher`: the contract
`local`      processes of this host, forked from a zygote
===========  =========================================================================

A package offers a launcher of its own as an entry point in the group ``nbdist.launchers``.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from nbdist.cluster.processes.launchers.contract import Launcher
from nbdist.errors import UsageError

__all__ = ["find_launcher"]

GROUP = "nbdist.launchers"
"""The group of the entry points."""


def find_launcher(name: str) -> type[Launcher]:
    """Return the class of a launcher, built in or installed. Raises UsageError if there is none of that name."""
    if name == "local":
        from nbdist.cluster.processes.launchers.local import LocalLauncher

        return LocalLauncher
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise UsageError(
            f"there is no launcher {name!r}; the installed ones are {', '.join(sorted({'local', *found}))}"
        )
    launcher: type[Launcher] = found[name].load()
    return launcher
