"""A cluster of one worker, which has the GPU for itself: nccl for tensors there, gloo for those on the CPU."""

import pytest
import torch

import nbdist


@pytest.fixture(scope="module")
def cluster():
    with nbdist.Cluster(1, gpu_ids=(0,)) as cluster:
        yield cluster


def test_collectives_of_tensors_on_both(cluster):
    assert cluster.backend == "cpu:gloo,cuda:nccl"
    for device in ("cpu", "cuda:0"):
        cluster.execute(f"t = torch.full((3,), 2.0, device={device!r})\ndist.all_reduce(t)\ndist.barrier()")
        assert cluster.evaluate("(t.tolist(), str(t.device))") == [([2.0] * 3, device)]


def test_a_value_comes_to_the_notebook(cluster):
    cluster.execute("x = torch.arange(3.0, device=device)")
    assert torch.equal(cluster.pull("x", 0), torch.arange(3.0))


def test_the_process_group_forms_again(cluster):
    cluster.restart(process_group=True)
    cluster.execute("t = torch.ones(3, device=device)\ndist.all_reduce(t)")
    assert cluster.evaluate("t.tolist()") == [[1.0] * 3]
