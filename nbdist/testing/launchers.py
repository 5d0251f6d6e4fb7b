"""`LauncherContract`: the tests that every launcher passes, through a cluster whose workers it starts."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbdist.errors import NbdistError, WorkerLost

if TYPE_CHECKING:
    from nbdist.cluster.cluster import Cluster

_SOON = 20.0  # seconds for which a test waits at most; far more than it needs


class LauncherContract:
    """Tests of a launcher, for a subclass; ``cluster``, a fixture, has two workers. They fail by AssertionError.

    An error of the cluster, such as WorkerLost or GroupError, fails a test as well. The fixture must start the cluster,
    with a process group. A test that passes leaves it as it was: with two idle workers.

    ``docs/howto/several_hosts.md`` shows a test of a `LauncherContract`.
    """

    def test_cells_run_and_show_their_output(self, cluster: Cluster) -> None:
        """A cell runs on all workers of ``cluster``, and its output arrives."""
        cell = cluster.execute("print('rank', rank, 'of', world_size)")
        shown = "".join(_texts(cell))
        assert "rank 0 of 2" in shown
        assert "rank 1 of 2" in shown

    def test_workers_call_each_other_and_the_notebook_calls_them(self, cluster: Cluster) -> None:
        """Calls go between any two members of ``cluster``, with tensors small and large."""
        import torch

        from nbdist import rpc

        assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist() == [2.0, 2.0]
        large = "rpc.rpc_sync('worker1', torch.add, args=(torch.ones(1_000_000), 1)).sum().item()"
        assert cluster.evaluate(large, "worker0") == 2_000_000.0

    def test_the_process_group_has_all_workers(self, cluster: Cluster) -> None:
        """A collective gives the same sum on all workers of ``cluster``."""
        cluster.execute("total = torch.tensor(float(rank + 1)); dist.all_reduce(total)")
        assert [float(total) for total in cluster.pull("total")] == [3.0, 3.0]
        assert cluster.backend in ("gloo", "nccl", "cpu:gloo,cuda:nccl")

    def test_an_interrupt_ends_a_cell(self, cluster: Cluster) -> None:
        """An interrupt ends an endless loop on a worker of ``cluster``, and the worker runs later cells."""
        cell = cluster.execute("while True: pass", "worker0", block=False)
        _until(lambda: cell.parts["worker0"].began)
        cell.cancel()
        with contextlib.suppress(NbdistError, KeyboardInterrupt):
            cell.wait(_SOON)
        assert cell.parts["worker0"].done
        assert cluster.evaluate("1 + 1", "worker0") == 2

    def test_the_host_tells_where_a_worker_is_that_does_not_answer(self, cluster: Cluster) -> None:
        """A probe of ``cluster`` returns the frames of a worker that holds the GIL, its memory and its CPU time."""
        cell = cluster.execute("import ctypes\nctypes.PyDLL(None).sleep(2)", "worker0", block=False)
        _until(lambda: cell.parts["worker0"].began)
        time.sleep(0.2)  # until it is in C: nothing reports that
        found = cluster.probe("worker0").result(_SOON)
        assert "line 2" in found.frames
        assert found.memory is None or found.memory > 1 << 20
        assert found.cpu_seconds is None or found.cpu_seconds > 0
        cell.wait(_SOON)

    def test_the_end_of_a_worker_is_noticed_and_explained(self, cluster: Cluster) -> None:
        """The error of a cell says how its worker of ``cluster`` ended; the worker starts again with its rank."""
        for code, said in (
            ("import os; os._exit(3)", "exited with code 3"),
            ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
            ("import os; os.write(2, b'Fatal Python error: on purpose\\n'); os.abort()", "on purpose"),
        ):
            cell = cluster.execute(code, "worker1", block=False)
            _until(lambda cell=cell: cell.parts["worker1"].done)  # type: ignore[misc]
            error = cell.error()
            assert isinstance(error, WorkerLost)
            assert said in str(error)
            assert cluster.find("worker1").lost
            assert cluster.restart() == ["worker1"]
            assert cluster.evaluate("rank", "worker1") == 1  # a new process, with the old rank
            self.test_the_process_group_has_all_workers(cluster)

    def test_a_worker_that_is_restarted_has_a_new_process(self, cluster: Cluster) -> None:
        """A restart of a living worker of ``cluster`` ends its process, so its variables are gone."""
        cluster.execute("here = 1")
        cluster.restart("worker0")
        assert cluster.evaluate("'here' in globals()", "worker0") is False
        assert cluster.evaluate("'here' in globals()", "worker1") is True
        assert cluster.names == ["worker0", "worker1"]

    def test_much_output_arrives_whole_and_in_order(self, cluster: Cluster) -> None:
        """Megabytes of output of a worker of ``cluster`` arrive: every line, in order."""
        cell = cluster.execute("for i in range(20_000): print(f'{i:0100d}')", "worker1")
        lines = "".join(_texts(cell)).split()
        assert [int(line) for line in lines] == list(range(20_000))

    def test_a_display_arrives_as_it_was_sent(self, cluster: Cluster) -> None:
        """A display of a worker of ``cluster`` arrives with its data."""
        cell = cluster.execute("from IPython.display import display; display({'text/plain': 'shown'}, raw=True)", 0)
        assert "shown" in "".join(_texts(cell))


def _texts(cell: Any) -> list[str]:
    outputs = itertools.chain.from_iterable(cell.outputs.values())
    return [output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs]


def _until(happened: Callable[[], object]) -> None:
    """Wait until something has happened; raise AssertionError if it does not happen soon."""
    deadline = time.monotonic() + _SOON
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
