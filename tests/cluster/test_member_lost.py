"""A worker dies in a collective: each survivor in a group with the dead one fails with WorkerLost (issue H, item 6).

In each test worker2 is killed while the survivors are in a collective that cannot end without a member that lives.
"""

import os
import random
import signal
import time

import pytest
from helpers.processes import workers
from helpers.waiting import wait_for_error, wait_for_marks, wait_until

import nbdist

LIMIT = 15
"""Seconds within which a survivor has left the collective: gloo's own limit is 30 minutes."""


@pytest.fixture(scope="module")
def cluster():
    with nbdist.Cluster(3) as cluster:
        cluster.execute("import os, time; from datetime import timedelta")
        yield cluster


@pytest.fixture
def three(cluster):
    """Three living workers in one process group, whatever the test before did."""
    while _killed:  # their cells may have failed before the notebook has heard of it
        wait_until(lambda: _killed[-1].lost, "the news of a death")
        _killed.pop()
    if any(worker.lost for worker in cluster.workers):
        cluster.restart(process_group=True)
        cluster.execute("import os, time; from datetime import timedelta")
    return cluster


_killed = []


def kill(cluster, name="worker2"):
    _killed.append(cluster.find(name))
    os.kill(_killed[-1].pid, signal.SIGKILL)


def expect_lost(error):
    assert isinstance(error, nbdist.WorkerLost), error
    assert "worker2" in str(error)
    assert "`%dist_restart worker2` starts it again, and forms the process group anew once all" in str(error)


def at(tmp_path):
    """Code with which a worker says that it is at the collective."""
    return f"open(f'{tmp_path}/worker{{rank}}', 'w').close()"


COLLECTIVES = {
    "barrier": "dist.barrier()",
    "all_reduce": "dist.all_reduce(torch.ones(4))",
    "an asynchronous all_reduce": "dist.all_reduce(torch.ones(4), async_op=True).wait()",
    "recv from a living worker": "dist.recv(torch.ones(4), src=0)",
    "send to a living worker": "dist.send(torch.ones(10_000_000), dst=0)",
    "objects": "dist.all_gather_object([None] * 3, 'mine')",
}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_worker_that_waits_for_a_living_one_leaves_with_worker_lost(three, tmp_path, collective):
    # Rank 0 is late, and it lives: nothing that gloo itself notices ends worker1's wait.
    late = three.execute("time.sleep(600)", 0, block=False)
    cell = three.execute(f"{at(tmp_path)}\n{COLLECTIVES[collective]}", 1, block=False)
    wait_for_marks(tmp_path, "worker1")
    kill(three)
    error = wait_for_error(cell)
    late.cancel()
    wait_for_error(late)
    expect_lost(error)
    shown = "\n".join(error.traceback)
    assert "torch's error was RuntimeError: " in shown
    assert "gloo" in shown
    assert "GLHF" not in shown
    assert "distributed_c10d.py" not in shown


def test_all_that_wait_leave_and_the_cell_is_lost_as_a_whole(three, tmp_path):
    cell = three.execute(f"{at(tmp_path)}\nif rank == 2: time.sleep(600)\ndist.barrier()", block=False)
    wait_for_marks(tmp_path, "worker0", "worker1", "worker2")
    kill(three)
    error = wait_for_error(cell)
    assert type(error).__name__ == "WorkerLost", error
    assert {error.worker: error.name for error in error.errors} == dict.fromkeys(three.names, "WorkerLost")


def test_a_late_one_finds_the_collective_over(three, tmp_path):
    kill(three)
    cell = three.execute("time.sleep(1); dist.barrier()", [0, 1], block=False)
    error = wait_for_error(cell)
    assert isinstance(error, nbdist.WorkerLost), error
    assert "worker2" in str(error)


def test_inside_of_a_users_try_the_error_is_torchs_own(three, tmp_path):
    late = three.execute("time.sleep(600)", 0, block=False)
    code = (
        "try:\n"
        "    dist.barrier()\n"
        "except RuntimeError as error:\n"
        "    caught = type(error).__name__, 'gloo' in str(error)\n"
    )
    cell = three.execute(f"{at(tmp_path)}\n{code}", 1, block=False)
    wait_for_marks(tmp_path, "worker1")
    kill(three)
    assert wait_for_error(cell) is None
    late.cancel()
    wait_for_error(late)
    assert three.evaluate("caught", 1) == ("RuntimeError", True)


def test_a_call_that_is_served_leaves_with_worker_lost(three, tmp_path):
    # On worker1 the function runs in a thread; worker0's main thread, from which worker1 receives, only waits for it.
    code = (
        "def receive(mark):\n"
        "    open(mark, 'w').close()\n"
        "    dist.recv(torch.ones(1), src=0)\n"
        f"rpc.rpc_sync('worker1', receive, args=('{tmp_path}/worker1',))"
    )
    cell = three.execute(code, 0, block=False)
    wait_for_marks(tmp_path, "worker1")
    kill(three)
    error = wait_for_error(cell)
    expect_lost(error)
    shown = "\n".join(error.traceback)
    assert "raised on worker1" in shown
    assert "gloo" in shown
    assert "GLHF" not in shown


