"""Whole programs: those written for torch.distributed.rpc, unchanged on nbdist and on torch, beside each other.

And, for nbdist alone, its `Pipeline` beside the pipeline written by hand, beside one process, and its memory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
from harness import Case, Contestant, each

HERE = Path(__file__).resolve().parent

RESNET = "DistResNet50, 2 workers, {} splits, {} of 64x64"
SPLITS, BATCHES, OBSERVERS, TRAINERS = (1, 2, 4, 8), (4, 8, 16, 32), (1, 2, 4, 8), (1, 2, 4)
SIZES = [(splits, 16) for splits in SPLITS] + [(4, batch) for batch in BATCHES if batch != 16]
TINY = "tiny layers, 2 workers, 4 splits, 4 MB activations"
PLAYING = "CartPole, {} observers, {}"
SERVING = "parameter server, {} trainers"
OWN = {
    "by hand": 3,
    "Pipeline, forward and backward": 3,
    "Pipeline, train_step": 3,
    "Pipeline, train_step, cut by time": 3,
    "two stages, 8 micro-batches": 15,
    "one process, the same": 15,
}
MEMORY = {f"{what}, {name}": 2 for what in ("in use", "resident") for name in ("gpipe", "1f1b")}
WORLDS: dict[str, tuple[Callable[[int], str], int, dict[str, int]]] = {
    "pipeline": (
        lambda rank: f"worker{rank}" if rank else "master",
        3,
        {RESNET.format(*size): 3 for size in SIZES} | {TINY: 10},
    ),
    "server": (
        lambda rank: f"trainer{rank}" if rank else "ps",
        5,
        {SERVING.format(count): 20 for count in TRAINERS},
    ),
    "cartpole": (
        lambda rank: f"observer{rank}" if rank else "agent",
        9,
        {PLAYING.format(count, mode): 30 for count in OBSERVERS for mode in ("batched", "single")},
    ),
    "deep": (lambda rank: f"worker{rank}" if rank else "master", 5, OWN | MEMORY),
}
LIMITS = {
    RESNET.format(4, 16): 1.02,
    TINY: 0.6,
    PLAYING.format(8, "batched"): 0.8,
    SERVING.format(4): 1.0,
}


# --- what runs on the workers ---------------------------------------------------------------------


class Grow:
    """The first of two tiny layers: from few numbers to 4 MB."""

    def __init__(self) -> None:
        import torch

        self.weight = torch.ones(1, requires_grad=True)

    def forward(self, x_rref: Any) -> Any:
        """To 4 MB."""
        return (x_rref.to_here() * self.weight).expand(-1, 1 << 18).contiguous()

    def parameter_rrefs(self) -> list[Any]:
        """As the shards of the program."""
        import torch.distributed.rpc as rpc

        return [rpc.RRef(self.weight)]


class Shrink(Grow):
    """The second: back to few numbers; it looks at some only, as what is measured is not arithmetic."""

    def forward(self, x_rref: Any) -> Any:
        """To a number for each row; backward, all have a gradient."""
        return x_rref.to_here()[:, ::1024].sum(1) * self.weight


class Heap(ctypes.Structure):
    """C's ``struct mallinfo2``."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


class Memory:
    """How much more than at its beginning is in use at most, and how much is resident at most."""

    def __init__(self) -> None:
        from nbdist import trace

        gc.collect()
        self._c = ctypes.CDLL(None)
        self._c.mallinfo2.restype = Heap
        self._c.malloc_trim(0)  # what was freed before is not to be taken for free memory
        Path("/proc/self/clear_refs").write_text("5")  # from now on the peak is counted anew
        self._resident = _status("VmRSS")
        self._before = self._most = self._in_use()
        self._stop = trace.subscribe(lambda event, _: self._look() if event == "micro_batch.ran" else None)

    def _in_use(self) -> int:
        heap = self._c.mallinfo2()
        return int(heap.uordblks + heap.hblkhd) + _status("RssShmem")

    def _look(self) -> None:
        self._most = max(self._most, self._in_use())

    def end(self) -> tuple[int, int]:
        """Bytes in use, and resident, at most."""
        self._stop()
        return self._most - self._before, _status("VmHWM") - self._resident


