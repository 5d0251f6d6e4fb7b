"""What starts worker processes: the contract of a launcher, and how one is found by name.

A launcher is a small class behind the entry-point group ``nbdist.launchers``. It starts processes, signals them,
tells of their ends, and sees that nothing is left of them. What the processes do is no business of its.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from nbdist.cluster.setup import WorkerSetup
from nbdist.errors import UsageError

__all__ = ["Launcher", "find_launcher"]

GROUP = "nbdist.launchers"


class Launcher(Protocol):
    """Starts the workers of one cluster. Thread-safe."""

    def __init__(self, count: int, on_end: Callable[[str, int], None]) -> None:
        """Get ready to start ``count`` workers.

        ``on_end(name, exit code)`` is to be called once for every worker that ends, with minus the number of the
        signal that killed it, if one did.
        """
        ...

    @property
    def folder(self) -> Path:
        """The run directory of the cluster: this user's alone, and removed at the end."""
        ...

    def preload(self, modules: Sequence[str], environment: Mapping[str, str]) -> Future[None]:
        """Have workers begin with these modules imported, if that spares them something; called once, before `start`.

        It need not wait for that: what is returned does, and fails with UsageError where one cannot be imported.
        """
        ...

    def start(self, setup: WorkerSetup, environment: Mapping[str, str]) -> Future[int]:
        """Start a worker; its pid, as soon as it is known."""
        ...

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker, if it lives."""
        ...

    def last_words(self, name: str) -> str:
        """The end of what a worker wrote to its standard error outside of cells."""
        ...

    def close(self) -> None:
        """Kill all that lives, and leave nothing."""
        ...


def find_launcher(name: str) -> type[Launcher]:
    """The launcher of that name, built in or installed."""
    if name == "local":
        from nbdist.cluster.launchers.local import LocalLauncher

        return LocalLauncher
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise UsageError(f"there is no launcher {name!r}; there are {', '.join(sorted({'local', *found}))}")
    launcher: type[Launcher] = found[name].load()
    return launcher
