"""Measures `Pipeline`, in pairs (see `pairs`): beside the program by hand at the same cut, and beside plain processes.

By hand is the tutorial's program (`notebooks/programs/pipeline_resnet50.py`), unchanged, on nbdist: a ResNet-50 cut
before its third group of layers, four micro-batches of four images, forward, backward and a step of the optimizer.
`Pipeline` has the same two stages, micro-batches and batch. Two equal stages are measured beside `side_by_side`. Then
how much memory a stage needs in either schedule.
"""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import pairs
import programs
import side_by_side
from harness import Case, each
from pairs import Bound, Pair, Turn
from side_by_side import MICRO_BATCHES, ROWS, WIDTH

BY_HAND = "by hand"
TRAIN_STEP = "Pipeline, train_step"
FORWARD_BACKWARD = "Pipeline, forward and backward"
BY_TIME = "Pipeline, train_step, cut by time"
STAGES = "two equal stages, 8 micro-batches"
ALONE = "one process, both stages"

PROGRAMS = [
    Pair(TRAIN_STEP, Turn("nbdist", TRAIN_STEP, 2), Turn("nbdist", BY_HAND, 2), Bound(1.0, 0.9)),
    Pair(FORWARD_BACKWARD, Turn("nbdist", FORWARD_BACKWARD, 2), Turn("nbdist", BY_HAND, 2), Bound(1.2, 1.0)),
    Pair(BY_TIME, Turn("nbdist", BY_TIME, 2), Turn("nbdist", BY_HAND, 2)),
]
FILLED = (MICRO_BATCHES + 1) / MICRO_BATCHES
"""How much longer two stages take than either alone, even if nothing else costs: the second waits for the first."""
EQUAL = [
    Pair(
        "two equal stages beside two plain processes",
        Turn("nbdist", STAGES, 15),
        Turn("plain processes", side_by_side.CASE, 15),
        Bound(0.9, 0.95, at_least=True),
        share=FILLED,
    ),
    Pair(
        "two plain processes beside twice one",
        Turn("plain processes", side_by_side.CASE, 15),
        Turn("nbdist", ALONE, 15),
        share=0.5,
    ),
]
SHARES = (
    f"Two equal stages, {MICRO_BATCHES} micro-batches: the share that they reach of the speed of two plain processes, "
    f"which compute the same stages side by side and never wait for each other. A pipeline of two stages takes "
    f"{MICRO_BATCHES + 1}/{MICRO_BATCHES} of their time at least; this is taken into account. Higher is better."
)

MEMORY = {f"{what}, {name}": 2 for what in ("in use", "resident") for name in ("gpipe", "1f1b")}
MEMORY_ROUNDS = 3


# --- what runs on the workers ---------------------------------------------------------------------


class Heap(ctypes.Structure):
    """Mirrors C's ``struct mallinfo2``."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


class Memory:
    """Watches how much more memory than at its beginning is in use at most, and how much is resident at most."""

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
        """Stop watching; return the bytes in use, and resident, at most."""
        self._stop()
        return self._most - self._before, _status("VmHWM") - self._resident


_memory: list[Memory] = []


def watch_memory() -> None:
    """Watch the memory of this process from now on."""
    _memory.append(Memory())


def memory() -> tuple[int, int]:
    """Return what `Memory` found until now."""
    return _memory.pop().end()


def _status(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


# --- what rank 0 measures -------------------------------------------------------------------------


def cases() -> dict[str, Case]:
    """Return what rank 0 measures."""
    import pipelines  # this file, by the name by which the workers know it: functions travel by that
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

    equal = cut(side_by_side.model(), 2)
    rows = torch.randn(MICRO_BATCHES * ROWS, WIDTH)
    pair = Pipeline(equal, two, micro_batches=MICRO_BATCHES)
    alone = Reference(equal, micro_batches=MICRO_BATCHES)

    def both() -> None:
        with autograd.context():
            pair.train_step(rows, rows, torch.nn.functional.mse_loss)

    def one() -> None:
        for stage in equal:
            stage.zero_grad()
        alone.train_step(rows, rows, torch.nn.functional.mse_loss)

    x1024 = torch.randn(8 * 512, 1024)
    four = [f"worker{rank}" for rank in range(1, 5)]
    schedules = {
        name: Pipeline(cut(mlp(1024, 12), 4), four, micro_batches=8, schedule=name) for name in ("gpipe", "1f1b")
    }

    def peak_of(name: str, which: int) -> Case:
        def run(count: int) -> list[float]:
            found = []
            for _ in range(count):
                rpc.rpc_sync("worker2", pipelines.watch_memory)
                with autograd.context():
                    schedules[name].train_step(x1024, x1024, torch.nn.functional.mse_loss)
                found.append(float(rpc.rpc_sync("worker2", pipelines.memory)[which]))
            return found

        return run

    by_hand = programs.pipeline_cases()[programs.RESNET.format(4, 16)]
    return {
        BY_HAND: by_hand,
        FORWARD_BACKWARD: each(forward_and_backward),
        TRAIN_STEP: each(lambda: train_step(pipe, optimizer)),
        BY_TIME: each(lambda: train_step(even, evens)),
        STAGES: each(both),
        ALONE: each(one),
        **{
            f"{what}, {name}": peak_of(name, which)
            for which, what in enumerate(("in use", "resident"))
            for name in ("gpipe", "1f1b")
        },
    }


def memory_rows(found: harness.Times) -> str:
    """Return a table of how much memory a stage needs in one schedule and in the other."""
    middle = {case: statistics.median(by_name["nbdist"]) for case, by_name in found.items()}
    rows = ["| memory of stage 1 of 4 at most | 1F1B | GPipe | ratio | limit |", "| --- | ---: | ---: | ---: | ---: |"]
    for what, bound in (("in use", Bound(0.6)), ("resident", Bound())):
        less, more = (middle[f"{what}, {name}"] for name in ("1f1b", "gpipe"))
        limit = f"{bound.limit:g}" if bound.limit else "-"
        missed = " **missed**" if bound.verdict(less / more) == "missed" else ""
        rows.append(f"| {what} | {less / 1e6:.0f} MB | {more / 1e6:.0f} MB | {less / more:.2f}{missed} | {limit} |")
    return "\n".join(rows)


def main() -> None:
    """Measure."""
    options = harness.paired_arguments(__doc__ or "").parse_args()
    harness.touch_memory()
    racing = {"nbdist": programs.start("nbdist", "deep"), "plain processes": side_by_side.start()}
    pinned = harness.pin(racing.values())
    tables = {"programs": PROGRAMS, "equal stages": EQUAL}
    rounds = {table: harness.measure(racing, tables[table], options.rounds, options.seed) for table in tables}
    lines = {table: harness.lines_of(racing, tables[table], rounds[table]) for table in tables}
    memory = harness.race([racing["nbdist"]], MEMORY, min(options.rounds, MEMORY_ROUNDS))
    for contestant in racing.values():
        contestant.close()
    print(f"{harness.machine()}\n\n{harness.conditions(racing, options, pinned)}\n")
    print(pairs.comparison(lines["programs"], "Pipeline", "by hand"), end="\n\n")
    print(pairs.costs(lines["programs"], "Pipeline", "by hand"), end="\n\n")
    print(SHARES, end="\n\n")
    print(pairs.comparison(lines["equal stages"], "the one", "the other", "share"), end="\n\n")
    print(memory_rows(memory))
    harness.write({**harness.kept(options, rounds, lines), "memory": memory}, options.json)


if __name__ == "__main__":
    main()
