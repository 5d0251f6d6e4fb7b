"""A training script for ``torchrun``, as tutorials have it: it forms its process group, and destroys it at the end."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group(backend="gloo")
    rank, local_rank, world_size = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step in range(3):
        optimizer.zero_grad()
        inputs = torch.full((20, 10), float(rank + step))
        loss = nn.functional.mse_loss(model(inputs), torch.zeros(20, 5))
        loss.backward()
        optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    dist.destroy_process_group()
    if local_rank == 0:
        print(f"mean loss of {world_size} ranks: {total / world_size:.4f}")


if __name__ == "__main__":
    main()
