"""What a cluster may be asked to be, and who has which GPU. No GPU is needed: torch is told what it sees."""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest
import torch

import nbdist
from nbdist.cluster.spec import OPTIONS, Spec, default_count
from nbdist.errors import UsageError


@pytest.fixture
def gpus(monkeypatch):
    """Says how many GPUs torch sees."""

    def see(count, visible=None):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return see


def test_a_clusters_arguments_are_its_options():
    """The signature is written out for mypy and Shift-Tab; all else comes from the fields of `Spec`."""
    given = dict(inspect.signature(nbdist.Cluster).parameters)
    del given["progress"]
    fields = {"n" if each.name == "count" else each.name: each for each in dataclasses.fields(Spec)}
    assert list(given) == list(fields)
    told = {name: each for name, each in given.items() if name not in ("n", "rpc", "gpu_ids", "preload")}
    assert {name: each.default for name, each in told.items()} == {name: fields[name].default for name in told}
    assert {name: each.annotation for name, each in told.items()} == {name: fields[name].type for name in told}
    for name, option in OPTIONS.items():
        assert f"\n        {'n' if name == 'count' else name}: {option.help[:30]}" in str(nbdist.Cluster.__doc__)


# -- what cannot be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"count": 0}, "1 to 1000 workers, not 0"),
        ({"count": -1}, "not -1"),
        ({"count": 1001}, "not 1001"),
        ({"backend": "mpi"}, "gloo, nccl or none, not 'mpi'"),
        ({"backend": ""}, "not ''"),
        ({"driver": "worker0"}, "'worker0' is a worker's name; give the notebook another, such as master"),
        ({"driver": "worker12"}, "worker's name"),
        ({"driver": ""}, "non-empty"),
        ({"driver": "the master"}, "'the master'"),
        ({"driver": "m" * 200}, "shorter"),
        ({"timeout": 0}, "more than 0 s"),
        ({"timeout": -1.5}, "not -1.5"),
        ({"timeout": math.nan}, "not nan"),
        ({"timeout": math.inf}, "not inf"),
        ({"gpu_ids": ()}, "name each GPU once"),
        ({"gpu_ids": (0, 1, 0)}, "name each GPU once"),
    ],
)
def test_what_cannot_be_is_refused(options, says):
    with pytest.raises(UsageError) as raised:
        Spec(**options).check()
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"count": 1},
        {"count": 1000},
        {"driver": "master"},
        {"driver": "notebook"},
        {"driver": "worker"},
        {"driver": "worker1b"},
        {"seed": 0},
        {"seed": -3},
        {"timeout": 0.5},
        {"gpu_ids": (1, 0)},
        *({"backend": backend} for backend in (None, "gloo", "nccl", "none")),
    ],
)
def test_what_can_be_is_not(options):
    Spec(**options).check()


# -- the same cluster ---------------------------------------------------------------------------


def test_how_long_to_wait_makes_no_other_cluster():
    assert Spec(4).same_as(Spec(4, timeout=5))
    assert Spec(4, timeout=5).same_as(Spec(4))


@pytest.mark.parametrize(
    "other",
    [
        {"count": 3},
        {"gpu_ids": (0,)},
        {"backend": "gloo"},
        {"driver": "master"},
        {"seed": 0},
        {"launcher": "ray"},
        {"isolate_gpus": True},
        {"preload": ("json",)},
    ],
)
def test_all_else_does(other):
    assert not Spec(4).same_as(dataclasses.replace(Spec(4), **other))


# -- devices ------------------------------------------------------------------------------------


def test_without_gpus_all_are_on_the_cpu(gpus):
    gpus(0)
    assert Spec(3).devices() == [("cpu", None)] * 3
    assert Spec(2, backend="gloo").devices() == [("cpu", None)] * 2
    assert Spec(2, backend="none").devices() == [("cpu", None)] * 2


def test_each_worker_has_a_gpu_of_its_own_while_there_are_some(gpus):
    gpus(4)
    assert Spec(4).devices() == [(f"cuda:{gpu}", gpu) for gpu in range(4)]
    assert Spec(2).devices() == [("cuda:0", 0), ("cuda:1", 1)]


