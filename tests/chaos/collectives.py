"""The workload of a cluster whose cells all-reduce, or broadcast what is large enough to be cut in half by a death."""

from __future__ import annotations

import itertools
import os
import random
import time

from helpers.processes.stacks import collect

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
    {operation}
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
        operation, expected = "dist.all_reduce(t)", count ** (rounds - 1) * count * (count + 1) / 2
        if self._dice.random() < 0.3:
            operation, size, expected = "dist.broadcast(t, src=1)", 4_000_000, 2.0
        for worker in self._cluster.names:
            entry = Sent(f"{call}/{worker}", "driver", os.getpid(), worker, "cell", LIMIT, time.monotonic())
            recorder.write(entry)
        code = _CELL.format(size=size, rounds=rounds, call=call, operation=operation)
        cell = self._cluster.execute(code, block=False)
        deadline = time.monotonic() + LIMIT
        while not cell.done and time.monotonic() < deadline:
            time.sleep(0.01)
        error: BaseException | None = None
        if not cell.done:
            self._stuck = True
            file = recorder.folder() / f"stacks-{call.rpartition('/')[2]}"
            # The workers do not `listen`, so their Python frames are not to be had.
            file.write_text(collect([worker.pid for worker in self._cluster.workers if worker.pid], python=False))
            text = f"a cell stands still for {LIMIT:g} s: {cell!r}; C frames in {file}"
            recorder.write(Noted("stuck in a collective", "cluster", text))
            error = TimeoutError("the cell stands still")
        else:
            try:
                cell.wait()
            except self.EXPECTED as failed:
                error = failed
        value = recorder.digest(expected) if error is None else None
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
