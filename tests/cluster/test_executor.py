"""Functions called on workers by an executor of `concurrent.futures`, over a real cluster."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, as_completed, wait
from pathlib import Path

import pytest
import torch
from helpers.waiting import wait_until

import nbdist

FUNCTIONS = """
import os, time

def hold_until(path, value=None):
    open(f"{path}.begun", "w").close()
    while not os.path.exists(path):
        time.sleep(0.01)
    return value

def begin(order, number):
    order.append(number)
    time.sleep(0.001)
    order.append(number)
"""


@pytest.fixture
def cluster(shared_cluster, own_variables):
    shared_cluster.execute(FUNCTIONS)
    return shared_cluster


def pids(cluster):
    return [worker.pid for worker in cluster.workers]


def kill(worker):
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not worker.alive)


def lanes():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("nbdist-tasks")}


def test_it_is_an_executor_of_pythons(cluster):
    with cluster.executor() as pool:
        assert isinstance(pool, Executor)
        assert list(pool.map(pow, range(7), [2] * 7)) == [number**2 for number in range(7)]
        tasks = [pool.submit(torch.add, torch.ones(2), number) for number in range(3)]
        assert {task.result().sum().item() for task in as_completed(tasks, 60)} == {2, 4, 6}


def test_a_task_knows_who_ran_it_and_when(cluster):
    task = cluster.executor(1).submit(os.getpid)
    assert task.result(60) == pids(cluster)[1]
    assert task.rank == 1
    assert task.submitted <= task.started <= task.completed <= task.received
    assert task.seconds == (task.completed - task.started).total_seconds()
    failed = cluster.executor(0).submit(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result(60)
    assert (failed.rank, failed.started, failed.seconds) == (0, None, 0)
    assert failed.received is not None


def test_a_task_that_has_ended_keeps_no_arguments(cluster):
    argument = torch.ones(3)
    gone = weakref.ref(argument)
    task = cluster.executor().submit(torch.sum, argument)
    del argument
    assert task.result(60) == 3
    wait_until(lambda: gc.collect() >= 0 and gone() is None)


def test_a_task_goes_to_who_is_free(cluster, tmp_path):
    pool, path = cluster.executor(), tmp_path / "release"
    slow = pool.submit(lambda path: hold_until(path, os.getpid()), str(path))  # noqa: F821
    wait_until(lambda: os.path.exists(f"{path}.begun"))
    (quick,) = set(pool.map(lambda _: os.getpid(), range(8)))
    assert not slow.done()
    path.touch()
    assert {slow.result(60), quick} == set(pids(cluster))


def test_one_task_at_a_time_in_order_after_cells(cluster):
    cluster.execute("import time; time.sleep(0.3); order = []", 0, block=False)
    tasks = [cluster.executor(0).submit(lambda number: begin(order, number), number) for number in range(20)]  # noqa: F821
    assert [task.result(60) for task in tasks] == [None] * 20
    assert cluster.pull("order", 0) == [step for number in range(20) for step in (number, number)]


def test_a_task_that_has_not_begun_can_be_cancelled(cluster, tmp_path):
    pool, path = cluster.executor("worker1"), tmp_path / "release"
    cluster.execute("ran = []", 1)
    running = pool.submit(lambda path: hold_until(path, 5), str(path))  # noqa: F821
    dropped = pool.submit(lambda: ran.append(1))  # noqa: F821
    wait_until(lambda: os.path.exists(f"{path}.begun"))
    assert not running.cancel()
    assert dropped.cancel()
    path.touch()
    assert running.result(60) == 5
    with pytest.raises(CancelledError):
        dropped.result(60)
    assert pool.submit(lambda: ran).result(60) == []  # noqa: F821


def test_shutdown_waits_and_takes_no_more(cluster, tmp_path):
    path = tmp_path / "release"
    with cluster.executor(0) as pool:
        running = pool.submit(lambda path: hold_until(path, 5), str(path))  # noqa: F821
        left = pool.submit(abs, -1)
        wait_until(lambda: os.path.exists(f"{path}.begun"))
        pool.shutdown(wait=False, cancel_futures=True)
        assert left.cancelled()
        assert not running.done()
        with pytest.raises(nbdist.UsageError, match=r"has been shut down; cluster\.executor\(\)"):
            pool.submit(abs, -1)
        path.touch()
    assert running.done()
    assert running.result() == 5


def test_no_workers_are_no_executor(cluster):
    with pytest.raises(nbdist.UsageError, match="names no worker"):
        cluster.executor([])
    with pytest.raises(nbdist.UsageError, match="names no worker"):
        cluster.execute("1", [])


def test_arguments_that_cannot_be_sent_fail_the_task_alone(cluster):
    pool = cluster.executor()
    with pytest.raises(nbdist.EncodeError):
        pool.submit(abs, (each for each in "ab")).result(60)
    assert pool.submit(abs, -1).result(60) == 1


def test_tasks_of_a_worker_that_dies_go_to_one_that_was_restarted_meanwhile(cluster, tmp_path):
    path = tmp_path / "never"
    kill(cluster.workers[0])
    pool = cluster.executor()
    running = pool.submit(lambda path: hold_until(path), str(path))  # noqa: F821
    left = [pool.submit(os.getpid) for _ in range(3)]
    wait_until(lambda: os.path.exists(f"{path}.begun"))
    cluster.restart()
    kill(cluster.workers[1])
    with pytest.raises(nbdist.WorkerLost):
        running.result(60)
    assert {task.result(60) for task in left} == {cluster.workers[0].pid}
    with pytest.raises(nbdist.WorkerLost):
        cluster.executor(1).submit(os.getpid).result(60)
    cluster.restart()


def test_a_worker_that_runs_a_cell_takes_no_task_from_others(cluster, tmp_path):
    path = tmp_path / "release"
    cluster.execute(FUNCTIONS)
    cell = cluster.execute(f"hold_until({str(path)!r})", 0, block=False)
    wait_until(lambda: os.path.exists(f"{path}.begun"))
    tasks = [cluster.executor().submit(os.getpid) for _ in range(20)]
    assert [task.result(60) for task in tasks] == [cluster.workers[1].pid] * 20
    dropped, own = (cluster.executor(0).submit(os.getpid) for _ in range(2))
    assert dropped.cancel(), "nobody has taken it"
    path.touch()
    cell.wait(60)
    assert own.result(60) == cluster.workers[0].pid


@pytest.fixture
def silent_launcher(cluster):
    """Stops the process that reports the ends of workers, so that only their sockets tell that they have died."""
    parent = int(Path(f"/proc/{cluster.workers[0].pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGSTOP)
    yield
    os.kill(parent, signal.SIGCONT)
    wait_until(lambda: not cluster.workers[0].alive)
    cluster.restart()


def lose(worker, agent):
    """Kill a worker, and wait until the agent knows of its death."""
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: agent.member(worker.incarnation) is None)


def test_a_worker_whose_death_only_its_sockets_have_told_takes_no_task(cluster, silent_launcher, tmp_path):
    path, pool = tmp_path / "release", cluster.executor()
    cell = cluster.execute(f"hold_until({str(path)!r})", 1, block=False)
    wait_until(lambda: os.path.exists(f"{path}.begun"))
    lose(cluster.workers[0], cluster.agent)
    assert cluster.workers[0].alive, "the test is about the time before this is known"
    tasks = [pool.submit(os.getpid) for _ in range(8)]
    assert wait(tasks, 1, FIRST_COMPLETED).done == set()
    path.touch()
    cell.wait(60)
    assert [task.result(60) for task in tasks] == [cluster.workers[1].pid] * 8


class LosesItsWorker:
    """An argument whose encoding, at first, kills the worker that is to get it."""

    lost = ()
    """The thread that has encoded it first."""

    def __init__(self, cluster):
        self.cluster = cluster

    def __reduce__(self):
        if not LosesItsWorker.lost:
            LosesItsWorker.lost = (threading.current_thread().name,)
            lose(self.cluster.workers[0], self.cluster.agent)
        return int, (7,)


def test_a_task_whose_worker_is_lost_before_the_call_is_sent_goes_to_another(cluster, silent_launcher, tmp_path):
    path, pool = tmp_path / "release", cluster.executor()
    cell = cluster.execute(f"hold_until({str(path)!r})", 1, block=False)
    wait_until(lambda: os.path.exists(f"{path}.begun"))
    task = pool.submit(abs, LosesItsWorker(cluster))
    wait_until(lambda: LosesItsWorker.lost == ("nbdist-tasks-worker0",))
    path.touch()
    cell.wait(60)
    assert (task.result(60), task.rank) == (7, 1)


def test_a_task_that_has_begun_is_not_run_again(cluster, tmp_path):
    def fail(path):
        with open(path, "a") as file:
            file.write("once ")
        raise nbdist.WorkerLost("a worker that the function has called is gone")

    with pytest.raises(nbdist.WorkerLost, match="has called is gone"):
        cluster.executor().submit(fail, tmp_path / "log").result(60)
    assert (tmp_path / "log").read_text() == "once "


def test_a_task_waits_for_a_worker_that_starts_again(cluster):
    kill(cluster.workers[0])
    restart = threading.Thread(target=cluster.restart, args=(0,))
    restart.start()
    wait_until(lambda: cluster.workers[0].alive)
    assert cluster.workers[0].state != "idle"
    task = cluster.executor(0).submit(os.getpid)
    restart.join(60)
    assert task.result(60) == cluster.workers[0].pid


def test_a_cluster_that_has_ended_fails_what_is_left(cluster, tmp_path):
    path = tmp_path / "never"
    cluster.execute(FUNCTIONS)
    pool = cluster.executor(0)
    tasks = [pool.submit(lambda path: hold_until(path), str(path)) for _ in range(3)]  # noqa: F821
    wait_until(lambda: os.path.exists(f"{path}.begun"))
    assert {"nbdist-tasks-worker0", "nbdist-tasks-worker1"} <= lanes()
    cluster.shutdown()  # this test is the last
    for task in tasks:
        assert isinstance(task.exception(60), nbdist.NbdistError)
    assert isinstance(pool.submit(abs, 1).exception(60), nbdist.UsageError)
    wait_until(lambda: not lanes())
    with pytest.raises(nbdist.UsageError, match="has been shut down"):
        cluster.executor()