_memory: list[Memory] = []


def watch_memory() -> None:
    """From now on."""
    _memory.append(Memory())


def memory() -> tuple[int, int]:
    """Until now."""
    return _memory.pop().end()


def _status(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


# --- what rank 0 measures -------------------------------------------------------------------------


def pipeline_cases() -> dict[str, Case]:
    """The tutorial's pipeline, with ResNet-50 and with next to no computing."""
    import torch
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc
    from pipeline_resnet50 import DistResNet50
    from torch.distributed.optim import DistributedOptimizer

    class Tiny(DistResNet50):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.splits = 4
            self.p1_rref = rpc.remote("worker1", programs_module().Grow)
            self.p2_rref = rpc.remote("worker2", programs_module().Shrink)

    def step(model: Any, inputs: Any, targets: Any) -> Callable[..., None]:
        optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=0.001)

        def run(batch: int | None = None) -> None:
            with dist_autograd.context() as context_id:
                loss = torch.nn.functional.mse_loss(model(inputs[:batch]), targets[:batch])
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)

        return run

    images, scores = torch.randn(max(BATCHES), 3, 64, 64), torch.randn(max(BATCHES), 1000)
    model = DistResNet50(4, ["worker1", "worker2"])
    resnet_step = step(model, images, scores)

    def with_splits(splits: int, batch: int) -> Callable[[], None]:
        def run() -> None:
            model.splits = splits
            resnet_step(batch)

        return run

    tiny = step(Tiny(), torch.rand(16, 1), torch.rand(16))
    return {RESNET.format(*size): each(with_splits(*size)) for size in SIZES} | {TINY: each(tiny)}


def server_cases() -> dict[str, Case]:
    """The tutorial's parameter server; the time of a round, of several."""
    import batch_parameter_server as program
    import torch
    import torch.distributed.rpc as rpc

    def with_trainers(count: int) -> Case:
        def run(rounds: int) -> list[float]:
            args = argparse.Namespace(batches=rounds, batch_size=8, image=64, classes=30, seed=0, blocking=False)
            server = rpc.RRef(program.BatchUpdateParameterServer(count))
            start = time.perf_counter()
            ranks = range(1, count + 1)
            calls = [rpc.rpc_async(f"trainer{rank}", program.run_trainer, args=(server, args)) for rank in ranks]
            torch.futures.wait_all(calls)
            return [(time.perf_counter() - start) / rounds]

        return run

    return {SERVING.format(count): with_trainers(count) for count in TRAINERS}


def cartpole_cases() -> dict[str, Case]:
    """The tutorial's reinforcement learning; the time of a step of all observers."""
    import batch_cartpole as program

    args = argparse.Namespace(gamma=1.0, seed=543)

    def playing(count: int, batch: bool) -> Case:
        agent = program.Agent(count, batch, args)

        def run(steps: int) -> list[float]:
            start = time.perf_counter()
            agent.run_episode(steps)
            return [(time.perf_counter() - start) / steps]

        return run

    modes = {"batched": True, "single": False}
    return {PLAYING.format(count, mode): playing(count, modes[mode]) for count in OBSERVERS for mode in modes}


