"""Measures what 100,000 calls without an answer cost: memory on either side, and who of several threads gets on.

The callee answers none of them until it is told to. Meanwhile a second thread of the caller and the main thread, which
reads its answers itself (`nbdist.rpc.calls.waiting_reader`), make calls one after the other for some seconds. Then all
are answered.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness

SECONDS = 3.0
_kept: dict[str, Any] = {"over": threading.Event()}


def later() -> Any:
    """Return a future that `answer` completes."""
    return _kept["future"]


def answer() -> None:
    """Answer all calls of `later`."""
    _kept["future"].set_result(None)


def quick() -> None:
    """The call that is made meanwhile."""


def end() -> None:
    """The callee is no longer needed."""
    _kept["over"].set()


def join(library: str, rank: int, path: str) -> Any:
    """Become agent ``rank`` of two; return the library's rpc module."""
    import torch

    if library == "torch":
        import torch.distributed.rpc as rpc

        options: Any = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=0)
    else:
        from nbdist import rpc  # type: ignore[no-redef]

        options = rpc.RpcBackendOptions(init_method=f"file://{path}", rpc_timeout=0)
    global later
    later = rpc.functions.async_execution(later)
    _kept["future"] = torch.futures.Future()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    return rpc


def serve(library: str, path: str) -> None:
    """Be the callee until `end`."""
    rpc = join(library, 1, path)
    _kept["over"].wait()
    rpc.shutdown()


def resident(pid: int) -> float:
    """Return the resident memory of a process, in bytes."""
    return float(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def row(library: str, calls: int) -> str:
    """Measure; return a row of the table."""
    path = tempfile.mktemp()
    command = [sys.executable, "-P", "-c", "import sys, outstanding; outstanding.serve(*sys.argv[1:])", library, path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])}
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    rpc = join(library, 0, path)
    for _ in range(1000):
        rpc.rpc_sync("worker1", quick)
    before = resident(os.getpid()), resident(server.pid)
    start = time.perf_counter()
    futures = [rpc.rpc_async("worker1", later) for _ in range(calls)]
    rpc.rpc_sync("worker1", quick)  # which comes after them
    made = (time.perf_counter() - start) / calls
    time.sleep(1)
    after = resident(os.getpid()), resident(server.pid)
    took: dict[str, list[float]] = {"main thread": [], "another thread": []}

    def keep_calling(times: list[float]) -> None:
        until = time.perf_counter() + SECONDS
        while (begun := time.perf_counter()) < until:
            rpc.rpc_sync("worker1", quick)
            times.append(time.perf_counter() - begun)

    other = threading.Thread(target=keep_calling, args=(took["another thread"],))
    other.start()
    keep_calling(took["main thread"])
    other.join()
    start = time.perf_counter()
    rpc.rpc_sync("worker1", answer)
    for future in futures:
        future.wait()
    answered = (time.perf_counter() - start) / calls
    rpc.rpc_sync("worker1", end)
    rpc.shutdown()
    server.wait()
    Path(path).unlink(missing_ok=True)
    memory = [f"{(late - early) / calls:.0f} B" for early, late in zip(before, after, strict=True)]
    meanwhile = []
    for times in took.values():
        p99 = statistics.quantiles(times, n=100)[98]
        meanwhile.append(f"{len(times):,}: {1e6 * statistics.median(times):.0f} µs, {1e6 * p99:.0f} µs")
    cells = [library, *memory, f"{1e6 * made:.0f} µs", *meanwhile, f"{1e6 * answered:.0f} µs"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure nbdist and torch, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--library", choices=("nbdist", "torch"), help="measure this one alone, in this process")
    options = parser.parse_args()
    if options.library:
        import outstanding  # this file, by the name by which the callee knows its functions

        print(outstanding.row(options.library, options.calls), flush=True)
        return
    print(
        f"{harness.machine()}\n\n{options.calls:,} calls without an answer. In the {SECONDS:g} s meanwhile, calls that"
    )
    print("two threads made, with their median and p99:\n")
    print("| | memory a call, caller | callee | to make one | main thread | another thread | to answer one |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for library in ("nbdist", "torch"):
        arguments = ["--library", library, "--calls", str(options.calls)]
        subprocess.run([sys.executable, __file__, *arguments], stdin=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()
