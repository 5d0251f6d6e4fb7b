"""Computes the two stages of a pipeline in two plain processes side by side, which send nothing to each other.

That is what a pipeline of two equal stages can reach on this machine when messages cost nothing and nobody ever waits
for a stage: its processes share cores, caches and memory as the workers of the pipeline do. Run as a contestant; its
two processes run this file with the index of their stage.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
from harness import Contestant, each

MICRO_BATCHES, ROWS, WIDTH, LAYERS = 8, 96, 512, 12
CASE = "two plain processes, the two stages side by side"


def model() -> Any:
    """Return a model whose halves have equal cost."""
    import torch

    parts = [part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    return torch.nn.Sequential(*parts)


def compute(index: int) -> None:
    """Run forward and backward of one stage for all micro-batches, each time that a line comes."""
    import torch

    from nbdist.nn import cut

    torch.set_num_threads(1)
    stage = cut(model(), 2)[index]
    first = index == 0
    batch = torch.randn(ROWS, WIDTH)
    print("ready", flush=True)
    for _ in sys.stdin:
        stage.zero_grad()
        for _ in range(MICRO_BATCHES):
            # The second stage owes the first a gradient, and computes the loss; the first is given its gradient.
            x = batch if first else batch.clone().requires_grad_()
            y = stage(x)
            if first:
                y.backward(batch)
            else:
                torch.nn.functional.mse_loss(y, batch).backward()
        print("done", flush=True)


def contest() -> None:
    """Lead the two processes."""
    import torch

    both = [
        subprocess.Popen(
            [sys.executable, __file__, str(index)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for index in range(2)
    ]

    def wait() -> None:
        for process in both:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError(f"a process of {CASE} has ended: {process.wait()}")

    def step() -> None:
        for process in both:
            assert process.stdin is not None
            print(file=process.stdin, flush=True)
        wait()

    wait()
    harness.serve(torch.__version__, {CASE: each(step)})
    for process in both:
        process.communicate()


def start() -> Contestant:
    """Start it as a contestant."""
    return Contestant("plain processes", [sys.executable, __file__])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compute(int(sys.argv[1]))
    else:
        contest()
