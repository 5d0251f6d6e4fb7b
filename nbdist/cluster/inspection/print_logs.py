"""Reads everything that the workers of a cluster have printed: their `PrintLog`, of one cell or of all."""

from __future__ import annotations

from nbdist.channel.resources import refusals_in_words
from nbdist.cluster.cluster import Cluster
from nbdist.cluster.output.print_log import Printed


def read_logs(cluster: Cluster, targets: str | None, cell: int | None) -> list[Printed]:
    """Return a `Printed`, with the lines it has printed, for each worker that has a log, in the order of the targets.

    ``cell`` is the number of the one cell to read, as in tracebacks (``In[3]``); None for all. Without output of that
    cell, a `Printed` has no lines. Asks the kernel thread and waits for it. The files stay readable while the workers
    print on.

    Raises:
        UnknownWorker: The cluster has no such worker.
        UsageError: The targets cannot be read.
        ResourceError: Too many files are open.
    """

    async def read() -> list[Printed]:
        return [worker.print_log.read(cell) for worker in workers if worker.print_log is not None]

    workers = cluster.select(targets)
    with refusals_in_words("the workers' print logs cannot be read"):
        return cluster.kernel_thread.run(read()).result()
