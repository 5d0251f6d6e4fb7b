"""A program that trains over two nodes of Ray's; test_ray.py runs it on the first one, and harms the second.

It prints a line when it has come to a point, and goes on at once. ``python ray_driver.py ADDRESS`` starts the head of
Ray at that address.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch

import nbdist
from nbdist import autograd, optim, rpc
from nbdist.errors import NbdistError


def say(*words: object) -> None:
    print("point", *words, flush=True)


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


def train(layer: rpc.RRef, steps: int) -> list[float]:
    """Train the layer where it lives; return the losses."""
    parameters = rpc.rpc_sync(layer.owner(), parameter_rrefs, (layer,))
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    x = torch.arange(8.0).reshape(2, 4) / 8
    losses = []
    for _ in range(steps):
        with autograd.context() as context:
            loss = (layer.rpc_sync().forward(x) - 1).pow(2).mean()
            autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    return losses


def parameter_rrefs(layer: rpc.RRef) -> list[rpc.RRef]:
    return [rpc.RRef(parameter) for parameter in layer.local_value().parameters()]


def main(address: str) -> None:
    import ray

    ray_program = [sys.executable, str(Path(__file__).with_name("ray_small.py")), "start"]
    head = [*ray_program, "--head", f"--node-ip-address={address}", "--port=6379", "--num-cpus=2"]
    subprocess.run([*head, "--include-dashboard=false", "--disable-usage-stats"], check=True, stdout=subprocess.DEVNULL)
    say("head")
    ray.init(address=f"{address}:6379", log_to_driver=False, logging_level="ERROR")
    while sum(node["Alive"] for node in ray.nodes()) < 2:
        time.sleep(0.1)
    with nbdist.Cluster(2, launcher="ray", placement="spread", timeout=110) as cluster:
        cluster.execute("total = torch.tensor(float(rank + 1)); dist.all_reduce(total)")
        say("sum", *[float(total) for total in cluster.pull("total")])
        places = {record.name: record.addresses[-1] for record in cluster.agent.members()}
        far = next(name for name in cluster.names if address not in places[name])
        layer = rpc.remote(far, make)
        saved = layer.to_here().state_dict()
        say("losses", *train(layer, 3))
        saved = layer.to_here().state_dict()
        say("training")
        try:
            while True:
                train(layer, 1)
        except NbdistError as error:
            say("lost", type(error).__name__, far in str(error))
        began = time.monotonic()
        say("restarted", *cluster.restart(), round(time.monotonic() - began))
        layer = rpc.remote(far, make)
        rpc.rpc_sync(far, load, (layer, saved))
        say("losses", *train(layer, 3))
    say("alive", ray.is_initialized())


def load(layer: rpc.RRef, state: dict[str, torch.Tensor]) -> None:
    layer.local_value().load_state_dict(state)


if __name__ == "__main__":
    main(sys.argv[1])
