"""A restart that runs out of time, or is interrupted, leaves nothing behind, and can be tried again."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

import nbdist
from nbdist.cluster.kernels.workers import StartError
from nbdist.cluster.spec import Spec

SUM = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == 2"


@pytest.fixture
def cluster(shared_cluster, own_variables):
    yield shared_cluster
    object.__setattr__(shared_cluster.spec, "timeout", Spec(2).timeout)


@pytest.mark.parametrize(
    "seconds", [0.0, 0.02, 0.1, *(pytest.param(n, marks=pytest.mark.soak) for n in (0.01, 0.05, 0.2))]
)
def test_a_restart_that_ran_out_of_time_can_be_repeated(cluster, seconds):
    """It may stop at any step: none of its processes is left, and the end of an old one does not end the new worker."""
    object.__setattr__(cluster.spec, "timeout", seconds)
    with contextlib.suppress(StartError):
        cluster.restart(["worker1"])
    object.__setattr__(cluster.spec, "timeout", 60.0)
    for _ in range(2):
        assert cluster.restart(["worker1"]) == ["worker1"]
        assert cluster.evaluate("rank") == [0, 1]
        assert cluster.find("worker1").lost is None


@contextlib.contextmanager
def interrupted_at(cluster, name, step):
    """Interrupt the block, as Ctrl-C does, when the worker reaches this step of its start."""

    def interrupt(reached, at):
        if (reached, at) == (name, step):
            cluster.progress = None
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # holds the kernel thread: the main thread cancels the restart before it proceeds

    cluster.progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        yield


def test_after_an_interrupted_restart_no_worker_is_half_started(cluster):
    for step in ("process", "kernel"):
        with interrupted_at(cluster, "worker1", step):
            cluster.restart("worker1")
        assert "did not become ready" in cluster.find("worker1").lost
        with pytest.raises(nbdist.WorkerLost, match="did not become ready"):
            cluster.execute("pass", 1)
        assert cluster.restart() == ["worker1"]
        cluster.execute(SUM, timeout=60)
    for step in ("rpc", "process group"):
        with interrupted_at(cluster, "worker1", step):
            cluster.restart("all")
        assert cluster.restart("worker1") == ["worker1"]
        assert cluster.awaited in ([], ["worker0"])  # worker0 may have been interrupted before the step "rpc"
        cluster.restart()
        assert [worker.state for worker in cluster.workers] == ["idle", "idle"]
        cluster.execute(SUM, timeout=60)
    with interrupted_at(cluster, "worker1", "rpc"):
        cluster.restart("worker1")
    if cluster.find("worker1").alive:  # else it was interrupted before it had joined
        cluster.execute(SUM, timeout=60)  # the group forms by itself


def test_a_worker_that_cannot_be_told_of_the_next_group_keeps_no_other_waiting(cluster):
    last = cluster.find("worker1")
    call = last.call
    last.call = lambda function: (_ for _ in ()).throw(nbdist.WorkerLost("worker1 cannot be reached"))
    with pytest.raises(nbdist.WorkerLost, match="cannot be reached"):
        cluster.rebuild_process_group()
    last.call = call
    cluster.execute("pass", timeout=60)  # worker0 does not wait for worker1
    cluster.rebuild_process_group()
    cluster.execute(SUM, timeout=60)
    assert len(list(Path(cluster.folder).glob("group-*"))) == 1
