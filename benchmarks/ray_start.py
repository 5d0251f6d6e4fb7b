"""Measures the start of workers that Ray places, beside bare actors of Ray's that import torch.

Both use one Ray of this machine, which runs already, in turns. An actor is there when it has imported torch and answers
a call; a cluster, when all workers are ready: kernels, RPC and process group. Each round ends both before the next one
starts. The first round, which reads Python's files from the disk, does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness

LIMIT = 1.3


class _Bare:
    """An actor that has torch."""

    def __init__(self) -> None:
        import torch

        self.version = torch.__version__

    def answer(self) -> str:
        """Return the version of torch, which shows that it is there."""
        return self.version


def start_actors(ray: Any, count: int) -> float:
    """Start so many bare actors; return the seconds until all answer. They end before this returns."""
    began = time.perf_counter()
    actors = [ray.remote(_Bare).options(num_cpus=1).remote() for _ in range(count)]
    ray.get([actor.answer.remote() for actor in actors])
    took = time.perf_counter() - began
    for actor in actors:
        ray.kill(actor)
    _wait_for_room(ray, count)
    return took


def start_workers(ray: Any, count: int) -> float:
    """Start a cluster of so many workers; return the seconds until all are ready. It ends before this returns."""
    import nbdist

    began = time.perf_counter()
    with nbdist.Cluster(count, launcher="ray", timeout=300):
        took = time.perf_counter() - began
    _wait_for_room(ray, count)
    return took


def _wait_for_room(ray: Any, count: int) -> None:
    """Wait until Ray has given all places back."""
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2)  # Ray starts processes in advance


def main() -> None:
    """Run the rounds, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    import ray

    ray.init(num_cpus=options.workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    times: dict[str, list[float]] = {"bare actors": [], "workers": []}
    for number in range(options.rounds + 1):
        for name, start in (("bare actors", start_actors), ("workers", start_workers)):
            took = start(ray, options.workers)
            print(f"round {number}: {options.workers} {name}: {took:.1f} s", flush=True)
            if number:
                times[name].append(took)
    medians = {name: statistics.median(each) for name, each in times.items()}
    ratio = medians["workers"] / medians["bare actors"]
    print(harness.machine())
    print(f"{medians['workers']:.1f} s / {medians['bare actors']:.1f} s = {ratio:.2f} (limit {LIMIT})")
    ray.shutdown()


if __name__ == "__main__":
    main()
