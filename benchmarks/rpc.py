"""Calls between two processes of one host: nbdist beside torch's TensorPipe and bare ZeroMQ, in one run.

The same once more while the callee's main thread runs Python; and what a call and a barrier cost with more agents
alive. ``--memory`` asks what is left after 100,000 calls. `peers.py` compares with other libraries.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import harness
from harness import Contestant

CASES = {
    "empty call": 400,
    "torch.add, small tensor": 400,
    "remote().to_here()": 200,
    "5,000 outstanding, per call": 5000,
    "echo 1 MB": 60,
    "echo 64 MB": 4,
}
LIMITS = {
    "empty call": 0.6,
    "torch.add, small tensor": 0.6,
    "remote().to_here()": 0.6,
    "5,000 outstanding, per call": 0.67,
    "echo 1 MB": 0.6,
    "echo 64 MB": 0.3,
}
OVER_ZEROMQ = dict.fromkeys(list(CASES)[:3], 1.5)
BUSY = {
    "empty call, busy": 20,
    "torch.add, small tensor, busy": 20,
    "remote().to_here(), busy": 10,
    "5,000 outstanding, per call, busy": 500,
    "echo 1 MB, busy": 10,
}
AGENTS = (2, 4, 8, 16)
AGENTS_LIMITS = {"empty call": 1.2, "a barrier, per agent": 2.0}
SCRIPT = str(Path(__file__).parent / "contestants.py")


def start(name: str, label: str | None = None, **environment: str) -> Contestant:
    """A contestant by name, called ``label`` in the tables."""
    # Some peers' workers import the functions by name: they must find `contestants` too.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    return Contestant(label or name, [sys.executable, SCRIPT, name], {**environment, "PYTHONPATH": path})


def main_table(rounds: int) -> harness.Times:
    """The comparison that counts."""
    over_zeromq = start("nbdist", "nbdist over zeromq", NBDIST_CHANNEL="zeromq")
    contestants = [start("nbdist"), over_zeromq, start("tensorpipe"), start("zeromq")]
    times = harness.race(contestants, CASES, rounds)
    for contestant in contestants:
        contestant.close()
    versions = ", ".join(f"{contestant.name} {contestant.version}" for contestant in contestants)
    print(f"{versions}; medians of {rounds} rounds\n")
    print(harness.table(times, "tensorpipe", "nbdist", LIMITS))
    both = {case: {name: times[case][name] for name in ("nbdist over zeromq", "tensorpipe")} for case in CASES}
    print("\nAll over ZeroMQ, large tensors through shared memory all the same:\n")
    print(harness.table(both, "tensorpipe", "nbdist over zeromq", OVER_ZEROMQ))
    return times


def busy_table(rounds: int) -> harness.Times:
    """The callee has something else to do."""
    contestants = [start("nbdist"), start("tensorpipe")]
    times = harness.race(contestants, BUSY, rounds)
    for contestant in contestants:
        contestant.close()
    print("\nWhile the main thread of the callee runs a Python loop:\n")
    print(harness.table(times, "tensorpipe", "nbdist", dict.fromkeys(BUSY, 1.0)))
    return times


def agents_table(rounds: int) -> harness.Times:
    """What a call, and a barrier, cost with more agents alive (on as many cores as there are)."""
    contestants = [start("nbdist", str(count), BENCH_AGENTS=str(count)) for count in AGENTS]
    times = harness.race(contestants, {"empty call": 300, "a barrier, per agent": 20}, rounds)
    for contestant in contestants:
        contestant.close()
    print(f"\nBy the number of agents alive; the ratio is that of {AGENTS[-1]} to {AGENTS[0]}:\n")
    print(harness.table(times, str(AGENTS[0]), str(AGENTS[-1]), AGENTS_LIMITS))
    return times


def memory_table(calls: int) -> None:
    """Resident memory of both processes after 1,000 calls and after ``calls``."""
    import torch
    from contestants import identity

    from nbdist import rpc

    path = tempfile.mktemp()
    options = rpc.RpcBackendOptions(init_method=f"file://{path}")
    server = subprocess.Popen([sys.executable, SCRIPT, "nbdist", "serve", "1", path], stdin=subprocess.DEVNULL)
    rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
    tensor, small = torch.ones(1 << 18), torch.ones(2)

    def run(count: int) -> tuple[float, float]:
        for _ in range(count // 2):
            rpc.rpc_sync("worker1", identity, args=(tensor,))
            rref = rpc.remote("worker1", torch.add, args=(small, 1))
            rref.to_here()
        del rref
        time.sleep(1)  # let acknowledgements and deletions settle
        return _resident(os.getpid()), _resident(server.pid)

    few, start_time = run(1000), time.perf_counter()
    many = run(calls)
    took = time.perf_counter() - start_time
    print(f"\n| resident memory | after 1,000 calls | after {calls:,} more ({took:.0f} s) | grown |")
    print("| --- | ---: | ---: | ---: |")
    for name, before, after in zip(("caller", "callee"), few, many, strict=True):
        print(f"| {name} | {before:.1f} MB | {after:.1f} MB | {after - before:+.1f} MB |")
    rpc.shutdown()
    server.wait()
    Path(path).unlink(missing_ok=True)


def _resident(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    """Run what was asked for."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--memory", type=int, nargs="?", const=100_000, default=0, metavar="CALLS")
    options = parser.parse_args()
    print(f"{harness.machine()}\n")
    times = main_table(options.rounds)
    busy = busy_table(options.rounds)
    agents = agents_table(options.rounds)
    if options.memory:
        memory_table(options.memory)
    harness.write({"machine": harness.machine(), "times": times, "busy": busy, "agents": agents}, options.json)


if __name__ == "__main__":
    main()
