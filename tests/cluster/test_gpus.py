"""A worker's GPU in words: too old for torch, shared, full. No GPU is needed: torch is told what it has."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import nbdist
from nbdist.cluster.processes.group_store import FolderStore
from nbdist.cluster.processes.setup import WorkerSetup, choose_backend
from nbdist.cluster.worker import collective_errors, collectives, gpu
from nbdist.errors import UsageError
from nbdist.gpus import support
from nbdist.views.workers import remarks

BUILT = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
"""What torch 2.11 is built for, with CUDA 12.8."""


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((6, 0), BUILT, False),  # Kaggle's P100
        ((7, 0), BUILT, False),
        ((7, 5), BUILT, True),  # a T4
        ((8, 0), BUILT, True),
        ((8, 9), BUILT, True),  # by the code for 8.6
        ((9, 0), ["sm_90a"], True),
        ((10, 3), BUILT, True),
        ((12, 1), BUILT, True),
        ((13, 0), BUILT, True),  # compiled when it is loaded
        ((13, 0), ["sm_120"], False),
        ((11, 0), ["sm_120", "compute_120"], False),
        ((8, 0), ["sm_86"], False),
        ((3, 7), [], True),
        ((9, 4), ["gfx942"], True),
    ],
)
def test_for_which_gpus_a_torch_has_code(capability, built, runs):
    assert support.is_supported(capability, built) == runs


def of_worker(**options):
    return WorkerSetup("worker1", 1, 1, 2, "", "", "", 0, "gloo", gpu=3, device="cuda:0", **options)


@pytest.fixture
def cuda(monkeypatch):
    """What torch is asked of a GPU, and what it answers: a dict of calls."""
    calls = {}
    answers = {
        "set_device": None,
        "set_per_process_memory_fraction": None,
        "get_device_capability": (6, 0),
        "get_arch_list": BUILT,
        "get_device_name": "Tesla P100",
        "mem_get_info": (2_000_000_000, 16_000_000_000),
        "memory_reserved": 9_000_000_000,
        "memory_allocated": 8_500_000_000,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(
            torch.cuda, name, lambda *args, name=name, answer=answer: calls.update({name: args}) or answer
        )
    monkeypatch.setattr(gpu, "_own", None)
    return calls


def test_a_gpu_that_is_too_old_is_named(cuda):
    with pytest.raises(UsageError) as raised:
        gpu.check(of_worker())
    assert "has no code for GPU 3, a Tesla P100 of compute capability 6.0; it is built for sm_75, sm_80" in str(
        raised.value
    )
    assert "none with --backend gloo" in str(raised.value)


def test_a_worker_gets_its_part_of_the_memory(cuda):
    gpu.prepare(of_worker())
    assert cuda == {"set_device": ("cuda:0",)}
    gpu.prepare(of_worker(gpu_memory=0.45))
    assert cuda["set_per_process_memory_fraction"] == (0.45, "cuda:0")


def test_a_full_gpu_is_explained_once(cuda):
    error = torch.OutOfMemoryError("CUDA out of memory.")
    error.add_note("a note of the user's")
    gpu.explain(error)
    assert len(error.__notes__) == 1, "this is no worker with a GPU"
    gpu.prepare(of_worker())
    for _ in range(2):
        collective_errors.raise_translated(collectives.Collectives(), error)
    [_, note] = error.__notes__
    assert note.startswith(
        "GPU 3, of worker1: torch has taken 9.0 GB here, of which tensors need 8.5 GB; 2.0 GB of 16.0 GB"
    )
    other = RuntimeError("CUDA error")
    gpu.explain(other)
    assert not hasattr(other, "__notes__")


@pytest.mark.parametrize("part", [0, -0.1, 1.5, float("nan")])
def test_a_part_that_cannot_be(part):
    with pytest.raises(UsageError, match=r"more than 0 and at most 1, not"):
        nbdist.Cluster(2, gpu_memory=part)


@pytest.mark.parametrize(
    ("gpus", "options", "told"),
    [
        ([None, None], {}, []),
        ([0, 1], {}, ["The process group uses nccl for tensors on GPUs and gloo for those on the CPU."]),
        (
            [0, 0],
            {},
            [
                "The process group uses gloo, for tensors on GPUs too, because workers share a GPU.",
                "worker0,1 share GPU 0, and the first to ask gets its memory; `%dist_init --gpu-memory 0.45` gives "
                "each its part.",
            ],
        ),
        ([0, None], {}, ["The process group uses gloo, for tensors on GPUs too, because some workers have no GPU."]),
        ([0, 0], {"gpu_memory": 0.3, "backend": "gloo"}, []),
        ([2, 5, 2, 5], {"backend": "gloo"}, ["worker0,2 share GPU 2", "worker1,3 share GPU 5"]),
    ],
)
def test_remarks_on_start(gpus, options, told, monkeypatch):
    monkeypatch.setattr(remarks.machine, "limits", lambda: "")
    workers = [
        SimpleNamespace(name=f"worker{rank}", gpu=number, device="cpu" if number is None else f"cuda:{number}")
        for rank, number in enumerate(gpus)
    ]
    spec = SimpleNamespace(gpu_memory=options.get("gpu_memory"), backend=options.get("backend"))
    agent = SimpleNamespace(call=lambda name, function: SimpleNamespace(wait=function))
    cluster = SimpleNamespace(workers=workers, spec=spec, backend=choose_backend(gpus), agent=agent)
    found = remarks.remarks_on_start(cluster)
    assert len(found) == len(told)
    assert all(line.startswith(beginning) for line, beginning in zip(found, told, strict=True))
    monkeypatch.setattr(remarks.machine, "limits", lambda: "2 of 64 cores")
    assert remarks.remarks_on_start(cluster)[0] == "Limited here: the workers may use 2 of 64 cores."


@pytest.mark.parametrize(
    ("capability", "version", "lacks"),
    [
        ((6, 0), 91900, True),  # a P100 with torch 2.11
        ((7, 0), 91100, True),
        ((6, 0), 91002, False),  # torch 2.10, of Kaggle's image in August
        ((7, 5), 91900, False),  # a T4
        ((6, 0), None, False),
    ],
)
def test_an_old_gpu_without_convolutions_is_named(capability, version, lacks, cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert not gpu.own_lacks_convolutions(), "it has no GPU"
    gpu.prepare(of_worker())
    agent = SimpleNamespace(call=lambda name, function: SimpleNamespace(wait=function))
    monkeypatch.setattr(remarks.machine, "limits", lambda: "")
    workers = [SimpleNamespace(name=f"worker{rank}", gpu=rank, device="cuda:0") for rank in range(2)]
    spec = SimpleNamespace(gpu_memory=None, backend="gloo")
    said = remarks.remarks_on_start(SimpleNamespace(workers=workers, spec=spec, agent=agent))
    assert len(said) == lacks
    if lacks:
        assert said[0].startswith(
            "The GPU of worker0,1, a Tesla P100, runs no convolutions: its compute capability is "
        )
        assert said[0].endswith("After `torch.backends.cudnn.enabled = False` torch uses slower ones of its own.")


@pytest.mark.parametrize(
    ("gpus", "chosen"),
    [
        (["a", "b"], "cpu:gloo,cuda:nccl"),
        (["a"], "cpu:gloo,cuda:nccl"),
        (["a", "a"], "gloo"),
        (["a", ""], "gloo"),
        (["", ""], "gloo"),
    ],
)
def test_workers_of_other_hosts_choose_the_backend_by_the_gpus_that_they_have(gpus, chosen, monkeypatch, tmp_path):
    monkeypatch.setattr(collectives.gpu, "identity", lambda told: gpus[told.rank])
    assert choose_backend([each or None for each in gpus]) == chosen

    def agree(rank):
        return collectives.agree_on_backend(FolderStore(tmp_path), SimpleNamespace(rank=rank, world_size=len(gpus)))

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(agree, range(len(gpus)))) == [chosen] * len(gpus)


def test_a_part_of_a_gpu_for_each_worker_means_gloo():
    assert nbdist.Cluster(2, launcher="ray", gpus_per_worker=0.5).backend == "gloo"
    assert nbdist.Cluster(2, launcher="ray", gpus_per_worker=1).backend == "auto"
