"""Programs of torch.distributed run in cells as they are: nothing of nbdist stands in them."""

from __future__ import annotations

import pytest

import nbdist

LIMIT = 60

PROGRAMS = {
    "a mesh in two dimensions": """
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "parts"))
assert mesh["replicas"].get_local_rank() == rank
t = torch.ones(1)
dist.all_reduce(t, group=mesh.get_group("replicas"))
assert t.item() == 2
""",
    "DTensor": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(8.0).reshape(4, 2)
sharded = distribute_tensor(whole, mesh, [Shard(0)])
assert torch.equal((sharded @ sharded.redistribute(mesh, [Replicate()]).t()).full_tensor(), whole @ whole.t())
""",
    "parallelize_module": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
x = torch.randn(3, 4)
before = model(x)
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
parallel = parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
assert torch.allclose(parallel(x), before, atol=1e-6)
parallel(x).sum().backward()
""",
    "DDP with a communication hook": """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(2, 1))
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
model(torch.full((1, 2), float(rank))).sum().backward()
assert model.module.weight.grad.tolist() == [[0.5, 0.5]]
""",
    "DDP with Join": """
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(2, 1))
with Join([model]):
    for _ in range(2 + rank):
        model(torch.ones(1, 2)).sum().backward()
""",
    "DDP, compiled": """
from torch.nn.parallel import DistributedDataParallel
model = torch.compile(DistributedDataParallel(torch.nn.Linear(2, 1)), backend="eager")
model(torch.full((1, 2), float(rank))).sum().backward()
assert [p.grad.tolist() for p in model.parameters()][0] == [[0.5, 0.5]]
""",
    "FSDP2 with Adam": """
from torch.distributed.fsdp import fully_shard
model = fully_shard(torch.nn.Linear(4, 2), mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
adam = torch.optim.Adam(model.parameters())
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
    adam.step()
assert model.weight.to_local().shape == (1, 4)
""",
    "FSDP1": """
from torch.distributed.fsdp import FullyShardedDataParallel
model = FullyShardedDataParallel(torch.nn.Linear(4, 2), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
""",
    "ZeroRedundancyOptimizer": """
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
""",
    "PostLocalSGD": """
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
model = torch.nn.Linear(2, 1)
averager = PeriodicModelAverager(period=1, warmup_steps=0)
optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
model(torch.full((1, 2), float(rank))).sum().backward()
optimizer.step()
weights = [None, None]
dist.all_gather_object(weights, model.weight.tolist())
assert weights[0] == weights[1]
""",
    "collectives with gradients": """
import torch.distributed.nn.functional as differentiable
x = torch.ones(1, requires_grad=True)
differentiable.all_reduce(x * (rank + 1)).backward()
assert x.grad.item() == 2 * (rank + 1)
""",
    "functional collectives": """
import torch.distributed._functional_collectives as functional
assert functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).wait().tolist() == [2, 2]
""",
    "objects, pairs, all to all, scattered sums": """
found = [None, None]
dist.all_gather_object(found, {"rank": rank})
assert found == [{"rank": 0}, {"rank": 1}]
got = torch.zeros(1)
works = [dist.P2POp(dist.isend, torch.tensor([float(rank)]), 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
for work in dist.batch_isend_irecv(works):
    work.wait()
assert got.item() == 1 - rank
parts = torch.empty(2)
dist.all_to_all_single(parts, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
assert parts.tolist() == [rank, 10 + rank]
summed = torch.empty(1)
dist.reduce_scatter_tensor(summed, torch.tensor([1.0, 2.0]))
assert summed.item() == 2 * (rank + 1)
dist.monitored_barrier(dist.new_group([0, 1]))
""",
    "a pipeline by GPipe and by 1F1B": """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
torch.manual_seed(0)
layers = [torch.nn.Linear(4, 4) for _ in range(2)]
x, target = torch.randn(4, 4), torch.zeros(4, 4)
for kind in (ScheduleGPipe, Schedule1F1B):
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    schedule = kind(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
    losses = []
    result = schedule.step(x) if rank == 0 else schedule.step(target=target, losses=losses)
    assert rank == 0 or torch.allclose(result, layers[1](layers[0](x)), atol=1e-6)
""",
    "a checkpoint, written meanwhile": """
import tempfile
import torch.distributed.checkpoint as dcp
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
state = {"weights": torch.full((2,), 3.0)}
dcp.async_save(state, checkpoint_id=folder[0]).result()
state["weights"].zero_()
dcp.load(state, checkpoint_id=folder[0])
assert state["weights"].tolist() == [3, 3]
""",
    "a DataLoader with processes": """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
data = TensorDataset(torch.arange(8))
sampler = DistributedSampler(data, shuffle=False)
read = [n for batch, in DataLoader(data, batch_size=2, sampler=sampler, num_workers=1) for n in batch.tolist()]
assert read == list(range(rank, 8, 2))
""",
}


@pytest.fixture(scope="module")
def two():
    with nbdist.Cluster(2, seed=1) as cluster:
        yield cluster


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs_in_a_cell(two, program):
    two.execute(PROGRAMS[program], timeout=LIMIT)
