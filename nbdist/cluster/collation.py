"""`Collation`: asks the workers of a cluster what they have called in their process groups, and compares it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from nbdist.cluster.group_history import GroupHistory
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.partings import Parting, find_partings
from nbdist.errors import NbdistError
from nbdist.rpc.agent import Agent
from nbdist.rpc.futures import Future

__all__ = ["Collation"]

_ANSWER_WITHIN = 0.4
"""Seconds for the workers to answer. A worker that holds the GIL cannot, and nothing is claimed of it."""


class Collation:
    """Finds where the members of the workers' process groups part; ``agent`` is this process's.

    ``workers`` are all workers of the cluster, by rank.
    """

    def __init__(self, workers: Sequence[Worker], agent: Agent) -> None:
        self._workers, self._agent = workers, agent

    def ask(self) -> dict[str, Future[Sequence[GroupHistory]]]:
        """Ask all living workers; return their answers, by name, without waiting for them."""
        asked = {}
        for worker in self._workers:
            if worker.alive:
                with contextlib.suppress(NbdistError):  # it is dying
                    at = self._agent.at(worker.name, "collectives")
                    asked[worker.name] = at.call("histories", timeout=_ANSWER_WITHIN)
        return asked

    def conclude(self, asked: Mapping[str, Future[Sequence[GroupHistory]]]) -> list[Parting]:
        """Return where the members part, as far as the answers that have arrived tell."""
        told: dict[str, Sequence[GroupHistory]] = {}
        for name, answer in asked.items():
            if answer.done():
                with contextlib.suppress(Exception):  # the worker died, or the answer is late
                    told[name] = answer.value()
        return find_partings(told, [worker.name for worker in self._workers])

    def partings(self) -> list[Parting]:
        """Ask all living workers, wait for their answers, and return where the members part."""
        asked = self.ask()
        deadline = time.monotonic() + _ANSWER_WITHIN
        for answer in asked.values():
            with contextlib.suppress(Exception):  # the worker died, or the answer is late
                answer.wait(max(0.0, deadline - time.monotonic()))
        return self.conclude(asked)
