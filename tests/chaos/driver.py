"""The driver of a notebook cluster in a storm: it works, starts killed workers anew, and looks for leaks at the end.

python -m chaos.driver WORKLOAD SEED
"""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from typing import Any

from helpers.processes import stacks

import nbdist
from chaos import phases, recorder, tasks
from chaos.leaks import MUST_BE_NOTHING, wait_for_nothing
from chaos.ledger import Noted, Settled
from nbdist import Cluster, rpc
from nbdist.rpc.api import current_agent

WORKERS = 3
_START = 40.0
"""Seconds within which workers must start and form a group; shorter than a phase of the storm."""
NAME = "driver"


def workload(name: str, cluster: Cluster, dice: random.Random) -> Any:
    """Return what runs in the storm; each imports what it needs, of which some is large."""
    if name == "collectives":
        from chaos.collectives import Collectives

        return Collectives(cluster, dice)
    if name == "pipelines":
        from chaos.pipelines import Pipelines

        return Pipelines(cluster, dice)
    from chaos.swarms import Swarms

    return Swarms(cluster, dice)


def main() -> None:
    """Take part in the storm, phase by phase."""
    name, seed = sys.argv[1], sys.argv[2]
    stacks.listen()
    recorder.ready()
    preload = ["nbdist.swarm"] if name == "swarms" else []
    cluster = Cluster(WORKERS, backend="gloo" if name == "collectives" else "none", timeout=_START, preload=preload)
    cluster.start()
    work = workload(name, cluster, random.Random(seed))
    _announce(cluster)
    phases.arrive(NAME, os.getpid())
    while not phases.has_come(phases.SETTLE):
        _step(cluster, work)
    recorder.write(Settled(NAME, os.getpid(), time.monotonic()))
    phases.mark(phases.SETTLE, NAME)
    phases.wait_for(phases.CHECK)
    try:
        _heal(cluster, work)
        work.step()
    except BaseException:
        recorder.write(Noted("failed afterwards", NAME, traceback.format_exc()[-1500:]))
    phases.mark(phases.CHECK, NAME)
    phases.wait_for(phases.RELEASE)
    try:
        work.let_go()
        wait_for_nothing(NAME, lambda: tasks.left(MUST_BE_NOTHING))
        for worker in cluster.names:
            wait_for_nothing(worker, lambda worker=worker: rpc.rpc_sync(worker, tasks.left, args=(tasks.LASTING,)))
    except BaseException:
        recorder.write(Noted("failed afterwards", NAME, traceback.format_exc()[-1500:]))
    phases.mark(phases.RELEASE, NAME)
    phases.wait_for(phases.LEAVE)
    cluster.shutdown()


def _announce(cluster: Cluster) -> None:
    """Say which processes the workers are now."""
    for worker in cluster.workers:
        if worker.pid is not None:
            phases.arrive(worker.name, worker.pid)


def _step(cluster: Cluster, work: Any) -> None:
    """Work once; only the errors that a storm explains may come, and then the dead are replaced."""
    try:
        try:
            work.step()
        except work.EXPECTED as error:
            if isinstance(error, AssertionError):
                raise
            _heal(cluster, work)
    except AssertionError as error:
        recorder.write(Noted("wrong", NAME, str(error)[:500]))
    except BaseException:
        recorder.write(Noted("other error", NAME, traceback.format_exc()[-1500:]))
        time.sleep(0.5)


def _heal(cluster: Cluster, work: Any) -> None:
    """Start anew whoever has died, also while they are started, and let the workload make what died with them."""
    for _ in range(10):
        try:
            work.heal()
            _announce(cluster)
            return
        except (nbdist.NbdistError, RuntimeError) as error:
            failed = error
            time.sleep(0.2)
            current_agent()  # or the cluster itself is gone
    raise failed


if __name__ == "__main__":
    main()
