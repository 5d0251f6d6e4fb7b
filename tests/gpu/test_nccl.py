"""Interrupts and deaths end collectives of the real NCCL, whose two members share one GPU."""

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.waiting import LIMIT, MARK, wait_for_error, wait_for_marks, wait_until

import nbdist

STAND_IN = Path(__file__).parents[1] / "stand_ins" / "one_gpu"
SUM = "t = torch.ones(1, device=device); dist.all_reduce(t); assert t.item() == 2"


@pytest.fixture(scope="module")
def shared():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STAND_IN))
        with nbdist.Cluster(2, gpu_ids=(0,), preload="nccl_on_one_gpu") as cluster:
            yield cluster


@pytest.fixture
def cluster(shared, tmp_path):
    """Two idle workers in a process group that works, whatever the test before did."""
    if any(worker.lost for worker in shared.workers):
        shared.restart()
    shared.execute(f"import time; folder = {str(tmp_path)!r}")
    shared.execute(SUM, timeout=LIMIT)
    return shared


STANDS = MARK + "t = torch.ones(1, device=device)\ndist.all_reduce(t)\nt.item()\nafterwards = True"


def test_both_kinds_of_tensors(cluster):
    assert cluster.evaluate("dist.get_backend_config()") == ["cpu:gloo,cuda:nccl"] * 2
    cluster.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == 2", timeout=LIMIT)
    cluster.execute(
        "found = [torch.empty(3, device=device) for _ in range(2)]\n"
        "dist.all_gather(found, torch.full((3,), float(rank), device=device))\n"
        "assert torch.stack(found).tolist() == [[0.0] * 3, [1.0] * 3]",
        timeout=LIMIT,
    )


def test_ddp_over_nccl_computes_what_one_process_does(cluster):
    cluster.execute(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "torch.manual_seed(0)\n"
        "alone, other = (torch.nn.Linear(8, 8).to(device) for _ in range(2))\n"
        "other.load_state_dict(alone.state_dict())\n"
        "model = DistributedDataParallel(other, device_ids=[device])\n"
        "x = torch.arange(32.0, device=device).view(4, 8) / 32\n"
        "alone(x).square().mean().backward()\n"
        "model(x[rank * 2 : rank * 2 + 2]).square().mean().backward()\n"
        "torch.testing.assert_close(other.weight.grad, alone.weight.grad)\n"
        "del model",
        timeout=LIMIT,
    )


def test_an_interrupt_ends_a_wait_for_the_gpu_and_the_group_forms_anew(cluster, tmp_path):
    cell = cluster.execute(STANDS, 0, block=False)
    wait_for_marks(tmp_path, 0, then=1.0)
    began = time.monotonic()
    cluster.interrupt("worker0")
    error = wait_for_error(cell)
    print(f"an interrupt ended the wait after {time.monotonic() - began:.2f} s")
    assert type(error).__name__ == "KeyboardInterrupt", error
    assert "worker0: its process group was aborted, and forms anew once all workers are idle" in error.traceback
    assert cluster.evaluate("'afterwards' in globals()", 0) is False
    cluster.execute(SUM, timeout=LIMIT)


def test_an_interrupt_ends_a_call_that_waits_for_the_gpu(cluster, tmp_path):
    body = MARK.strip() + "\n    t = torch.ones(1, device=device)\n    dist.all_reduce(t)\n    t.item()"
    cluster.execute(f"def stand():\n    {body}")
    cell = cluster.execute("rpc.rpc_sync('worker1', stand)", 0, block=False, quiet=True)
    wait_for_marks(tmp_path, 0, then=1.0)  # the function is sent by value, with worker0's rank
    generation = "rpc.api.current_agent().named.find('collectives').generation"
    before = cluster.evaluate(generation, 0)
    cluster.interrupt("worker0")
    assert type(wait_for_error(cell)).__name__ == "KeyboardInterrupt"
    wait_until(lambda: cluster.evaluate(generation), equals=[before + 1] * 2)
    cluster.execute(SUM, timeout=LIMIT)


def test_a_death_ends_a_wait_for_the_gpu_with_worker_lost(cluster, tmp_path):
    cell = cluster.execute(STANDS, 0, block=False)
    wait_for_marks(tmp_path, 0, then=1.0)
    began = time.monotonic()
    os.kill(cluster.find("worker1").pid, signal.SIGKILL)
    error = wait_for_error(cell)
    print(f"a death ended the wait after {time.monotonic() - began:.2f} s")
    assert isinstance(error, nbdist.WorkerLost), error
    assert "worker1" in str(error)
    assert "forms the process group anew once all workers are idle" in str(error)
    assert cluster.evaluate("'afterwards' in globals()", 0) is False
    cluster.restart(1)
    cluster.execute(SUM, timeout=LIMIT)


def test_a_death_does_not_disturb_a_worker_that_does_not_wait_for_the_gpu(cluster, tmp_path):
    code = "x = 0\nend = time.monotonic() + 4\nwhile time.monotonic() < end: x += 1\nended = 'computed'"
    begun = "t = torch.ones(1, device=device)\nwork = dist.all_reduce(t, async_op=True)\n"
    cell = cluster.execute(f"{begun}{MARK}{code}", 0, block=False)
    wait_for_marks(tmp_path, 0, then=1.0)
    os.kill(cluster.find("worker1").pid, signal.SIGKILL)
    assert wait_for_error(cell) is None
    assert cluster.evaluate("ended", 0) == "computed"
    with pytest.raises(nbdist.WorkerLost, match="worker1"):
        cluster.execute("dist.all_reduce(torch.ones(1, device=device))", 0, timeout=LIMIT)


def test_inside_of_a_users_try_the_error_is_a_runtime_error(cluster, tmp_path):
    code = "try:\n    t.item()\nexcept RuntimeError as error:\n    caught = str(error)"
    cell = cluster.execute(f"{MARK}t = torch.ones(1, device=device)\ndist.all_reduce(t)\n{code}", 0, block=False)
    wait_for_marks(tmp_path, 0, then=1.0)
    os.kill(cluster.find("worker1").pid, signal.SIGKILL)
    assert wait_for_error(cell) is None
    assert "a collective of NCCL was aborted" in cluster.evaluate("caught", 0)


def test_a_communicator_that_is_not_made_after_a_death_restarts_the_worker(cluster, tmp_path):
    """The new group has no communicator yet; its first collective waits for a member that dies."""
    cluster.execute("group = dist.new_group(backend='nccl')", timeout=LIMIT)
    cell = cluster.execute(f"t = torch.ones(1, device=device)\n{MARK}dist.all_reduce(t, group=group)", 0, block=False)
    wait_for_marks(tmp_path, 0, then=1.0)
    os.kill(cluster.find("worker1").pid, signal.SIGKILL)
    error = wait_for_error(cell, 2 * LIMIT)
    assert isinstance(error, nbdist.WorkerLost), error
    assert "worker0 was restarted, because a collective of NCCL did not end, although a member had died" in str(error)
