"""The workload of a cluster whose cells all-reduce."""

from __future__ import annotations

import itertools
import os
import random
import time

import nbdist
from chaos import recorder
from chaos.ledger import Answered, Noted, Sent
from nbdist import Cluster

LIMIT = 20.0
_CELL = """
import torch, torch.distributed as dist
from chaos import tasks
t = torch.full(({size},), float(rank + 1))
for _ in range({rounds}):
    dist.all_reduce(t)
tasks.enter("{call}/" + rpc.get_worker_info().name, t[0].item())
"""


class Collectives:
    """Cells in which all workers take part."""

    EXPECTED = (nbdist.NbdistError, RuntimeError)

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        self._cluster = cluster
        self._dice = dice
        self._numbers = itertools.count()
        self._stuck = False

    def step(self) -> None:
        """Run a cell on all workers, and compare what they come to."""
        call = f"driver/{os.getpid()}/{next(self._numbers)}"
        rounds, size, count = self._dice.randint(1, 5), self._dice.choice((4, 100_000)), len(self._cluster.names)
        for worker in self._cluster.names:
            entry = Sent(f"{call}/{worker}", "driver", os.getpid(), worker, "cell", LIMIT, time.monotonic())
            recorder.write(entry)
        cell = self._cluster.execute(_CELL.format(size=size, rounds=rounds, call=call), block=False)
        deadline = time.monotonic() + LIMIT
        while not cell.done and time.monotonic() < deadline:
            time.sleep(0.01)
        error: BaseException | None = None
        if not cell.done:
            self._stuck = True
            recorder.write(Noted("stuck in a collective", "cluster", f"a cell stands still for {LIMIT:g} s: {cell!r}"))
            error = TimeoutError("the cell stands still")
        else:
            try:
                cell.wait()
            except self.EXPECTED as failed:
                error = failed
        value = recorder.digest(float(count ** (rounds - 1) * count * (count + 1) / 2)) if error is None else None
        text = None if error is None else f"{type(error).__name__}: {str(error)[:300]}"
        for worker in self._cluster.names:
            recorder.write(Answered(f"{call}/{worker}", value, text, False, time.monotonic()))
        if error is not None:
            raise nbdist.WorkerLost("the cell failed") from error

    def heal(self) -> None:
        """Replace the dead and form the group anew; where workers stand still, replace all."""
        began, self._stuck, all_of_them = time.monotonic(), True, self._stuck
        try:
            if all_of_them or any(worker.lost for worker in self._cluster.workers):
                self._cluster.restart("all" if all_of_them else None, process_group=True)
            else:
                self._cluster.rebuild_process_group()
            self._stuck = False
        finally:
            if self._stuck and time.monotonic() - began > LIMIT:
                text = f"after {time.monotonic() - began:.0f} s; {self._cluster!r}"
                recorder.write(Noted("group did not form", "cluster", text))

    def let_go(self) -> None:
        """Hold nothing."""