def deep_cases() -> dict[str, Case]:
    """`Pipeline` itself."""
    import torch
    from models.resnet import resnet50

    from nbdist import autograd, optim, rpc
    from nbdist.nn import Pipeline, Reference, cut

    two = ["worker1", "worker2"]
    images, scores = torch.randn(16, 3, 64, 64), torch.randn(16, 1000)
    pipe = Pipeline(resnet50(), two, at=["layer3"])
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.001)
    even = Pipeline(resnet50(), two, balance="time", sample=images[:4])
    evens = optim.DistributedOptimizer(torch.optim.SGD, even.parameter_rrefs(), lr=0.001)

    def forward_and_backward() -> None:
        with autograd.context() as context_id:
            loss = torch.nn.functional.mse_loss(pipe(images), scores)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    def train_step(pipe: Pipeline, optimizer: optim.DistributedOptimizer) -> None:
        with autograd.context() as context_id:
            pipe.train_step(images, scores, torch.nn.functional.mse_loss)
            optimizer.step(context_id)

    def mlp(width: int, layers: int) -> Any:
        parts = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.Tanh())]
        return torch.nn.Sequential(*parts)

    equal = cut(mlp(512, 12), 2)
    x512 = torch.randn(8 * 96, 512)
    pair = Pipeline(equal, two, micro_batches=8)
    alone = Reference(equal, micro_batches=8)

    def both() -> None:
        with autograd.context():
            pair.train_step(x512, x512, torch.nn.functional.mse_loss)

    x1024 = torch.randn(8 * 512, 1024)
    four = [f"worker{rank}" for rank in range(1, 5)]
    schedules = {
        name: Pipeline(cut(mlp(1024, 12), 4), four, micro_batches=8, schedule=name) for name in ("gpipe", "1f1b")
    }

    def peak_of(name: str, which: int) -> Case:
        def run(count: int) -> list[float]:
            found = []
            for _ in range(count):
                rpc.rpc_sync("worker2", programs_module().watch_memory)
                with autograd.context():
                    schedules[name].train_step(x1024, x1024, torch.nn.functional.mse_loss)
                found.append(float(rpc.rpc_sync("worker2", programs_module().memory)[which]))
            return found

        return run

    by_hand = pipeline_cases()[RESNET.format(4, 16)]
    return {
        "by hand": by_hand,
        "Pipeline, forward and backward": each(forward_and_backward),
        "Pipeline, train_step": each(lambda: train_step(pipe, optimizer)),
        "Pipeline, train_step, cut by time": each(lambda: train_step(even, evens)),
        "two stages, 8 micro-batches": each(both),
        "one process, the same": each(lambda: alone.train_step(x512, x512, torch.nn.functional.mse_loss) and None),
        **{
            f"{what}, {name}": peak_of(name, which)
            for which, what in enumerate(("in use", "resident"))
            for name in ("gpipe", "1f1b")
        },
    }


CASES = {"pipeline": pipeline_cases, "server": server_cases, "cartpole": cartpole_cases, "deep": deep_cases}


# --- contestants ----------------------------------------------------------------------------------


def programs_module() -> Any:
    """This file, by the name by which all processes know it: functions travel by that."""
    import programs

    return programs


def contestant(library: str, world: str, rank: int, path: str) -> None:
    """One process."""
    if library == "nbdist":
        from nbdist import compat

        compat.install()
    import torch
    import torch.distributed.rpc as rpc

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    name, size, _ = WORLDS[world]
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=300, num_worker_threads=16)
    rpc.init_rpc(name(rank), rank=rank, world_size=size, rpc_backend_options=options)
    if rank == 0:
        harness.serve(torch.__version__, programs_module().CASES[world]())
    rpc.shutdown()


def lead(library: str, world: str) -> None:
    """Rank 0, and the processes of the others."""
    path = tempfile.mktemp()
    command = [sys.executable, "-c", "import sys, programs; programs.contestant(*eval(sys.argv[1]))"]
    others = [
        subprocess.Popen([*command, repr((library, world, rank, path))], stdin=subprocess.DEVNULL)
        for rank in range(1, WORLDS[world][1])
    ]
    programs_module().contestant(library, world, 0, path)
    for other in others:
        other.wait()
    Path(path).unlink(missing_ok=True)


def start(library: str, world: str) -> Contestant:
    """A contestant by name."""
    folders = [str(HERE), str(HERE.parent / "notebooks"), str(HERE.parent / "notebooks" / "programs")]
    path = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))
    return Contestant(library, [sys.executable, __file__, "--contestant", library, world], {"PYTHONPATH": path})


