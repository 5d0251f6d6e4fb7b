"""Reads everything that the workers of a cluster have printed: their `PrintLog`, of one cell or of all."""

from __future__ import annotations

from nbdist.channel.resources import refusals_in_words
from nbdist.cluster.cluster import Cluster
from nbdist.cluster.output.print_log import Printed

__all__ = ["read_logs"]


def read_logs(cluster: Cluster, targets: str | None, cell: int | None) -> list[Printed]:
    """Return the print logs of workers, for one cell or for all. They can be read while the workers print on.

    Raises:
        UnknownWorker: The cluster has no such worker.
        ResourceError: Too many files are open.
    """

    async def read() -> list[Printed]:
        return [worker.print_log.read(cell) for worker in workers if worker.print_log is not None]

    workers = cluster.select(targets)
    with refusals_in_words("the workers' print logs cannot be read"):
        return cluster.kernel_thread.run(read()).result()
