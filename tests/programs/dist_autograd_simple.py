import torch
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch import optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer


def random_tensor():
    return torch.rand((3, 3), requires_grad=True)


def _run_process(rank, dst_rank, world_size):
    name = f"worker{rank}"
    dst_name = f"worker{dst_rank}"
    rpc.init_rpc(name=name, rank=rank, world_size=world_size)

    with dist_autograd.context() as context_id:
        # Forward pass: references to what is made on the other worker.
        rref1 = rpc.remote(dst_name, random_tensor)
        rref2 = rpc.remote(dst_name, random_tensor)
        loss = rref1.to_here() + rref2.to_here()

        dist_autograd.backward(context_id, [loss.sum()])

        dist_optim = DistributedOptimizer(optim.SGD, [rref1, rref2], lr=0.05)
        dist_optim.step(context_id)

        moved = loss - (rref1.to_here() + rref2.to_here())
        assert torch.allclose(moved, torch.full((3, 3), 0.1)), moved


def run_process(rank, world_size):
    dst_rank = (rank + 1) % world_size
    _run_process(rank, dst_rank, world_size)
    rpc.shutdown()


if __name__ == "__main__":
    world_size = 2
    mp.spawn(run_process, args=(world_size,), nprocs=world_size)
    print("each worker's parameters moved")
