"""A training script for ``torchrun``: notebooks/13_torchrun_script.ipynb runs it in cells."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group(backend="gloo")
    rank, local_rank, world_size = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        inputs = torch.arange(40.0).reshape(4, 10) / 40 + rank
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    dist.destroy_process_group()
    if local_rank == 0:
        print(f"mean loss of {world_size} ranks: {total / world_size:.3f}")


if __name__ == "__main__":
    main()
