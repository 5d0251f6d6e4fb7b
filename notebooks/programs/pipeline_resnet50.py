"""ResNet-50 in two shards on two workers; micro-batches go from one to the other, while the next ones come.

Written for torch.distributed.rpc:

    python pipeline_resnet50.py                        # on torch
    python -m nbdist run pipeline_resnet50.py          # on nbdist, unchanged

Losses go to standard output, times to standard error.
"""

import argparse
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models import resnet


class ResNetShard(nn.Module):
    """What the two halves have in common: one micro-batch at a time, and references to the parameters."""

    def __init__(self, device):
        super().__init__()
        self.lock = threading.Lock()
        self.device = device

    def forward(self, x_rref):
        x = x_rref.to_here().to(self.device)
        with self.lock:
            out = self.seq(x)
        return out.cpu()

    def parameter_rrefs(self):
        return [RRef(parameter) for parameter in self.parameters()]


class ResNetShard1(ResNetShard):
    def __init__(self, device, classes):
        super().__init__(device)
        self.seq = nn.Sequential(resnet.stem(), resnet.layer(64, 64, 3), resnet.layer(256, 128, 4, stride=2))
        resnet.initialize(self).to(device)


class ResNetShard2(ResNetShard):
    def __init__(self, device, classes):
        super().__init__(device)
        self.seq = nn.Sequential(
            resnet.layer(512, 256, 6, stride=2), resnet.layer(1024, 512, 3, stride=2), resnet.head(classes)
        )
        resnet.initialize(self).to(device)


class DistResNet50(nn.Module):
    """Both shards; `forward` sends a batch through them in ``splits`` micro-batches."""

    def __init__(self, splits, workers, classes=1000, devices=("cpu", "cpu")):
        super().__init__()
        self.splits = splits
        self.p1_rref = rpc.remote(workers[0], ResNetShard1, args=(devices[0], classes))
        self.p2_rref = rpc.remote(workers[1], ResNetShard2, args=(devices[1], classes))

    def forward(self, xs):
        futures = []
        for x in xs.tensor_split(self.splits):
            y_rref = self.p1_rref.remote().forward(RRef(x))
            futures.append(self.p2_rref.rpc_async().forward(y_rref))
        return torch.cat(torch.futures.wait_all(futures))

    def parameter_rrefs(self):
        return [*self.p1_rref.remote().parameter_rrefs().to_here(), *self.p2_rref.remote().parameter_rrefs().to_here()]


def run_master(splits, args):
    torch.manual_seed(args.seed)
    model = DistResNet50(splits, ["worker1", "worker2"], args.classes)
    optimizer = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=args.lr)
    loss_fn = nn.MSELoss()
    for batch in range(args.batches):
        inputs = torch.randn(args.batch_size, 3, args.image, args.image)
        labels = nn.functional.one_hot(torch.randint(args.classes, (args.batch_size,)), args.classes).float()
        start = time.perf_counter()
        with dist_autograd.context() as context_id:
            loss = loss_fn(model(inputs), labels)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        print(f"splits {splits}, batch {batch}: loss {loss.item():.4f}", flush=True)
        print(f"splits {splits}, batch {batch}: {time.perf_counter() - start:.3f} s", file=sys.stderr, flush=True)


def run_worker(rank, world_size, splits, port, args):
    torch.manual_seed(args.seed + rank)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=300)
    name = "master" if rank == 0 else f"worker{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        run_master(splits, args)
    rpc.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=120)
    parser.add_argument("--image", type=int, default=128)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", default="29500")
    args = parser.parse_args()
    world_size = 3
    for splits in args.splits:
        start = time.perf_counter()
        mp.spawn(run_worker, args=(world_size, splits, args.port, args), nprocs=world_size)
        print(f"number of splits = {splits}, execution time = {time.perf_counter() - start:.2f}", file=sys.stderr)


if __name__ == "__main__":
    main()