def test_more_workers_than_gpus_share_them_in_turn(gpus):
    gpus(2)
    assert Spec(5).devices() == [("cuda:0", 0), ("cuda:1", 1), ("cuda:0", 0), ("cuda:1", 1), ("cuda:0", 0)]


def test_chosen_gpus_count_from_0_in_the_order_given(gpus):
    gpus(8)
    spec = Spec(3, gpu_ids=(5, 2))
    assert spec.devices() == [("cuda:0", 5), ("cuda:1", 2), ("cuda:0", 5)]
    assert spec.visible_gpus(5) == "5,2"
    assert spec.visible_gpus(2) == "5,2"


def test_isolated_workers_see_their_own_alone(gpus):
    gpus(4)
    spec = Spec(2, gpu_ids=(3, 1), isolate_gpus=True)
    assert spec.devices() == [("cuda:0", 3), ("cuda:0", 1)]
    assert [spec.visible_gpus(gpu) for gpu in (3, 1)] == ["3", "1"]


def test_gloo_stays_on_the_cpu_unless_gpus_are_named(gpus):
    gpus(2)
    assert Spec(2, backend="gloo").devices() == [("cpu", None)] * 2
    assert Spec(2, backend="gloo", gpu_ids=(1,)).devices() == [("cuda:0", 1)] * 2
    assert Spec(1, backend="none").devices() == [("cuda:0", 0)]


def test_numbers_are_those_of_this_process_and_not_the_drivers(gpus):
    gpus(3, visible="7, GPU-abc,2")
    assert Spec(3).visible_gpus(0) == "7,GPU-abc,2"
    assert Spec(3, gpu_ids=(2, 1)).visible_gpus(2) == "2,GPU-abc"
    assert Spec(3, gpu_ids=(1,), isolate_gpus=True).visible_gpus(1) == "GPU-abc"
    gpus(2)
    assert Spec(2).visible_gpus(0) == "0,1"


@pytest.mark.parametrize(
    ("there", "options", "says"),
    [
        (0, {"gpu_ids": (0,)}, "no such GPU: 0; torch sees none here"),
        (0, {"gpu_ids": (0,), "backend": "gloo"}, "no such GPU: 0"),
        (2, {"gpu_ids": (1, 2, 5)}, "no such GPU: 2, 5; there are 2, numbered from 0"),
        (2, {"gpu_ids": (-1,)}, "no such GPU: -1"),
        (0, {"backend": "nccl"}, "the backend nccl needs GPUs, and torch sees none here; use the backend gloo"),
        (2, {"count": 3, "backend": "nccl"}, "nccl needs a GPU for each of 3 workers, and has 2"),
        (4, {"count": 3, "backend": "nccl", "gpu_ids": (0, 1)}, "and has 2"),
    ],
)
def test_gpus_that_are_not_there_are_an_error_that_says_what_is(gpus, there, options, says):
    gpus(there)
    spec = Spec(**options)
    spec.check()
    with pytest.raises(UsageError) as raised:
        spec.devices()
    assert says in str(raised.value)


def test_nccl_has_a_gpu_for_each(gpus):
    gpus(2)
    assert Spec(2, backend="nccl").devices() == [("cuda:0", 0), ("cuda:1", 1)]


# -- how many workers, where nobody says it -----------------------------------------------------


@pytest.mark.parametrize(
    ("there", "gpu_ids", "backend", "workers"),
    [
        (0, None, None, 2),
        (0, None, "gloo", 2),
        (1, None, None, 1),
        (2, None, None, 2),
        (8, None, "nccl", 8),
        (8, None, "none", 8),
        (8, None, "gloo", 2),
        (8, (1, 3, 5), None, 3),
        (8, (1, 3, 5), "gloo", 3),
    ],
)
def test_a_worker_for_each_gpu_or_two(gpus, there, gpu_ids, backend, workers):
    gpus(there)
    assert default_count(gpu_ids, backend) == workers
    cluster = nbdist.Cluster(gpu_ids=gpu_ids, backend=backend)
    assert [worker.name for worker in cluster.workers] == [f"worker{rank}" for rank in range(workers)]
    assert [worker.gpu for worker in nbdist.Cluster(1, backend="gloo").workers] == [None]
