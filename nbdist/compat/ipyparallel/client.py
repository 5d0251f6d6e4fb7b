"""Defines ipyparallel's classes for starting a cluster and connecting to it: `Cluster` and `Client`."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import nbdist
from nbdist.channel import machine
from nbdist.cluster.cluster import Cluster as Workers
from nbdist.cluster.targets import means_all
from nbdist.compat.ipyparallel import tasks
from nbdist.compat.ipyparallel.closed import Closed
from nbdist.compat.ipyparallel.results import wait_for
from nbdist.compat.ipyparallel.views import DirectView, LoadBalancedView, ViewExecutor
from nbdist.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")
Targets = int | str | slice | Sequence[int] | None
"""The ways to name engines: a rank, a slice or sequence of ranks, a target of ``%%remote``, or None for all."""


class Client(Closed):
    """Makes views of the notebook's cluster; if none runs, starts one with a worker for each core.

    Methods that take targets raise UnknownWorker or UsageError for engines that do not exist.
    ``notebooks/10_from_ipyparallel.ipynb`` shows it.
    """

    block = False
    """The `block` of the views that are made from now on: True if their `apply` and `map` wait for values."""

    def __init__(self, cluster: Workers | None = None, **_: Any) -> None:
        """Connect to ``cluster``, else to the notebook's, else to a new one; start the cluster if it does not run.

        Other arguments of ipyparallel are ignored. Raises UsageError if ``cluster`` has been shut down.
        """
        self.cluster = (cluster or Workers.current or _workers(None)).start()
        self.cluster.call_on_each(tasks.take_name)

    @property
    def ids(self) -> list[int]:
        """The engines' numbers, which are the workers' ranks."""
        return [worker.rank for worker in self.cluster.workers]

    def __len__(self) -> int:
        """Return the number of engines."""
        return len(self.ids)

    def __iter__(self) -> Iterator[DirectView]:
        """Yield a view of each engine."""
        return map(self.direct_view, self.ids)

    def _select(self, targets: Targets) -> list[int] | None:
        """Return the ranks of the engines in a target; None for all engines, also those that join later."""
        asked = self.ids[targets] if isinstance(targets, slice) else targets
        return None if means_all(targets) else [worker.rank for worker in self.cluster.select(asked)]

    def direct_view(self, targets: Targets = None, **_: Any) -> DirectView:
        """Return a view that gives each task to all of some engines, or of all. ``client[0:2]`` does so, too.

        A view of all, without targets or with ``"all"``, includes engines that join later; that of ``client[:]`` does
        not.
        """
        return DirectView(self.cluster, self._select(targets), single=isinstance(targets, int), block=self.block)

    __getitem__ = broadcast_view = direct_view

    def load_balanced_view(self, targets: Targets = None, **_: Any) -> LoadBalancedView:
        """Return a view that gives each task to one engine: the first free one of some engines, or of all.

        Without targets, or with ``"all"``, it uses engines that join later, too.
        """
        return LoadBalancedView(self.cluster, self._select(targets), block=self.block)

    def executor(self, targets: Targets = None) -> ViewExecutor:
        """Return a `concurrent.futures` executor: each call runs on the first free one of some engines, or of all."""
        return self.load_balanced_view(targets).executor

    wait = staticmethod(wait_for)

    def wait_for_engines(self, n: int | None = None, timeout: float | None = None, **_: Any) -> None:
        """Wait until there are n engines, at most ``timeout`` seconds; without one, at most the cluster's timeout.

        Returns at once if there are: a cluster has started all its engines, and others join only a cluster with a
        ``host``. Raises UsageError if there are fewer and none can join, StartError if too few have joined in time.
        """
        if n is not None and n > len(self) and not self.cluster.spec.may_grow:
            raise UsageError(f"the cluster has {len(self)} workers, and will not have {n}: start it with n={n}")
        self.cluster.wait_for_workers(n or 0, timeout=timeout if timeout and timeout > 0 else None)

    def activate(self, targets: Targets = None, suffix: str = "") -> DirectView:
        """Make ``%px`` run code on some engines, or on all; return their view.

        With the suffix "0", the magic is called ``%px0``. Raises UsageError outside of IPython.
        """
        return self.direct_view(targets).activate(suffix)

    def shutdown(self, **_: Any) -> None:
        """End all workers of the cluster; do nothing if they have ended. The notebook's own variables stay."""
        self.cluster.shutdown()


def _awaitable(method: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:

    @functools.wraps(method)
    async def awaited(*args: P.args, **kwargs: P.kwargs) -> T:
        # This blocks the event loop for the second or two in which workers start or end.
        return method(*args, **kwargs)

    return awaited


class Cluster(Closed):
    """Starts, signals, restarts and ends the workers of a notebook. Methods that need workers start them.

    As a context manager, it starts the workers, returns a `Client`, and ends the workers. Each method exists twice:
    with ``_sync``, and as an awaitable without it. ``notebooks/10_from_ipyparallel.ipynb`` shows it.
    """

    def __init__(self, n: int | None = None, *, engines: str = "local", **_: Any) -> None:
        """Describe a cluster of ``n`` workers, one for each core by default. Nothing is started yet.

        Raises UsageError for any ``engines`` but "local". Other arguments of ipyparallel are ignored.
        """
        if engines != "local":
            raise UsageError(f"engines={engines!r}: nbdist starts workers on this host only; leave engines out")
        self._n, self._workers = n, _workers(n)

    def start_cluster_sync(self, n: int | None = None, **_: Any) -> Cluster:
        """Start ``n`` workers, or as many as the constructor was given; return this cluster when all of them are ready.

        Raises UsageError if a cluster runs in this process already, StartError if workers are not ready in time.
        """
        self._workers = _workers(n or self._n).start()
        return self

    def connect_client_sync(self, **_: Any) -> Client:
        """Return a client of the workers; start them if they have never been started.

        Raises UsageError if they have been ended.
        """
        return Client(self._workers)

    def start_and_connect_sync(self, n: int | None = None, **_: Any) -> Client:
        """Start the workers and return a client. With the extension loaded, ``%px`` runs on them, ``activate`` or not.

        ``n`` is as in `start_cluster_sync`; all other arguments are ignored.
        """
        return self.start_cluster_sync(n).connect_client_sync()

    def stop_cluster_sync(self, *_: object) -> None:
        """End all workers; do nothing if none run. `start_cluster_sync` can start new ones."""
        self._workers.shutdown()

    def signal_engines_sync(self, signum: int) -> None:
        """Send a signal to all workers; SIGINT interrupts the code that they run.

        Workers that have never been started are started first. Raises UsageError if they have been ended.
        """
        if signum == signal.SIGINT:
            return self._workers.interrupt()
        for name in self._workers.start().names:
            self._workers.signal(name, signum)

    def restart_engines_sync(self) -> None:
        """Kill all workers and start them again, under their names and ranks, without their variables.

        Raises StartError if they are not ready in time. Workers that have never been started are started first. Raises
        UsageError if they have been ended.
        """
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
    return nbdist.Cluster(n or machine.cores())
