"""What it costs a program to run in a worker of nbdist: the same code on two workers, and on two ranks of ``torchrun``.

Both have a process group of gloo, and nobody calls the workers meanwhile. A second ``torchrun`` stands beside the
first one: how far two equal sides differ in the same rounds is how far to trust the ratios. So the limit of a case is
1.02, or the upper quartile of the ratios of the two ``torchrun``, if that is more.
"""

from __future__ import annotations

import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import pairs
from harness import Contestant
from pairs import Bound, Pair, Round

SCRIPT = str(Path(__file__))
CASES = {
    "a Python loop": 20,
    "two threads of Python": 12,
    "four threads of Python": 6,
    "a step of local training": 60,
    "a step of DDP": 60,
    "a step of FSDP2": 20,
    "a DataLoader, read ahead by four threads": 6,
}
LIMIT = 1.02
_STEPS = 100_000
"""Steps of a Python loop: some milliseconds."""

_AFTER_CALLS = 0.3
"""Seconds after which the calls that began a turn are past: what is measured is a worker that nobody calls."""


# -- in the workers ------------------------------------------------------------------------------


def loop() -> int:
    """Compute in Python alone."""
    number = 1
    for _ in range(_STEPS):
        number = (number * 5 + 3) % 1000003
    return number


def in_threads(count: int) -> Callable[[], None]:
    """Return a function that runs a loop in each of ``count`` threads at once."""

    def run() -> None:
        threads = [threading.Thread(target=loop) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


def training(wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Return a function that trains a small model one step."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = wrap(nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(64, 128)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs).backward()
        optimizer.step()

    return step


def data_parallel() -> Callable[[], None]:
    """Return a step of DDP."""
    from torch.nn.parallel import DistributedDataParallel

    return training(DistributedDataParallel)


def fully_sharded() -> Callable[[], None]:
    """Return a step of FSDP2, each layer in shards of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))

    def wrap(model: Any) -> Any:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return training(wrap)


def loading() -> Callable[[], None]:
    """Return a function that reads a DataLoader whose samples four threads prepare, in Python and in torch."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Any:
            text = " ".join(str(number * index % 97) for number in range(1000))
            return torch.tensor([float(word) for word in text.split()]).softmax(0)

        def __getitems__(self, indices: Sequence[int]) -> list[Any]:
            return list(pool.map(self.__getitem__, indices))

    pool = ThreadPoolExecutor(4)
    loader = DataLoader(Samples(), batch_size=8)

    def ahead(into: queue.Queue[Any]) -> None:
        for batch in loader:
            into.put(batch)
        into.put(None)

    def run() -> None:
        batches: queue.Queue[Any] = queue.Queue(2)
        reader = threading.Thread(target=ahead, args=(batches,))
        reader.start()
        while (batch := batches.get()) is not None:
            batch.sum()
        reader.join()

    return run


_MAKE: dict[str, Callable[[], Callable[[], Any]]] = {
    "a Python loop": lambda: loop,
    "two threads of Python": lambda: in_threads(2),
    "four threads of Python": lambda: in_threads(4),
    "a step of local training": lambda: training(lambda model: model),
    "a step of DDP": data_parallel,
    "a step of FSDP2": fully_sharded,
    "a DataLoader, read ahead by four threads": loading,
}
_made: dict[str, Callable[[], Any]] = {}
_clock = time.process_time if os.environ.get("BENCH_CPU") else time.perf_counter


def run(case: str, count: int) -> list[float]:
    """Run a case in this worker, while the other worker does the same. Returns the seconds of each operation."""
    if case not in _made:
        _made[case] = _MAKE[case]()
    operation, times = _made[case], []
    time.sleep(_AFTER_CALLS)
    for _ in range(count):
        start = _clock()
        operation()
        times.append(_clock() - start)
    return times


# -- the contestants ------------------------------------------------------------------------------


def nbdist() -> None:
    """Two workers of a cluster."""
    import nbdist

    with nbdist.Cluster(2) as cluster:
        cluster.execute(f"import sys; sys.path.insert(0, {str(Path(SCRIPT).parent)!r}); import being_here")

        def on_both(name: str, count: int) -> list[float]:
            cluster.execute(f"times = being_here.run({name!r}, {count})")
            return list(cluster.pull("times", "worker0"))

        harness.serve(nbdist.__version__, {name: partial(on_both, name) for name in CASES})


def torchrun() -> None:
    """One of two ranks. The first one is asked, and tells the other."""
    import being_here  # not __main__: the same module as in a worker
    import torch
    import torch.distributed as dist

    def on_both(name: str, count: int) -> list[float]:
        dist.broadcast_object_list([name, count])
        return being_here.run(name, count)

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        harness.serve(torch.__version__, {name: partial(on_both, name) for name in CASES})
        dist.broadcast_object_list([None, 0])
    else:
        asked: list[Any] = ["", 0]
        while True:
            dist.broadcast_object_list(asked)
            if asked[0] is None:
                break
            being_here.run(*asked)
    dist.destroy_process_group()


SIDES: dict[str, Sequence[str]] = {
    "nbdist": [SCRIPT, "nbdist"],
    "torchrun": [
        *("-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", SCRIPT, "torchrun"),
    ],
}


def start(side: str, label: str, cpu: bool) -> Contestant:
    """Start a contestant, called ``label`` in the tables; with ``cpu``, its workers measure their own CPU time."""
    return Contestant(label, [sys.executable, *SIDES[side]], {"BENCH_CPU": "1"} if cpu else {})


# -- the tables ------------------------------------------------------------------------------------


def bounded(pair: Pair, equals: Sequence[Round]) -> Pair:
    """Return the pair with its limit. ``equals`` are the rounds of the two equal sides in the same case."""
    ratios = pairs.ratios(equals, lambda sample: statistics.median(sample.times))
    return replace(pair, bound=Bound(max(LIMIT, pairs.quantile(ratios, 0.75))))


def main() -> None:
    """Measure, and print the tables."""
    parser = harness.paired_arguments(__doc__ or "")
    parser.add_argument("--case", choices=CASES, action="append", help="measure this case alone")
    parser.add_argument("--cpu", action="store_true", help="the CPU time of a worker: for a machine with other work")
    options = parser.parse_args()
    print(f"{harness.machine()}\n")
    counts = {name: CASES[name] for name in options.case or CASES}
    sides = {"nbdist": "nbdist", "torchrun": "torchrun", "torchrun again": "torchrun"}
    racing = {label: start(side, label, options.cpu) for label, side in sides.items()}
    here = pairs.same_cases(counts, "nbdist", "torchrun", {})
    equal = [replace(pair, name=f"{pair.name} ", ours=replace(pair.ours, contestant="torchrun again")) for pair in here]
    rounds = harness.measure(racing, [*here, *equal], options.rounds, options.seed)
    for contestant in racing.values():
        contestant.close()
    here = [bounded(pair, rounds[twin.name]) for pair, twin in zip(here, equal, strict=True)]
    lines = {
        table: [line for pair in chosen for line in pairs.lines(pair, rounds[pair.name])]
        for table, chosen in (("here", here), ("equal", equal))
    }
    print(f"{harness.conditions(racing, options, 'processes are not pinned')}\n")
    print(pairs.comparison(lines["here"], theirs="torchrun"), end="\n\n")
    print(f"Two equal sides:\n\n{pairs.comparison(lines['equal'], 'torchrun again', 'torchrun')}")
    by_table = {"here": {pair.name: rounds[pair.name] for pair in here}}
    by_table["equal"] = {pair.name: rounds[pair.name] for pair in equal}
    harness.write(harness.kept(options, by_table, lines), options.json)


if __name__ == "__main__":
    {"nbdist": nbdist, "torchrun": torchrun}.get(sys.argv[1] if len(sys.argv) > 1 else "", main)()
