"""`Team`: the workers of one cluster, by rank, by name and by target."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.spec import Spec
from nbdist.cluster.targets import parse_targets
from nbdist.errors import UnknownWorker
from nbdist.wire.messages import Record

Targets = str | int | Sequence[int | str] | None
"""The forms in which a method takes targets: see `Cluster`."""


class Team:
    """The workers of a cluster, dead ones included. A cluster that grows adds to `workers`."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._devices = spec.devices()
        self.workers = [self.make(rank) for rank in range(spec.count)]

    def make(self, rank: int) -> Worker:
        """Return a new worker of this rank. The id of a worker that joins later comes after the notebook's id."""
        first = 0 if self._spec.driver is None else 1
        if rank < self._spec.count:
            return Worker(f"worker{rank + first}", rank, rank + first, *self._devices[rank])
        return Worker(f"worker{rank + first}", rank, rank + 1, "cpu", None)

    @property
    def names(self) -> list[str]:
        """The names of the workers, in the order of their ranks."""
        return [worker.name for worker in self.workers]

    def find(self, name: str) -> Worker:
        """Return the worker called ``name``. Raises UnknownWorker if there is none."""
        for worker in self.workers:
            if worker.name == name:
                return worker
        raise UnknownWorker(f"this cluster has no worker {name!r}; its workers are {', '.join(self.names)}")

    def select(self, targets: Targets) -> list[Worker]:
        """Return the workers that ``targets`` name, as `Cluster.select` does."""
        if targets is None:
            return list(self.workers)
        if isinstance(targets, Sequence) and not isinstance(targets, str):
            targets = ",".join(map(str, targets)) or "[]"
        return [self.workers[rank] for rank in parse_targets(str(targets), self.names)]

    def with_record(self, record: Record) -> Worker | None:
        """Return the worker whose present agent has this record; None if there is none, as after a restart."""
        found = (worker for worker in self.workers if worker.name == record.name)
        return next((worker for worker in found if worker.incarnation in (None, record.incarnation)), None)
