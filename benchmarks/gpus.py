"""Measures workers that share one GPU: an echo beside TensorPipe, a pipeline beside one by hand, a swarm.

It needs a GPU, prints its tables and writes nothing: ``make bench BENCH=gpus``. A round of the echo runs torch's RPC
and nbdist's one after the other, each with two processes of its own. The pipeline, and the swarm beside one process,
run in one cluster of two workers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "notebooks"))

from models import resnet

HERE = Path(__file__).resolve().parent

SIZES = {"1 MB": (1 << 20, 200), "64 MB": (1 << 26, 40), "1 GB": (1 << 30, 10)}
"""What is echoed: its bytes, and how often."""
LIMITS = {"1 MB": "0.5", "64 MB": "0.5", "1 GB": "1.0"}
SPLITS, BATCH, PIXELS = 4, 120, 128
PARTS = ["echo", "pipeline", "watch", "swarm"]
TOKENS = 64


# --- the echo ---------------------------------------------------------------------------------------


def echo(x: torch.Tensor) -> torch.Tensor:
    """Return what came."""
    return x


def drop(x: torch.Tensor) -> None:
    """Return nothing."""


def spent(run: Callable[[], object], times: int) -> float:
    """Return the median of the seconds that a call takes until the GPU is done, after three calls to warm up."""
    found = []
    for _ in range(times + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[3:])


def side(library: str, rank: int, port: int) -> None:
    """Be one of the two processes of a library; rank 0 prints its figures as JSON."""
    options: Any
    if library == "torch":
        import torch.distributed.rpc as rpc

        options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    else:
        from nbdist import rpc  # type: ignore[no-redef]

        options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    import gpus  # this file, by the name by which both processes know it

    options.set_device_map(f"worker{1 - rank}", {0: 0})
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    found: dict[str, float] = {}
    for name, (size, times) in SIZES.items() if rank == 0 else ():
        x = torch.randn(size // 4, device="cuda")
        other = torch.empty_like(x)
        found[name] = spent(lambda x=x: rpc.rpc_sync("worker1", gpus.echo, args=(x,)), times)
        found[f"{name}, one way"] = spent(lambda x=x: rpc.rpc_sync("worker1", gpus.drop, args=(x,)), times)
        found[f"{name}, copy"] = spent(lambda x=x, other=other: other.copy_(x), times)
        del x, other
        torch.cuda.empty_cache()
    rpc.shutdown()
    if rank == 0:
        print(json.dumps(found), flush=True)


def measure_echo(library: str) -> dict[str, float]:
    """Return the seconds that each case takes on a library."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--side", library, "--port", str(port), "--rank"]
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    other = subprocess.Popen([*command, "1"], env=environment, stderr=subprocess.DEVNULL)
    first = subprocess.run(
        [*command, "0"], env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    other.wait(60)
    found: dict[str, float] = json.loads(first.stdout)
    return found


def echoes(rounds: int) -> None:
    """Print the table of echoes."""
    found = [{library: measure_echo(library) for library in ("torch", "nbdist")} for _ in range(rounds)]

    def middle(library: str, case: str) -> float:
        return statistics.median(each[library][case] for each in found)

    print("| echo between two processes on one GPU | nbdist | TensorPipe | ratio | limit |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in SIZES:
        ratio = statistics.median(each["nbdist"][name] / each["torch"][name] for each in found)
        ours, theirs = (1e3 * middle(library, name) for library in ("nbdist", "torch"))
        print(f"| {name} | {ours:.2f} ms | {theirs:.2f} ms | {ratio:.3f} | {LIMITS[name]} |")
    share = middle("nbdist", "1 GB, copy") / middle("nbdist", "1 GB, one way")
    print(f"\nOne way, 1 GB: {share:.2f} of the bandwidth of a copy on the GPU (limit 0.7).\n", flush=True)


# --- the pipeline -----------------------------------------------------------------------------------


class Shard(nn.Module):
    """One half of a ResNet-50, as torch's tutorial has it: results go by way of the CPU."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        torch.manual_seed(int(first))
        parts = list(resnet.resnet50().children())
        self.lock = threading.Lock()
        self.seq = nn.Sequential(*(parts[:3] if first else parts[3:])).to("cuda:0")

    def forward(self, x_rref: Any) -> torch.Tensor:
        """Compute one micro-batch."""
        x = x_rref.to_here().to("cuda:0")
        with self.lock:
            return self.seq(x).cpu()  # type: ignore[no-any-return]

    def parameter_rrefs(self) -> list[Any]:
        """Return references to the parameters."""
        from nbdist.rpc import RRef

        return [RRef(parameter) for parameter in self.parameters()]


def pipelines(rounds: int) -> None:
    """Print how long a step of `Pipeline` takes beside one by hand, with the notebook's process as the caller."""
    from nbdist import autograd, optim, rpc
    from nbdist.nn import Pipeline

    images = torch.randn(BATCH, 3, PIXELS, PIXELS)
    scores = nn.functional.one_hot(torch.randint(1000, (BATCH,)), 1000).float()
    first, second = rpc.remote("worker0", Shard, args=(True,)), rpc.remote("worker1", Shard, args=(False,))
    parameters = [parameter for shard in (first, second) for parameter in shard.rpc_sync().parameter_rrefs()]
    by_hand = optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    pipe = Pipeline(resnet.resnet50(), ["worker0/cuda:0", "worker1/cuda:0"], at=["layer3"], micro_batches=SPLITS)
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.05)

    def step_by_hand() -> None:
        with autograd.context() as context_id:
            futures = []
            for x in images.tensor_split(SPLITS):
                y_rref = first.remote().forward(rpc.RRef(x))
                futures.append(second.rpc_async().forward(y_rref))
            loss = nn.functional.mse_loss(torch.cat([future.wait() for future in futures]), scores)
            autograd.backward(context_id, [loss])
            by_hand.step(context_id)

    def step() -> None:
        with autograd.context() as context_id:
            pipe.train_step(images, scores, nn.functional.mse_loss)
            optimizer.step(context_id)

    found = [(spent(step, 3), spent(step_by_hand, 3)) for _ in range(rounds)]
    ours, theirs = (1e3 * statistics.median(each) for each in zip(*found, strict=True))
    ratio = statistics.median(one / other for one, other in found)
    print(f"A step of ResNet-50, {PIXELS} pixels, {SPLITS} splits, batch {BATCH}, both stages on one GPU:")
    print(f"Pipeline {ours:.0f} ms, by hand {theirs:.0f} ms, ratio {ratio:.2f} (limit 0.9).\n", flush=True)


# --- the swarm --------------------------------------------------------------------------------------


def swarms(rounds: int) -> None:
    """Print how fast a swarm writes beside one process, with a Llama of the shape of SmolLM2-135M."""
    import transformers

    from nbdist.swarm import serve

    torch.manual_seed(0)
    alone = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
    ).eval()
    swarm = serve(alone, workers=["worker0", "worker1"])
    clients = {"CPU": swarm.causal_lm(), "GPU": swarm.causal_lm().to("cuda:0")}
    alone.to("cuda:0")  # type: ignore[arg-type]

    def write(model: Any, texts: int, device: str) -> torch.Tensor:
        ids = torch.randint(3, 49000, (texts, 16), generator=torch.Generator().manual_seed(1)).to(device)
        written: torch.Tensor = model.generate(
            ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        return written.cpu()

    print(
        "| texts; where the client's embedding and head are | swarm, tokens a second | one process | ratio | limit | |"
    )
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for (texts, limit), where in itertools.product(((1, "0.7"), (4, "0.85")), clients):
        remote, device = clients[where], {"CPU": "cpu", "GPU": "cuda:0"}[where]
        same = "same texts" if torch.equal(write(remote, texts, device), write(alone, texts, "cuda:0")) else "others"
        found = [
            (spent(partial(write, remote, texts, device), 1), spent(partial(write, alone, texts, "cuda:0"), 1))
            for _ in range(rounds)
        ]
        ours, theirs = (texts * TOKENS / statistics.median(each) for each in zip(*found, strict=True))
        ratio = statistics.median(other / one for one, other in found)
        print(f"| {texts}; {where} | {ours:.0f} | {theirs:.0f} | {ratio:.2f} | {limit} | {same} |", flush=True)
    swarm.close()
    print(flush=True)


# --- a watched pass -----------------------------------------------------------------------------------


def work(x: torch.Tensor) -> torch.Tensor:
    """Compute 20 layers on the tensor's GPU."""
    for _ in range(20):
        x = (x @ x.detach()).tanh()
    return x


def timed_pass(size: int, watched: str) -> float:
    """Run one forward and backward pass on worker0 and worker1; return the seconds of the backward pass.

    ``watched`` is "no", or "yes" or "without norms" for `nbdist.autograd.watch`.
    """
    import gpus  # this file, by the name by which both workers know it

    from nbdist import autograd, rpc

    x = torch.randn(size, size, device="cuda:0", requires_grad=True)
    with autograd.context() as context_id:
        if watched != "no":
            autograd.watch(norms=watched == "yes")
        loss = work(rpc.rpc_sync("worker1", gpus.work, args=(work(x),))).sum()
        torch.cuda.synchronize()
        began = time.perf_counter()
        autograd.backward(context_id, [loss])
        torch.cuda.synchronize()
        return time.perf_counter() - began


def watched_passes(rounds: int) -> None:
    """Print how long a watched backward pass over two workers takes beside an unwatched one."""
    import gpus

    from nbdist import rpc

    print("| backward pass of 60 layers on two workers | watched | unwatched | ratio | limit |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for size, way in itertools.product((256, 2048), ("yes", "without norms")):
        found = []
        for _ in range(rounds + 1):
            each: dict[str, list[float]] = {way: [], "no": []}
            for watched in [way, "no"] * 15:
                each[watched].append(rpc.rpc_sync("worker0", gpus.timed_pass, args=(size, watched)))
            found.append((statistics.median(each[way]), statistics.median(each["no"])))
        ours, theirs = (1e3 * statistics.median(times) for times in zip(*found[1:], strict=True))
        ratio = statistics.median(one / other for one, other in found[1:])
        case = f"{size} by {size}" + ("" if way == "yes" else ", " + way)
        print(f"| {case} | {ours:.2f} ms | {theirs:.2f} ms | {ratio:.3f} | 1.05 |", flush=True)
    print(flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side(options.side, options.rank, options.port)
        return
    if not torch.cuda.device_count():
        sys.exit("There is no GPU here.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {options.rounds} rounds\n", flush=True)
    wanted = options.only or PARTS
    if "echo" in wanted:
        echoes(options.rounds)
    if {"pipeline", "watch", "swarm"} & set(wanted):
        import nbdist

        with nbdist.Cluster(2, gpu_ids=(0,)) as cluster:
            cluster.execute(f"import sys; sys.path[:0] = {sys.path[:2]}")  # where `models` and this file are
            if "pipeline" in wanted:
                pipelines(options.rounds)
            if "watch" in wanted:
                watched_passes(options.rounds)
            if "swarm" in wanted:
                swarms(options.rounds)


if __name__ == "__main__":
    main()
