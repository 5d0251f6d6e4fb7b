"""Starts a cluster and connects to it, under ipyparallel's names."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import nbdist
from nbdist.cluster.cluster import Cluster as Workers
from nbdist.compat.ipyparallel import tasks
from nbdist.compat.ipyparallel.closed import Closed
from nbdist.compat.ipyparallel.results import wait_for
from nbdist.compat.ipyparallel.views import DirectView, LoadBalancedView, ViewExecutor
from nbdist.errors import UsageError
from nbdist.rpc import api

__all__ = ["Client", "Cluster", "view_of"]

P = ParamSpec("P")
T = TypeVar("T")
Targets = int | str | slice | Sequence[int] | None


def view_of(cluster: Workers, targets: Targets = None, *, balanced: bool = False) -> DirectView | LoadBalancedView:
    """Return a view of some workers, or of all: ``cluster.view()``.

    ``targets`` are a rank, a slice, a sequence of ranks, or what ``%%remote`` takes. With ``balanced``, each task goes
    to the first of them that is free, else to all.
    """
    client = Client(cluster)
    return client.load_balanced_view(targets) if balanced else client.direct_view(targets)


class Client(Closed):
    """Makes views of this notebook's cluster. Where none runs, starts one with a worker for each core."""

    block = False
    """The `block` of views that are made from now on: whether their `apply` and `map` wait for values."""

    def __init__(self, cluster: Workers | None = None, **_: Any) -> None:
        self.cluster = (cluster or Workers.current or _workers(None)).start()
        for name in [worker.name for worker in self.cluster.workers if worker.alive]:
            api.rpc_sync(name, tasks.take_name)

    @property
    def ids(self) -> list[int]:
        """The engines' numbers, which are the workers' ranks."""
        return [worker.rank for worker in self.cluster.workers]

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[DirectView]:
        return map(self.direct_view, self.ids)

    def _select(self, targets: Targets) -> list[int]:
        asked = self.ids[targets] if isinstance(targets, slice) else targets
        return [worker.rank for worker in self.cluster.select(asked)]

    def direct_view(self, targets: Targets = None, **_: Any) -> DirectView:
        """Return a view that has some engines, or all, do the same."""
        return DirectView(self.cluster, self._select(targets), single=isinstance(targets, int), block=self.block)

    __getitem__ = broadcast_view = direct_view

    def load_balanced_view(self, targets: Targets = None, **_: Any) -> LoadBalancedView:
        """Return a view that gives each task to the first free one of some engines, or of all."""
        return LoadBalancedView(self.cluster, self._select(targets), block=self.block)

    def executor(self, targets: Targets = None) -> ViewExecutor:
        """Return an executor of `concurrent.futures` over some engines, or all."""
        return self.load_balanced_view(targets).executor

    wait = staticmethod(wait_for)

    def wait_for_engines(self, n: int | None = None, **_: Any) -> None:
        """Raise if the cluster has fewer than ``n`` engines: all of them are up once it has started."""
        if n is not None and n > len(self):
            raise UsageError(f"the cluster has {len(self)} workers, and will not have {n}: start it with n={n}")

    def activate(self, targets: Targets = None, suffix: str = "") -> DirectView:
        """Run what ``%px`` is given on some engines, or on all; return their view."""
        return self.direct_view(targets).activate(suffix)

    def shutdown(self, **_: Any) -> None:
        """End the workers."""
        self.cluster.shutdown()


def _awaitable(method: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the awaitable twin of a method. The twin, too, blocks until it is done, which takes a second or two."""

    @functools.wraps(method)
    async def awaited(*args: P.args, **kwargs: P.kwargs) -> T:
        return method(*args, **kwargs)

    return awaited


class Cluster(Closed):
    """Starts, signals, restarts and ends the workers. Where one of them is needed and none runs, starts them."""

    def __init__(self, n: int | None = None, *, engines: str = "local", **_: Any) -> None:
        if engines != "local":
            raise UsageError(f"engines={engines!r}: nbdist starts workers on this host; they form a process group")
        self._n, self._workers = n, _workers(n)

    def start_cluster_sync(self, n: int | None = None, **_: Any) -> Cluster:
        """Start ``n`` workers, or as many as the constructor was given; return when all of them have answered."""
        self._workers = _workers(n or self._n).start()
        return self

    def connect_client_sync(self, **_: Any) -> Client:
        """Return a client of the workers."""
        return Client(self._workers)

    def start_and_connect_sync(self, n: int | None = None, **_: Any) -> Client:
        """Start the workers and return a client. ``%px`` runs on them, whether ``activate`` is given or not."""
        return self.start_cluster_sync(n).connect_client_sync()

    def stop_cluster_sync(self, *_: object) -> None:
        """End the workers."""
        self._workers.shutdown()

    def signal_engines_sync(self, signum: int) -> None:
        """Send a signal to all workers; SIGINT interrupts what they do."""
        if signum == signal.SIGINT:
            return self._workers.interrupt()
        for name in self._workers.start().names:
            self._workers.signal(name, signum)

    def restart_engines_sync(self) -> None:
        """Restart all workers, under their names and ranks."""
        self._workers.restart("all")

    start_cluster = _awaitable(start_cluster_sync)
    connect_client = _awaitable(connect_client_sync)
    start_and_connect = _awaitable(start_and_connect_sync)
    stop_cluster = _awaitable(stop_cluster_sync)
    signal_engines = _awaitable(signal_engines_sync)
    restart_engines = _awaitable(restart_engines_sync)
    __enter__, __aenter__ = start_and_connect_sync, start_and_connect
    __exit__, __aexit__ = stop_cluster_sync, stop_cluster


def _workers(n: int | None) -> Workers:
    """Describe a cluster of ``n`` workers, or one for each core that this process may use."""
    return nbdist.Cluster(n or len(os.sched_getaffinity(0)))
