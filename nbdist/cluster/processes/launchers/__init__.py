"""`Launcher`: the contract of a class that starts worker processes, and `find_launcher`, which finds one by name.

A package offers a launcher as an entry point in the group ``nbdist.launchers``. A launcher starts processes, sends them
signals, reports when they end, and removes everything when the cluster ends. It does not know what the processes do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from nbdist.cluster.processes.setup import WorkerSetup
from nbdist.errors import UsageError

__all__ = ["Launcher", "find_launcher"]

GROUP = "nbdist.launchers"
"""The group of the entry points."""


class Launcher(Protocol):
    """Starts the worker processes of one cluster. Its methods may be called in any thread."""

    def __init__(self, count: int, on_end: Callable[[str, int], None]) -> None:
        """Get ready to start ``count`` workers.

        The launcher calls ``on_end(name, code)`` once for every worker that ends, in any thread; ``code`` is its exit
        code, or minus the number of the signal that killed it.
        """
        ...

    @property
    def folder(self) -> Path:
        """The run directory of the cluster, which only this user can enter; `close` removes it."""
        ...

    def preload(self, modules: Sequence[str], environment: Mapping[str, str]) -> Future[None]:
        """Import modules ahead of all workers, if that saves them time or memory. Called at most once, before `start`.

        Returns at once. The future is done when the modules are imported; it fails with UsageError if an import fails.
        ``environment`` has the environment variables for the imports.
        """
        ...

    def start(self, setup: WorkerSetup, environment: Mapping[str, str]) -> Future[int]:
        """Start a worker that calls `nbdist.cluster.worker.kernel.main` with this setup; return the future of its pid.

        ``environment`` has the worker's environment variables. If the process cannot be made, this method raises an
        error such as WorkerLost, or the future fails with it.
        """
        ...

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker; do nothing if it has ended.

        ``number`` is a signal of Python's `signal` module.
        """
        ...

    def last_words(self, name: str) -> str:
        """Return the end of what a worker wrote to standard error outside of cells; empty if nothing.

        Called after the worker has ended.
        """
        ...

    def close(self) -> None:
        """Kill all workers and the processes that they started, wait for their end, and remove the run directory."""
        ...


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
