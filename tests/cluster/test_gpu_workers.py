"""Real workers with GPUs that are pretended: which GPU each sees, and what is said of one that is too old.

Not run on a GPU: `tests/gpu` has what needs one.
"""

from pathlib import Path

import pytest
import torch

import nbdist
from nbdist.cluster.kernels.workers import StartError

STAND_IN = Path(__file__).parents[1] / "stand_ins" / "cuda"


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_STAND_IN", "9.0")
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def start(**options):
    return nbdist.Cluster(2, preload="cuda_stand_in", backend="gloo", **options)


SEEN = "(__import__('os').environ['CUDA_VISIBLE_DEVICES'], str(device), gpu_id, torch.cuda.device_count())"


def test_isolated_workers_see_one_gpu_each_and_call_it_cuda_0(two_gpus):
    with start(gpu_ids=(1, 0), isolate_gpus=True) as cluster:
        assert cluster.evaluate(SEEN) == [("1", "cuda:0", 1, 1), ("0", "cuda:0", 0, 1)]
        own = "torch.cuda.get_device_name(device)"
        assert cluster.evaluate(own) == ["pretended GPU 1", "pretended GPU 0"]
        assert [record.device for record in cluster.agent.members() if record.name != "notebook"] == ["cuda:0"] * 2
        cluster.restart(1)
        assert cluster.evaluate(SEEN, 1) == ("0", "cuda:0", 0, 1)
        cluster.execute("t = torch.ones(1); dist.all_reduce(t)")
        assert cluster.evaluate("t.item()") == [2.0, 2.0]


def test_other_workers_see_the_gpus_of_all(two_gpus):
    with start(gpu_ids=(1, 0)) as cluster:
        assert cluster.evaluate(SEEN) == [("1,0", "cuda:0", 1, 2), ("1,0", "cuda:1", 0, 2)]


def test_a_gpu_that_is_too_old_ends_the_start_with_a_sentence(two_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_STAND_IN", "6.0")
    with pytest.raises(StartError) as raised:
        start(gpu_ids=(1, 0)).start()
    assert "has no code for GPU" in str(raised.value)
    assert "of compute capability 6.0; it is built for sm_75, sm_80, sm_90, compute_90." in str(raised.value)
    assert nbdist.Cluster.current is None
