"""A parameter server that updates its model once for the gradients of all trainers, and answers them all at once.

While it waits for the last of them, no thread of the server waits: each call's answer is a Future. Where a trainer
fails, the server fails that Future, so that the other trainers end, too. Written for torch.distributed.rpc:

    python batch_parameter_server.py                   # on torch
    python -m nbdist run batch_parameter_server.py     # on nbdist, unchanged
"""

import argparse
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models import resnet


def small_model(classes):
    """A short ResNet, so that the program can be tried on a laptop."""
    return nn.Sequential(
        resnet.stem(), resnet.layer(64, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)
    )


MODELS = {"small": small_model, "resnet50": resnet.resnet50}


class BatchUpdateParameterServer:
    def __init__(self, batch_update_size, model="small", classes=30, lr=0.001, momentum=0.9):
        self.model = MODELS[model](classes)
        self.lock = threading.Lock()
        self.future_model = torch.futures.Future()
        self.batch_update_size = batch_update_size
        self.arrived = {}
        self.failed = None  # which trainer did, and why
        self.optimizer = optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        self.blocked = self.most_blocked = 0

    def get_model(self):
        return self.model

    def most_threads_blocked(self):
        return self.most_blocked

    def take(self, trainer, gradients):
        """Note a trainer's gradients; the last one's update the model. The future of the model of this round."""
        with self.lock:
            if self.failed is not None:
                raise RuntimeError(self.failed)
            self.arrived[trainer] = gradients
            future = self.future_model
            if len(self.arrived) == self.batch_update_size:
                # In the order of the trainers, whatever that of their coming: the sum is the same each time.
                found = [self.arrived[name] for name in sorted(self.arrived)]
                for parameter, *parts in zip(self.model.parameters(), *found, strict=True):
                    parameter.grad = sum(parts[1:], parts[0]) / len(parts)
                self.optimizer.step()
                self.arrived = {}
                self.future_model = torch.futures.Future()
                future.set_result(self.model)
        return future

    def trainer_ended(self, trainer, done):
        """Fail the round that the others wait in, if this trainer failed: it will never be complete."""
        try:
            done.value()
        except Exception as error:
            with self.lock:
                if self.failed is None:
                    self.failed = f"{trainer} failed: {error}"
                    self.future_model.set_exception(RuntimeError(self.failed))

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(ps_rref, trainer, gradients):
        return ps_rref.local_value().take(trainer, gradients)

    @staticmethod
    def update_and_fetch_model_blocking(ps_rref, trainer, gradients):
        """The same without async_execution: a thread of the server for each trainer that waits."""
        self = ps_rref.local_value()
        future = self.take(trainer, gradients)
        with self.lock:
            self.blocked += 1
            self.most_blocked = max(self.most_blocked, self.blocked)
        model = future.wait()
        with self.lock:
            self.blocked -= 1
        return model


class Trainer:
    def __init__(self, ps_rref, name, args):
        self.ps_rref, self.name, self.args = ps_rref, name, args
        self.generator = torch.Generator().manual_seed(args.seed + int(name.removeprefix("trainer")))
        self.loss_fn = nn.MSELoss()

    def batches(self):
        args = self.args
        for _ in range(args.batches):
            inputs = torch.randn(args.batch_size, 3, args.image, args.image, generator=self.generator)
            labels = torch.randint(args.classes, (args.batch_size,), generator=self.generator)
            yield inputs, nn.functional.one_hot(labels, args.classes).float()

    def train(self):
        server = BatchUpdateParameterServer
        update = server.update_and_fetch_model_blocking if self.args.blocking else server.update_and_fetch_model
        losses = []
        model = self.ps_rref.rpc_sync().get_model()
        for number, (inputs, labels) in enumerate(self.batches()):
            if number == 1 and self.name == self.args.fail:
                raise ValueError("asked to fail")
            model.zero_grad()
            loss = self.loss_fn(model(inputs), labels)
            loss.backward()
            losses.append(loss.item())
            gradients = [parameter.grad for parameter in model.parameters()]
            model = rpc.rpc_sync(self.ps_rref.owner(), update, args=(self.ps_rref, self.name, gradients))
        return losses


def run_trainer(ps_rref, args):
    return Trainer(ps_rref, rpc.get_worker_info().name, args).train()


def run_server(trainers, args):
    server = BatchUpdateParameterServer(trainers, args.model, args.classes)
    ps_rref = rpc.RRef(server)
    start = time.perf_counter()
    futures = [
        rpc.rpc_async(f"trainer{rank}", run_trainer, args=(ps_rref, args), timeout=0) for rank in range(1, trainers + 1)
    ]
    for rank, future in enumerate(futures, 1):
        future.add_done_callback(partial(server.trainer_ended, f"trainer{rank}"))
    try:
        results = torch.futures.wait_all(futures)
    except Exception:
        print_errors(futures)
        raise
    for rank, losses in enumerate(results, 1):
        print(f"trainer{rank}: losses {' '.join(f'{loss:.4f}' for loss in losses)}", flush=True)
    seconds = time.perf_counter() - start
    images = trainers * args.batches * args.batch_size
    blocked = ps_rref.local_value().most_threads_blocked()
    print(f"{trainers} trainers: {images / seconds:.0f} images/s, {blocked} threads blocked", file=sys.stderr)


def print_errors(futures):
    """Wait for all trainers, and say which error ended each of them."""
    for rank, future in enumerate(futures, 1):
        try:
            future.wait()
        except Exception as error:
            print(f"trainer{rank} ended: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)


def run(rank, trainers, port, args):
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=300)
    name = "ps" if rank == 0 else f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=trainers + 1, rpc_backend_options=options)
    if rank == 0:
        run_server(trainers, args)
    rpc.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainers", type=int, nargs="+", default=[5])
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--blocking", action="store_true", help="without async_execution, to compare")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--image", type=int, default=64)
    parser.add_argument("--classes", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fail", metavar="TRAINER", help="have one fail in its second batch, such as trainer2")
    parser.add_argument("--port", default="29500")
    args = parser.parse_args()
    for trainers in args.trainers:
        mp.spawn(run, args=(trainers, args.port, args), nprocs=trainers + 1)


if __name__ == "__main__":
    main()
