"""Models wrapped by DDP and FSDP2, and DTensors: compared by `%dist_diff`, and copied as far as they can be."""

import re

import pytest

import nbdist

SETUP = """%%remote
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from nbdist import rpc
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2,))
ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
for layer in m:
    fully_shard(layer, mesh=mesh)
fully_shard(m, mesh=mesh)
dt = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0)])
same = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Replicate()])
def pickled(value):
    return type(value).__name__
"""
HOLDS = (
    "it holds a process group, which only its own process can use. Send the module's state_dict(); of a DTensor in it, "
    "to_local(), or full_tensor(), which all workers of its mesh must call"
)


@pytest.fixture(scope="module")
def wrapped(notebook):
    notebook.run(SETUP, timeout=120)
    return notebook


# --- compared ---------------------------------------------------------------------------------------


def test_a_healthy_fsdp_model_does_not_differ(wrapped):
    told = (
        "m is equal on 2 workers (4 parts); numbers of 4 sharded DTensors are compared only where workers hold the "
        "same shard"
    )
    assert wrapped.run("%dist_diff m").result == told
    wrapped.run("%%remote\nm(torch.ones(2, 4)).sum().backward()")
    assert wrapped.run("%dist_diff m").result == told


def test_dtensors_are_compared_by_their_placements_first(wrapped):
    assert wrapped.run("%dist_diff same").result == "same is equal on 2 workers"
    found = wrapped.run("%dist_diff same if rank == 0 else dt").result
    assert "DTensor float32(4, 4) [Shard(dim=0)] on a cpu mesh (2,) instead of DTensor float32(4, 4) [Rep" in found
    found = wrapped.run("%dist_diff same if rank == 0 else torch.ones(4, 4)").result
    assert "Tensor float32(4, 4) instead of DTensor" in found


def test_numbers_of_a_replicated_dtensor_are_compared(wrapped):
    wrapped.run(
        "%%remote 1\nother = DTensor.from_local(same.to_local().clone(), mesh, [Replicate()], run_check=False)\n"
        "other.to_local()[1, 2] = 7"
    )
    found = wrapped.run("%dist_diff same if rank == 0 else other").result
    assert found.splitlines()[0] == "same if rank == 0 else other differs: 1 of 1 parts, from worker0's"
    assert "on worker1: first at [1, 2]: 7 instead of 6; 1 of 16 values, at most 1 apart" in found


# --- copied -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m", "ddp", "dist.group.WORLD"])
def test_a_pull_of_what_holds_a_process_group_says_so_once(wrapped, name):
    for line in (f"%dist_pull {name}", f"%remote all {name}", f"%remote 0 {name}"):
        error = wrapped.run(line, check=False).error
        assert error["evalue"] == f"`{name}` cannot be sent: {HOLDS}"
        assert "take_last_value" not in error["evalue"]


def test_what_the_error_advises_works(wrapped):
    wrapped.run("shards = %remote all {name: part.to_local() for name, part in m.state_dict().items()}")
    wrapped.run("full = %remote all {name: part.full_tensor() for name, part in m.state_dict().items()}")
    wrapped.run("held = %remote all m.state_dict()")
    look = "[torch.equal(torch.cat([each[n] for each in shards]), full[0][n]) for n in full[0]]"
    assert wrapped.run(look).result == "[True, True, True, True]"
    look = "[torch.equal(held[r][n].to_local(), shards[r][n]) for r in (0, 1) for n in full[0]] == [True] * 8"
    assert wrapped.run(look).result == "True"
    wrapped.run("plain = %remote 0 ddp.state_dict()")
    assert wrapped.run("plain['module.weight'].shape").result == "torch.Size([4, 4])"


CALLS = [
    ("rpc.rpc_sync('worker1', pickled, args=(m,))", r"`args\[0\]` is a FSDPSequential, which cannot be sent: "),
    ("rpc.rpc_sync('worker1', pickled, args=([1, {'a': m}],))", r"`args\[0\]\[1\]\['a'\]` is a FSDPSequential, which "),
    ("rpc.rpc_sync('worker1', lambda: m)", r"`m`, used by `<lambda>`.*, is a FSDPSequential, which cannot be sent: "),
    ("rpc.remote('worker1', pickled, args=(m,)).to_here()", r"`args\[0\]` is a FSDPSequential, which cannot be sent: "),
    (
        "rpc.rpc_sync('worker1', eval, args=('__import__(\"__main__\").m',))",
        r"the result of eval \(a FSDPSequential\) ",
    ),
]


@pytest.mark.parametrize(("call", "told"), CALLS)
def test_calls_with_what_holds_a_process_group(wrapped, call, told):
    error = wrapped.run(f"%%remote 0\n{call}", check=False).error
    assert error["ename"] == "EncodeError"
    assert re.search(told, error["evalue"])
    assert HOLDS in error["evalue"]


def test_a_push_of_what_holds_a_process_group(wrapped):
    wrapped.run("import torch.distributed\nclass Holder: pass\nholder = Holder()")
    wrapped.run("from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore")
    wrapped.run(
        "holder.group = FakeProcessGroup._create_internal(0, 2) "
        "if hasattr(FakeProcessGroup, '_create_internal') else FakeProcessGroup(0, 2)"
    )
    error = wrapped.run("%dist_push holder", check=False).error
    assert error["evalue"] == f"`holder` is a Holder, which cannot be sent: {HOLDS}"


def test_workers_with_the_same_shard_are_compared_with_each_other():
    """A mesh of two by two: workers 0 and 2 hold one half, workers 1 and 3 the other."""
    with nbdist.Cluster(4) as cluster:
        cluster.execute(
            "import torch\n"
            "from torch.distributed.device_mesh import init_device_mesh\n"
            "from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor\n"
            "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('copy', 'part'))\n"
            "dt = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)])"
        )
        assert differ(cluster) == ([], 0, 1, 1)
        cluster.execute("dt.to_local()[1] = 70.0", 3)
        (found,), *counts = differ(cluster)
        assert counts == [1, 1, 1]
        assert (found.workers, found.is_odd) == (("worker3",), False)
        assert found.told == "first at [1]: 70 instead of 5; 1 of 4 values, at most 65 apart, from worker1's"
        # Each half of the world has a mesh of its own: other ranks, and nothing to complain of.
        cluster.execute("dt = distribute_tensor(torch.arange(8.0), mesh['part'], [Shard(0)])")
        assert differ(cluster) == ([], 0, 1, 1)


def differ(cluster):
    from nbdist.cluster.inspection.comparing import differences

    cell = cluster.execute("dt", keep=True, quiet=True)
    return differences({rref.owner_name(): rref for rref in cluster.references(cell)})
