"""Measures calls between two processes of one host: nbdist beside torch's TensorPipe, in pairs (see `pairs`).

The same once more while the callee's main thread runs Python, and with ZeroMQ forced; and what a call and a barrier
cost with more agents alive. ``--memory`` asks what is left after 100,000 calls. `peers.py` compares with other
libraries.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import harness
import pairs
from harness import Contestant
from pairs import Bound, Pair, Turn

CASES = {
    "empty call": 400,
    "empty call of `__main__`": 400,
    "torch.add, small tensor": 400,
    "remote().to_here()": 200,
    "5,000 outstanding, per call": 5000,
    "echo 1 MB": 60,
    "echo 64 MB": 4,
}
BOUNDS = {
    "empty call": Bound(0.45, 0.3),
    "empty call of `__main__`": Bound(0.5, 0.3),
    "torch.add, small tensor": Bound(0.65, 0.45),
    "remote().to_here()": Bound(0.7, 0.5),
    "5,000 outstanding, per call": Bound(0.6, 0.4),
    "echo 1 MB": Bound(0.4, 0.3),
    "echo 64 MB": Bound(0.2, 0.12),
}
CPU = {"empty call": ("CPU of both sides, empty call", Bound(0.25, 0.15))}

OVER_ZEROMQ = {case: CASES[case] for case in ("empty call", "torch.add, small tensor", "remote().to_here()")}
ZEROMQ_BOUNDS = {
    "empty call": Bound(1.0, 0.7),
    "torch.add, small tensor": Bound(1.4, 1.0),
    "remote().to_here()": Bound(1.4, 1.0),
}

BUSY = {
    "empty call, busy": 20,
    "torch.add, small tensor, busy": 20,
    "remote().to_here(), busy": 20,
    "5,000 outstanding, per call, busy": 500,
    "echo 1 MB, busy": 10,
}
BUSY_BOUNDS = {**dict.fromkeys(BUSY, Bound(1.0)), "remote().to_here(), busy": Bound(2.0, 1.2)}

AGENTS = (4, 8, 16)
FEW = 2
AGENTS_CASES = {"empty call": (300, Bound(1.2)), "a barrier, per agent": (20, Bound(2.0))}
SCRIPT = str(Path(__file__).parent / "contestants.py")


def start(name: str, label: str | None = None, python: str = sys.executable, **environment: str) -> Contestant:
    """Start a contestant by name, called ``label`` in the tables, whose library is installed for ``python``."""
    # Some peers' workers import the functions by name: they must find `contestants` too.
    path = harness.search_path(Path(__file__).parent, python=python)
    return Contestant(label or name, [python, SCRIPT, name], {**environment, "PYTHONPATH": path})


@contextlib.contextmanager
def cores_awake() -> Iterator[None]:
    """Keep the cores from falling asleep between messages, by loops that give way to every other process."""
    loop = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def agents_pairs() -> list[Pair]:
    """Return pairs of many agents and few; the limits are for the most."""
    return [
        Pair(
            f"{case}, {count} agents",
            Turn(str(count), case, operations),
            Turn(str(FEW), case, operations),
            bound if count == max(AGENTS) else Bound(),
        )
        for case, (operations, bound) in AGENTS_CASES.items()
        for count in AGENTS
    ]


TABLES = {
    "calls": pairs.same_cases(CASES, "nbdist", "tensorpipe", BOUNDS, CPU),
    "unpinned": pairs.same_cases(CASES, "nbdist", "tensorpipe", BOUNDS, CPU),
    "busy": pairs.same_cases(BUSY, "nbdist", "tensorpipe", BUSY_BOUNDS, busy=True),
    "zeromq": pairs.same_cases(OVER_ZEROMQ, "nbdist over zeromq", "tensorpipe", ZEROMQ_BOUNDS),
    "agents": agents_pairs(),
}


def contestants(tables: Sequence[str]) -> dict[str, Contestant]:
    """Start whoever takes part in these tables."""
    found: dict[str, Contestant] = {}
    if set(tables) - {"agents"}:
        found |= {"nbdist": start("nbdist"), "tensorpipe": start("tensorpipe")}
    if "zeromq" in tables:
        found |= {"nbdist over zeromq": start("nbdist", NBDIST_CHANNEL="zeromq"), "bare zeromq": start("zeromq")}
    if "agents" in tables:
        found |= {str(count): start("nbdist", BENCH_AGENTS=str(count)) for count in (FEW, *AGENTS)}
    return found


def written(lines: Mapping[str, Sequence[pairs.Line]]) -> str:
    """Return what was measured, as tables in Markdown."""
    parts = []
    if "calls" in lines:
        parts.append(pairs.comparison(lines["calls"]))
    if "unpinned" in lines:
        parts += ["The same, with all processes left to the system's scheduler:", pairs.comparison(lines["unpinned"])]
    if "busy" in lines:
        parts += ["While the main thread of the callee runs a Python loop:", pairs.comparison(lines["busy"])]
    if "zeromq" in lines:
        parts += ["With ZeroMQ forced:", pairs.comparison(lines["zeromq"], "nbdist over zeromq")]
    for table, ours in (("calls", "nbdist"), ("busy", "nbdist"), ("zeromq", "nbdist over zeromq")):
        if table in lines:
            parts.append(pairs.costs(lines[table], ours))
    if "agents" in lines:
        parts += [
            "By the number of agents alive, on as many cores as there are:",
            pairs.comparison(lines["agents"], "so many", f"{FEW} agents"),
        ]
    return "\n\n".join(parts)


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
    """Measure what was asked for."""
    parser = harness.paired_arguments(__doc__ or "")
    parser.add_argument("--table", choices=TABLES, action="append", help="measure this table alone")
    parser.add_argument("--memory", type=int, nargs="?", const=100_000, default=0, metavar="CALLS")
    options = parser.parse_args()
    chosen = options.table or list(TABLES)
    print(f"{harness.machine()}\n")
    racing = contestants(chosen)
    pinned = harness.pin(racing.values())
    rounds, lines = {}, {}
    for table in chosen:
        if table == "unpinned":
            harness.unpin(racing.values())
        rounds[table] = harness.measure(racing, TABLES[table], options.rounds, options.seed)
        lines[table] = harness.lines_of(racing, TABLES[table], rounds[table])
        if table == "unpinned":
            harness.pin(racing.values())
    if "bare zeromq" in racing:
        bare = partial(racing["bare zeromq"].run, "empty call", CASES["empty call"])
        floor = statistics.median(bare())
        with cores_awake():
            floor_awake = statistics.median(bare())
    for contestant in racing.values():
        contestant.close()
    print(f"{harness.conditions(racing, options, pinned)}\n\n{written(lines)}")
    if "bare zeromq" in racing:
        print("\nBare ZeroMQ, PUSH and PULL, one thread each side, a small message and back:", end=" ")
        print(f"{pairs.duration(floor)}, and {pairs.duration(floor_awake)} while idle loops keep the cores awake.")
    if options.memory:
        memory_table(options.memory)
    harness.write(harness.kept(options, rounds, lines), options.json)


if __name__ == "__main__":
    main()
