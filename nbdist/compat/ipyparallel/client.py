"""The cluster under the names by which ipyparallel starts it and connects to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import nbdist
from nbdist.cluster.cluster import Cluster as Workers
from nbdist.compat.ipyparallel import tasks
from nbdist.compat.ipyparallel.closed import refuse
from nbdist.compat.ipyparallel.results import AsyncResult
from nbdist.compat.ipyparallel.views import DirectView, LoadBalancedView, ViewExecutor
from nbdist.errors import UsageError
from nbdist.rpc import api

__all__ = ["Client", "Cluster", "view_of"]

Targets = int | str | slice | Sequence[int] | None


def view_of(cluster: Workers, targets: Targets = None, *, balanced: bool = False) -> DirectView | LoadBalancedView:
    """Return a view of some workers, or of all: ``cluster.view()``.

    ``targets`` are a rank, a slice, a sequence of ranks, or what ``%%remote`` takes. With ``balanced`` each task goes
    to one of them, else to all.
    """
    client = Client(cluster.start())
    return client.load_balanced_view(targets) if balanced else client.direct_view(targets)


class Client:
    """The cluster of this notebook; where none runs, one is started, with a worker for each core."""

    block = False
    """Whether `apply` and `map` of the views that are made from now on wait for their values."""

    def __init__(self, cluster: Workers | None = None, **_: Any) -> None:
        self.cluster = cluster or Workers.current or _started(None)
        for worker in self.cluster.workers:
            if worker.alive:
                api.rpc_sync(worker.name, tasks.take_name)

    def __getattr__(self, name: str) -> Any:
        return refuse("Client", name)

    @property
    def ids(self) -> list[int]:
        """The numbers of the engines: the workers' ranks."""
        return [worker.rank for worker in self.cluster.workers]

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[DirectView]:
        return (self[number] for number in self.ids)

    def __getitem__(self, targets: Targets) -> DirectView:
        return self.direct_view(targets)

    def direct_view(self, targets: Targets = None, **_: Any) -> DirectView:
        """Return a view of some engines, or of all, that all do the same."""
        return DirectView(
            self.cluster, _engines(self.cluster, targets), single=isinstance(targets, int), block=self.block
        )

    broadcast_view = direct_view

    def load_balanced_view(self, targets: Targets = None, **_: Any) -> LoadBalancedView:
        """Return a view of some engines, or of all, of which each task takes the first that is free."""
        return LoadBalancedView(self.cluster, _engines(self.cluster, targets), block=self.block)

    def executor(self, targets: Targets = None) -> ViewExecutor:
        """Return an executor of `concurrent.futures` over some engines, or all."""
        return self.load_balanced_view(targets).executor

    def wait(self, jobs: AsyncResult | Sequence[AsyncResult], timeout: float | None = None) -> bool:
        """Wait until some handles have ended; return whether they have."""
        return self[:].wait(jobs, timeout)

    def wait_for_engines(self, n: int | None = None, **_: Any) -> None:
        """Check that there are ``n`` engines: all that there will be are there when the cluster has started."""
        if n is not None and n > len(self):
            raise UsageError(f"the cluster has {len(self)} workers, and will not have {n}: start it with n={n}")

    def activate(self, targets: Targets = None, suffix: str = "") -> DirectView:
        """Have ``%px`` mean some engines, or all."""
        view = self.direct_view(targets)
        view.activate(suffix)
        return view

    def shutdown(self, **_: Any) -> None:
        """End the workers."""
        self.cluster.shutdown()

    def close(self) -> None:
        """Do nothing: the workers end with the notebook, or by ``shutdown()``."""


def _awaitable(name: str) -> Any:
    """Return a method that does what another one does, and is awaited. It blocks meanwhile: starting takes a second."""

    async def method(self: Cluster, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    return method


class Cluster:
    """What ipyparallel starts and ends engines with."""

    def __init__(self, n: int | None = None, *, engines: str = "local", **_: Any) -> None:
        if engines != "local":
            raise UsageError(f"engines={engines!r}: nbdist starts workers on this host; they form a process group")
        self.n = n
        self._workers: Workers | None = None

    def __getattr__(self, name: str) -> Any:
        return refuse("Cluster", name)

    def start_cluster_sync(self, n: int | None = None, **_: Any) -> Cluster:
        """Start the workers; return when all of them have answered."""
        self._workers = _started(n or self.n)
        return self

    def connect_client_sync(self, **_: Any) -> Client:
        """Return the client of the workers."""
        return Client(self._running())

    def start_and_connect_sync(self, n: int | None = None, activate: bool = False, **_: Any) -> Client:
        """Start the workers and return their client; ``activate`` has ``%px`` mean them."""
        client = self.start_cluster_sync(n).connect_client_sync()
        if activate:
            client.activate()
        return client

    def stop_cluster_sync(self) -> None:
        """End the workers."""
        self._running().shutdown()

    def signal_engines_sync(self, signum: int) -> None:
        """Send a signal to all workers; SIGINT interrupts what they do."""
        if signum == signal.SIGINT:
            self._running().interrupt()
        else:
            for name in self._running().names:
                self._running().signal(name, signum)

    def restart_engines_sync(self) -> None:
        """Start all workers anew."""
        self._running().restart("all")

    start_cluster = _awaitable("start_cluster_sync")
    connect_client = _awaitable("connect_client_sync")
    start_and_connect = _awaitable("start_and_connect_sync")
    stop_cluster = _awaitable("stop_cluster_sync")
    signal_engines = _awaitable("signal_engines_sync")
    restart_engines = _awaitable("restart_engines_sync")

    def __enter__(self) -> Client:
        return self.start_and_connect_sync()

    def __exit__(self, *_: object) -> None:
        self.stop_cluster_sync()

    __aenter__ = _awaitable("__enter__")
    __aexit__ = _awaitable("__exit__")

    def _running(self) -> Workers:
        if self._workers is None:
            raise UsageError("the cluster has not been started: cluster.start_cluster_sync()")
        return self._workers


def _started(n: int | None) -> Workers:
    """Start workers: ``n`` of them, or one for each core that this process may use."""
    return nbdist.Cluster(n or len(os.sched_getaffinity(0))).start()


def _engines(cluster: Workers, targets: Targets) -> list[int]:
    """Return the ranks that targets of ipyparallel's or nbdist's mean."""
    if isinstance(targets, slice):
        return [worker.rank for worker in cluster.workers][targets]
    return [worker.rank for worker in cluster.select(None if targets == "all" else targets)]