LARGE = {
    "broadcast": "dist.broadcast(large, src=2)",
    "an asynchronous broadcast": "dist.broadcast(large, src=2, async_op=True).wait()",
    "send": "dist.recv(large, src=2) if rank < 2 else [dist.isend(large, dst=to) for to in (0, 1)][-1].wait()",
    "objects": "dist.broadcast_object_list([large], src=2)",
}


@pytest.mark.parametrize("way", LARGE)
def test_a_receiver_of_half_a_tensor_leaves_with_worker_lost(three, tmp_path, way):
    # gloo forgets a transfer of which some bytes have come. The receivers stand still until their sender is dead: then
    # they find as much as the connection holds, and its end.
    three.execute("large = torch.ones(10_000_000)")
    cell = three.execute(f"{at(tmp_path)}\n{LARGE[way]}", [0, 1], block=False)
    wait_for_marks(tmp_path, "worker0", "worker1")
    receivers = [three.find(name).pid for name in ("worker0", "worker1")]
    try:
        for pid in receivers:
            workers.stop(pid)
        three.execute(f"{at(tmp_path)}\n{LARGE[way]}", 2, block=False)
        wait_for_marks(tmp_path, "worker2")
        kill(three)
        assert three.find("worker2").exited.wait(LIMIT)
    finally:
        for pid in receivers:
            os.kill(pid, signal.SIGCONT)
    error = wait_for_error(cell)
    assert {each.worker: each.name for each in error.errors} == dict.fromkeys(("worker0", "worker1"), "WorkerLost")
    expect_lost(error)


GROUPS = "with_dead, without = dist.new_group([1, 2]), dist.new_group([0, 1])"


def test_a_group_with_the_dead_ends_and_one_without_works_on(three, tmp_path):
    three.execute(f"{GROUPS}\ndist.barrier()")
    # A third group is in use all the while: its collective spans the death, and gives its result.
    spanning = three.execute(
        f"t = torch.ones(1)\nif rank: {at(tmp_path)}\nelse: time.sleep(3)\ndist.all_reduce(t, group=without)\nt.item()",
        [0, 1],
        block=False,
    )
    wait_for_marks(tmp_path, "worker1")
    kill(three)
    assert wait_for_error(spanning) is None
    assert three.evaluate("t.item()", [0, 1]) == [2.0, 2.0]
    error = wait_for_error(three.execute("dist.barrier(group=with_dead)", 1, block=False))
    expect_lost(error)
    error = wait_for_error(three.execute("dist.barrier()", [0, 1], block=False))
    expect_lost(error)
    assert wait_for_error(three.execute("dist.barrier(group=without)", [0, 1], block=False)) is None


def test_a_receiver_in_a_group_with_the_dead_leaves_it(three, tmp_path):
    three.execute("whole = dist.new_group([0, 1, 2])")
    cell = three.execute(f"{at(tmp_path)}\ndist.recv(torch.ones(1), src=0, group=whole)", 1, block=False)
    wait_for_marks(tmp_path, "worker1")
    kill(three)
    error = wait_for_error(cell)
    expect_lost(error)


def test_a_group_that_forms_with_the_dead_ends_and_says_what_to_do(three, tmp_path):
    cell = three.execute(f"{at(tmp_path)}\ndist.new_group([0, 1])", 1, block=False)
    wait_for_marks(tmp_path, "worker1")
    kill(three)
    error = wait_for_error(cell)
    expect_lost(error)


def test_after_forming_anew_collectives_work_in_old_and_new_workers(three):
    three.execute("dist.barrier()")
    kill(three)
    error = wait_for_error(three.execute("dist.barrier()", [0, 1], block=False))
    assert isinstance(error, nbdist.WorkerLost)
    three.restart(process_group=True)
    three.execute("t = torch.ones(1); dist.all_reduce(t)\npair = dist.new_group([0, 2])")
    three.execute("dist.all_reduce(t, group=pair)", [0, 2])
    assert three.evaluate("t.item()") == [6.0, 3.0, 6.0]


LOOPS = [
    "while True: dist.all_reduce(torch.ones(4))",
    "while True: dist.all_reduce(torch.ones(300_000))",
    "while True: dist.all_gather_object([None] * world_size, rank)",
    "while True:\n    for work in [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(100)]: work.wait()",
    "whole = dist.new_group(list(range(world_size)))\nwhile True: dist.barrier(group=whole)",
    "while True: dist.destroy_process_group(dist.new_group(list(range(world_size))))",
]


@pytest.mark.soak
def test_fifty_kills_at_random_moments_of_collectives(cluster):
    dice = random.Random(3)
    for _ in range(50):
        cell = cluster.execute(dice.choice(LOOPS), block=False)
        time.sleep(dice.random())
        victims = dice.sample(cluster.names, dice.choice([1, 2]))
        for victim in victims:
            kill(cluster, victim)
        wait_for_error(cell)
        for error in cell.errors:
            assert error.name == "WorkerLost", error
            assert any(victim in error.text for victim in victims)
        assert len(cell.errors) == len(cluster.names)
        cluster.restart(process_group=True)
        cluster.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size", timeout=LIMIT)
