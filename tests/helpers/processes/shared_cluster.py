"""`SharedCluster`: two workers, for all tests of this process that only want a cluster of two.

The fixture `shared_cluster` gives them to a test, and fails the test that leaves something behind: see `remains`. They
end before a test that names what starts another cluster, and before a file whose tests do not use them, so that nobody
has to remember them; `is_shared_by` has one process run all files whose tests do. Variables that a test gives the
workers end with the fixture `own_variables`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    import nbdist

FIXTURE = "shared_cluster"
STARTERS = {"Cluster", "init_rpc", "initialize"}
"""Names that start the agent of a process: of nbdist."""
PATIENCE = 10.0
"""Seconds in which cells, references and threads that a test has left to themselves must have ended."""
_CALL = "__import__('helpers.suite.remains', fromlist=['_'])."


class SharedCluster:
    """Two workers with a process group, which start when a test first wants them."""

    def __init__(self) -> None:
        self.cluster: nbdist.Cluster | None = None
        self.files: set[Path] = set()
        """The files with tests that use it, of those that were collected."""
        self.others: set[str] = set()
        """The tests that may start an agent for this process, which has one at a time."""
        self._here: dict[str, str] = {}
        self._known: list[dict[str, str]] = []

    def take(self) -> nbdist.Cluster:
        """Return the cluster, all of whose workers live; start it, or the workers that the test before has lost."""
        import nbdist  # not before there is the directory
        from helpers.suite import remains

        if self.cluster is not None and not self.cluster.running:  # a test has shut it down
            self.end()
        if self.cluster is None:
            self.cluster = nbdist.Cluster(2).start()
            self._known = self._looks()
        elif any(worker.lost for worker in self.cluster.workers):
            self.cluster.restart(process_group=True)
        self._here, self._hooks = remains.look(), remains.python_hooks()
        return self.cluster

    def end(self) -> None:
        """End the workers, if there are any; the next test that wants two starts others."""
        cluster, self.cluster = self.cluster, None
        if cluster is not None:
            cluster.shutdown()

    def note(self, item: pytest.Item, names: set[str]) -> None:
        """Note whether a test that was collected uses the workers, or may start others: it uses these names."""
        if FIXTURE in item.fixturenames:
            self.files.add(item.path)
        elif names & STARTERS:
            self.others.add(item.nodeid)

    def make_way(self, item: pytest.Item) -> None:
        """End the workers before a test that may start others, and before a file whose tests do not use them."""
        if item.path not in self.files or item.nodeid in self.others:
            self.end()

    def remove_variables(self) -> None:
        """Delete the variables of the workers' cells that were not there at first."""
        with contextlib.suppress(Exception):  # of a worker that is busy or dead: `left` says so
            self._ask(f"remove_variables({self._known[0]!r})")

    def left(self) -> list[str]:
        """Return in words what a test has left on the workers and in this process, which then is put right."""
        from helpers.suite import remains

        assert self.cluster is not None
        if not self.cluster.running:
            return []
        deadline, collect = time.monotonic() + PATIENCE, False
        while True:
            self.cluster.kernel_thread.run(asyncio.sleep(0)).result(60)  # cells sent without waiting are there now
            busy = [f"{worker.name}: a cell that runs" for worker in self.cluster.workers if worker.cells]
            here = remains.changes(self._here, remains.look(collect))
            here += [f"the cluster's {name}" for name in ("progress", "on_joined") if getattr(self.cluster, name)]
            changes = {"": here}
            for worker, known, now in zip(self.cluster.workers, self._known, self._looks(collect), strict=True):
                changes[f"{worker.name}: "] = remains.changes(known, now) if now else []
            every = [change for each in changes.values() for change in each]
            if not busy and not every:
                return []
            if time.monotonic() > deadline or not (busy or all(map(remains.may_end, every))):
                break
            collect = True
            time.sleep(0.05)
        self.end()
        remains.put_right(self._here, self._hooks)
        return busy + [where + change for where, each in changes.items() for change in each]

    def _looks(self, collect: bool = False) -> list[dict[str, str]]:
        """Return what is on each worker; nothing for a dead or busy one."""
        assert self.cluster is not None
        answers = self._ask(f"look({collect})")
        return [answers.get(worker.rank, {}) for worker in self.cluster.workers]

    def _ask(self, call: str) -> dict[int, Any]:
        """Return what a function of `remains` returns in a cell of each idle worker, by rank."""
        import nbdist

        assert self.cluster is not None
        idle = [worker.rank for worker in self.cluster.workers if not worker.lost and not worker.cells]
        try:
            return dict(zip(idle, self.cluster.evaluate(_CALL + call, idle, timeout=60), strict=True)) if idle else {}
        except nbdist.WorkerLost:  # the test has killed it just now
            return self._ask(call)


@cache
def is_shared_by(file: Path) -> bool:
    """Return whether a file has tests that use the shared cluster; the process that hands tests out collects none."""
    return FIXTURE in file.read_text() and file.stem != f"test_{FIXTURE}"  # whose program has a process of its own


SHARED_CLUSTER = SharedCluster()
