"""`Launcher`: the contract of a class that starts the worker processes of a cluster.

A launcher starts processes, sends them signals, reports when they end, and removes everything when the cluster ends. It
alone knows on which hosts they run: the code above uses no pid and no path of a worker's. It does not know what the
processes do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nbdist.cluster.processes.probe import Probe
from nbdist.cluster.processes.setup import WorkerSetup

if TYPE_CHECKING:  # these import torch, which a notebook imports while the first workers' zygote does
    from nbdist.cluster.processes.group_store import GroupStores
    from nbdist.cluster.spec import Spec

GIVEN_UP = "was not started: its start was given up"  # in words that follow the worker's name, for `OnEnd`

# Called with the name of a worker whose process has ended, and how it ended: see `Launcher`.
OnEnd = Callable[[str, int | str], None]


class StartedWorker(NamedTuple):
    """A worker process that has been started."""

    pid: int
    """Its process id on its host."""
    host: str = ""
    """The name of its host; empty for the host of this process."""
    device: str | None = None
    """Its device as torch in its process calls it, if the launcher has chosen it; None for the one in its setup."""


class Launcher(Protocol):
    """Starts the worker processes of one cluster. Its methods may be called in any thread."""

    def __init__(self, spec: Spec, on_end: OnEnd) -> None:
        """Get ready to start the workers that ``spec`` describes.

        The launcher calls ``on_end(name, how)`` once for every worker that ends, in any thread. ``how`` is its exit
        code, or minus the number of the signal that killed it; or words that follow its name, where that is not known.

        A caller gives a start up by cancelling its future. Then the launcher kills the process, whether it exists
        already or only later, and calls ``on_end`` with `GIVEN_UP` once there is no process.
        """

    @property
    def folder(self) -> Path:
        """The run directory of the cluster on this host, which only this user can enter; `close` removes it."""

    @property
    def rpc(self) -> Mapping[str, Any]:
        """The options with which this process's agent joins the RPC world of the workers."""

    @property
    def group_stores(self) -> GroupStores:
        """The stores at which the workers form their process groups."""

    def preload(self, modules: Sequence[str]) -> Future[None]:
        """Import modules ahead of all workers, if that saves them time or memory. Called at most once, before `start`.

        Returns at once. The future is done when the modules are imported; it fails with UsageError if an import fails.
        """

    def start(self, setup: WorkerSetup, environment: Mapping[str, str]) -> Future[StartedWorker]:
        """Start a worker that calls `nbdist.cluster.worker.kernel.main` with this setup.

        Returns a future. The worker has the environment variables of the place where it runs, and ``environment`` adds
        to them. If the process cannot be made, this method raises an error such as WorkerLost, or the future fails with
        it.

        The kernel answers at the sockets that the setup's connection file names, in this host's `folder`. If the worker
        runs on another host, the launcher relays the messages at these sockets.
        """

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker; do nothing if it has ended."""

    def probe(self, name: str) -> Future[Probe]:
        """Ask the worker's host about the worker's process; return the future of the answer.

        The worker itself need not answer. The future is done within a second where the host can be reached.
        """

    def advice(self) -> str:
        """Return a text that tells a person how to start the missing workers; empty if there is nothing to do."""

    def last_words(self, name: str) -> str:
        """Return the last text that a dead worker wrote to standard error outside of cells; empty if there is none."""

    def close(self) -> int:
        """Kill all workers and the processes that they started, wait for their end, and remove the run directory.

        Returns how many workers may still live: 0, unless a system refuses to end one, or a host cannot be reached.
        """
