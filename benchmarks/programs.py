"""Measures whole programs, written for torch.distributed.rpc, unchanged on nbdist and on torch, in pairs (see `pairs`).

`pipelines.py` measures `Pipeline`, on workers that are started here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import messages
import pairs
from harness import Case, Contestant, each
from pairs import Bound, Pair, Turn

HERE = Path(__file__).resolve().parent

RESNET = "DistResNet50, 2 workers, {} splits, {} of 64x64"
SPLITS, BATCHES, OBSERVERS, TRAINERS = (1, 2, 4, 8), (4, 8, 16, 32), (1, 2, 4, 8), (1, 2, 4)
SIZES = [(splits, 16) for splits in SPLITS] + [(4, batch) for batch in BATCHES if batch != 16]
TINY = "tiny layers, 2 workers, 4 splits, 4 MB activations"
PLAYING = "CartPole, {} observers, {}"
SERVING = "parameter server, {} trainers"
WORLDS: dict[str, tuple[Callable[[int], str], int, dict[str, int]]] = {
    "pipeline": (
        lambda rank: f"worker{rank}" if rank else "master",
        3,
        {RESNET.format(*size): 2 for size in SIZES} | {TINY: 10},
    ),
    "server": (lambda rank: f"trainer{rank}" if rank else "ps", 5, {SERVING.format(count): 20 for count in TRAINERS}),
    "cartpole": (
        lambda rank: f"observer{rank}" if rank else "agent",
        9,
        {PLAYING.format(count, mode): 30 for count in OBSERVERS for mode in ("batched", "single")},
    ),
    "deep": (lambda rank: f"worker{rank}" if rank else "master", 5, {}),
}
"""By world: the name of each rank, the number of processes, and the cases with how often each runs in a round."""

BOUNDS = {
    RESNET.format(4, 16): Bound(1.02),
    TINY: Bound(0.6),
    PLAYING.format(8, "batched"): Bound(0.8),
    SERVING.format(4): Bound(1.0),
}
BATCHED = Pair(
    "CartPole, 8 observers",
    Turn("nbdist", PLAYING.format(8, "batched"), 30),
    Turn("nbdist", PLAYING.format(8, "single"), 30),
    Bound(1.0),
)


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
    """Return the cases of `pipelines.py`."""
    import pipelines

    return pipelines.cases()


CASES = {"pipeline": pipeline_cases, "server": server_cases, "cartpole": cartpole_cases, "deep": deep_cases}


# --- contestants ----------------------------------------------------------------------------------


def programs_module() -> Any:
    """This file, by the name by which all processes know it: functions travel by that."""
    import programs

    return programs


def contestant(library: str, world: str, rank: int, path: str) -> None:
    """One process."""
    if library == "nbdist":
        import nbdist
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
        ours = library == "nbdist"
        counter = messages.counter(rpc, [name(other) for other in range(1, size)]) if ours else None
        harness.serve(nbdist.__version__ if ours else torch.__version__, programs_module().CASES[world](), counter)
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
    path = harness.search_path(HERE, HERE.parent / "notebooks", HERE.parent / "notebooks" / "programs")
    return Contestant(library, [sys.executable, __file__, "--contestant", library, world], {"PYTHONPATH": path})


def main() -> None:
    """Measure what was asked for."""
    parser = harness.paired_arguments(__doc__ or "")
    parser.add_argument("--contestant", nargs=2)
    parser.add_argument("--world", choices=[world for world in WORLDS if WORLDS[world][2]], action="append")
    chosen = parser.parse_args()
    if chosen.contestant:
        lead(*chosen.contestant)
        return
    harness.touch_memory()
    rounds: dict[str, dict[str, list[pairs.Round]]] = {}
    lines: dict[str, list[pairs.Line]] = {}
    for world in chosen.world or [world for world in WORLDS if WORLDS[world][2]]:
        tables = {world: pairs.same_cases(WORLDS[world][2], "nbdist", "torch", BOUNDS)}
        if world == "cartpole":
            tables["batched"] = [BATCHED]
        racing = {library: start(library, world) for library in ("nbdist", "torch")}
        pinned = harness.pin(racing.values())
        for table, compared in tables.items():
            rounds[table] = harness.measure(racing, compared, chosen.rounds, chosen.seed)
            lines[table] = harness.lines_of(racing, compared, rounds[table])
        for one in racing.values():
            one.close()
    print(f"{harness.machine()}\n\n{harness.conditions(racing, chosen, pinned)}\n")
    beside_torch = [line for table, found in lines.items() if table != "batched" for line in found]
    print(f"{pairs.comparison(beside_torch)}\n\n{pairs.costs(beside_torch)}")
    if "batched" in lines:
        print(f"\nnbdist alone:\n\n{pairs.comparison(lines['batched'], 'batched', 'single')}")
    harness.write(harness.kept(chosen, rounds, lines), chosen.json)


def draw(medians: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw how each program's time grows: ``medians`` are seconds, by case and library."""
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
                ys = [medians[case][library] * 1e3 for case in cases]
                axes.plot(
                    over, ys, "--o" if mode == "single" else "-o", color=colour, label=f"{library} {mode}".strip()
                )
        axes.set(title=title, ylabel="ms", xticks=over, ylim=(0, None))
        axes.title.set_fontsize(10)
        axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