def main() -> None:
    """Run what was asked for."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--contestant", nargs=2)
    parser.add_argument("--world", choices=WORLDS, action="append")
    chosen = parser.parse_args()
    if chosen.contestant:
        lead(*chosen.contestant)
        return
    harness.touch_memory()
    times: harness.Times = {}
    own: harness.Times = {}
    for world in chosen.world or WORLDS:
        cases = WORLDS[world][2]
        contestants = [start(library, world) for library in (("nbdist",) if world == "deep" else ("nbdist", "torch"))]
        (own if world == "deep" else times).update(harness.race(contestants, cases, chosen.rounds))
        for one in contestants:
            one.close()
    print(f"{harness.machine()}\nmedians of {chosen.rounds} rounds\n")
    if times:
        print(harness.table(times, "torch", "nbdist", LIMITS))
    if own:
        print(f"\n{_own(own, times)}")
    harness.write({"machine": harness.machine(), "times": times, "own": own}, chosen.json)


def draw(times: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """How each program's time grows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.8), layout="constrained")
    panels = {
        "DistResNet50, a step: splits": (SPLITS, {"": [RESNET.format(splits, 16) for splits in SPLITS]}),
        "DistResNet50, a step: batch": (BATCHES, {"": [RESNET.format(4, batch) for batch in BATCHES]}),
        "CartPole, a step: observers": (
            OBSERVERS,
            {mode: [PLAYING.format(count, mode) for count in OBSERVERS] for mode in ("batched", "single")},
        ),
        "server, a round: trainers": (TRAINERS, {"": [SERVING.format(count) for count in TRAINERS]}),
    }
    for axes, (title, (over, lines)) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for mode, cases in lines.items():
            for library, colour in (("nbdist", "C0"), ("torch", "C1")):
                ys = [statistics.median(times[case][library]) * 1e3 for case in cases]
                axes.plot(
                    over, ys, "--o" if mode == "single" else "-o", color=colour, label=f"{library} {mode}".strip()
                )
        axes.set(title=title, ylabel="ms", xticks=over, ylim=(0, None))
        axes.title.set_fontsize(10)
        axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _own(own: harness.Times, times: harness.Times) -> str:
    middle = {case: statistics.median(by_name["nbdist"]) for case, by_name in own.items()}
    speed = middle["one process, the same"] / middle["two stages, 8 micro-batches"] / (2 * 8 / 9)
    rows = [
        f"| {name} | {harness.duration(middle[name])} | {middle[name] / middle['by hand']:.2f} of by hand | ≤ 1 |"
        for name in OWN
        if name.startswith("Pipeline")
    ]
    rows.append(
        f"| two stages of equal cost, 8 micro-batches | {harness.duration(middle['two stages, 8 micro-batches'])} | "
        f"{speed:.2f} of what two workers could do at most, of one process x 2 x 8/9 | ≥ 0.85 |"
    )
    for what, limit in (("in use", "≤ 0.6"), ("resident", "-")):
        less, more = (middle[f"{what}, {name}"] for name in ("1f1b", "gpipe"))
        rows.append(
            f"| memory of stage 1 of 4 at most, 1F1B, {what} | {less / 1e6:.0f} MB | "
            f"{less / more:.2f} of GPipe | {limit} |"
        )
    batched, single = (PLAYING.format(8, mode) for mode in ("batched", "single"))
    if batched in times:
        here, there = (statistics.median(times[case]["nbdist"]) for case in (batched, single))
        rows.append(
            f"| CartPole, 8 observers, batched | {harness.duration(here)} | {here / there:.2f} of single | < 1 |"
        )
    return "\n".join(["| nbdist alone | | ratio | limit |", "| --- | ---: | ---: | ---: |", *rows])


if __name__ == "__main__":
    main()
