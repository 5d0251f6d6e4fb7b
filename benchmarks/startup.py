"""Workers for a notebook: how long until they answer, what they weigh, what an empty cell on all of them costs.

nbdist beside ipyparallel and nbdistributed in one run, each in notebook kernels of its own, driven as a front end
drives them. A fresh kernel loads the library's extension, as a notebook's first cell does, and imports torch. Then,
where a user would type ``%dist_init``, the clock starts; it stops when every worker, a member of a gloo process group
of all, has answered a call. nbdist begins to import torch for its workers when its extension is loaded, which the clock
does not see; so the time from the loading on is given as well. Peers are taken from the Python that runs this; those
that are not installed are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import secrets
import signal
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

START, WHOLE, CELL, MEMORY = "until all answer", "... with the imports before", "empty cell", "unique memory"
LIMITS = {"peer": 0.5, "import torch": 1.8, "px": 0.7}
MEGABYTES = 45
_PATIENCE = 300.0
_TURN = 5
"""Cells in a turn, so that all contestants meet the same load of the machine."""
_MARK = "NBDIST_BENCHMARK"
"""Is in the environment of every process that belongs to a notebook, and says to which."""


# -- in the kernel ------------------------------------------------------------------------------


class _Side:
    """A library as a notebook uses it. The modules named here are imported before any clock starts."""

    modules: tuple[str, ...]
    magic: str
    """Runs a cell on all workers."""
    pids: list[int]

    def __init__(self, shell: Any) -> None:
        self.shell = shell

    def start(self, count: int) -> None:
        """Start workers; return when all have answered a call."""
        raise NotImplementedError

    def stop(self) -> None:
        """End them."""
        raise NotImplementedError

    def empty_cells(self, count: int) -> list[float]:
        """Seconds for each."""
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self.shell.run_cell_magic(self.magic, "", "pass")
            times.append(time.perf_counter() - start)
        return times


class Nbdist(_Side):
    """This project."""

    modules = ("torch", "nbdist")
    magic = "remote"

    def start(self, count: int) -> None:
        self.shell.run_line_magic("dist_init", f"-n {count}")
        rpc = self.shell.user_ns["rpc"]
        self.pids = [rpc.rpc_sync(f"worker{rank}", os.getpid) for rank in range(count)]

    def stop(self) -> None:
        self.shell.run_line_magic("dist_shutdown", "")


class Nbdistributed(_Side):
    """nbdistributed, which forms the process group by itself."""

    modules = ("torch", "nbdistributed")
    magic = "distributed"

    def start(self, count: int) -> None:
        self.shell.run_line_magic("dist_init", f"-n {count}")
        its = self.shell.magics_manager.registry["DistributedMagic"]
        if its._process_manager is None:
            raise RuntimeError("%dist_init of nbdistributed has failed")
        # It returns before its workers listen, and a cell that is sent too early times out after 30 s. A user who
        # waits exactly as long as is needed does this:
        while True:
            with contextlib.suppress(TimeoutError):
                its._comm_manager.send_to_all("get_status", {}, timeout=0.1)
                break
        self.shell.run_cell_magic("distributed", "", "pass")
        self.pids = [process.pid for process in its._process_manager.processes]

    def stop(self) -> None:
        # Not by its magics: %dist_shutdown forgets the workers, %dist_reset kills by name what is not its own.
        its = self.shell.magics_manager.registry["DistributedMagic"]
        for process in its._process_manager.processes:
            process.kill()
            process.wait()


class Ipyparallel(_Side):
    """ipyparallel, whose engines have to be told to form the process group."""

    modules = ("torch", "ipyparallel")
    magic = "px"

    def start(self, count: int) -> None:
        import ipyparallel

        self.cluster = ipyparallel.Cluster(n=count)
        client = self.cluster.start_and_connect_sync(activate=True)
        store = f"file://{os.environ['IPYTHONDIR']}/store"
        formed = [
            client[engine].execute(
                "import torch, torch.distributed\n"
                f"torch.distributed.init_process_group('gloo', init_method={store!r}, rank={rank}, world_size={count})",
                block=False,
            )
            for rank, engine in enumerate(client.ids)
        ]
        for result in formed:
            result.get()
        self.pids = list(client[:].apply_sync(os.getpid))

    def stop(self) -> None:
        self.cluster.stop_cluster_sync()


SIDES = {"nbdist": Nbdist, "ipyparallel": Ipyparallel, "nbdistributed": Nbdistributed}


def load(shell: Any, name: str) -> None:
    """Make the kernel one of a user of that library, with a magic more: ``%benchmark WHAT NUMBER``."""
    loaded = time.perf_counter()
    side = SIDES[name](shell)
    if name != "ipyparallel":
        shell.run_line_magic("load_ext", name)
    for module in side.modules:
        importlib.import_module(module)

    def start(count: int) -> tuple[float, float]:
        begun = time.perf_counter()
        side.start(count)
        ended = time.perf_counter()
        return ended - begun, ended - loaded

    answers: dict[str, Callable[[int], Any]] = {
        "start": start,
        "cells": side.empty_cells,
        "memory": lambda _: [_unique_megabytes(pid) for pid in side.pids],
        "stop": lambda _: side.stop(),
    }

    def benchmark(line: str) -> None:
        what, number = line.split()
        print(json.dumps({"answer": answers[what](int(number))}), flush=True)

    shell.register_magic_function(benchmark, "line")


def _unique_megabytes(pid: int) -> float:
    """What would be free again if that process ended."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


# -- the front end ------------------------------------------------------------------------------


class Notebook:
    """A kernel in which a user of one library is about to start workers."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        from jupyter_client.manager import KernelManager

        self._token = secrets.token_hex(8)
        self._folder = tempfile.TemporaryDirectory(prefix="bench")  # short: sockets are in it
        self._manager = KernelManager(kernel_name="python3", connection_file=f"{self._folder.name}/kernel.json")
        self._client: Any = None
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        try:
            self._manager.kernel_spec.argv[0] = sys.executable
            self._manager.start_kernel(
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PATH": path,  # nbdistributed starts what is called `python`
                    "IPYTHONDIR": self._folder.name,
                    "NBDIST_RUNTIME_DIR": self._folder.name,
                    _MARK: self._token,
                    **environment,
                },
                extra_arguments=["--HistoryManager.enabled=False", "--log-level=ERROR"],
            )
            self._client = self._manager.client()
            self._client.start_channels()
            self._client.wait_for_ready(timeout=_PATIENCE)
            here = str(Path(__file__).parent)
            self.run(f"import sys; sys.path.insert(0, {here!r})\nimport startup; startup.load(get_ipython(), {name!r})")
        except BaseException:
            self.close(politely=False)
            raise

    def run(self, code: str) -> str:
        """Execute a cell; what it printed."""
        printed: list[str] = []

        def take(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        reply = self._client.execute_interactive(
            code, allow_stdin=True, stdin_hook=lambda _: None, output_hook=take, timeout=_PATIENCE
        )["content"]
        if reply["status"] != "ok":
            raise RuntimeError(f"{reply.get('ename')}: {reply.get('evalue')}")
        return "".join(printed)

    def ask(self, what: str, number: int = 0) -> Any:
        """What ``%benchmark`` gives."""
        lines = [line for line in self.run(f"%benchmark {what} {number}").splitlines() if line.startswith('{"answer"')]
        return json.loads(lines[-1])["answer"]

    def close(self, *, politely: bool = True) -> None:
        """End the kernel and whatever came from it."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rest of Ctrl-C can wait for this
        try:
            if politely:
                with contextlib.suppress(Exception):
                    self.ask("stop")
            if self._client is not None:
                self._client.stop_channels()
            if self._manager.has_kernel:
                self._manager.shutdown_kernel(now=not politely)
            while left := _marked(self._token):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
            with contextlib.suppress(OSError):
                self._folder.cleanup()
        finally:
            signal.signal(signal.SIGINT, before)

    def __enter__(self) -> Notebook:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(politely=kind is None)


def _marked(token: str) -> list[int]:
    """The processes with a notebook's mark."""
    mark, found = f"{_MARK}={token}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


# -- what is measured ---------------------------------------------------------------------------


class Library:
    """A contestant that starts workers in a fresh notebook each time."""

    def __init__(self, name: str, label: str | None = None, environment: Mapping[str, str] | None = None) -> None:
        self.side, self.name = name, label or name
        self.environment = environment or {}
        self.whole: list[float] = []

    def open(self) -> Notebook:
        """A fresh notebook."""
        return Notebook(self.side, self.environment)

    def run(self, _: str, count: int) -> list[float]:
        """Seconds until ``count`` workers answer."""
        with self.open() as notebook:
            seconds, whole = notebook.ask("start", count)
        self.whole.append(whole)
        return [seconds]


class ImportTorch:
    """What no worker can do without."""

    name = "import torch"

    def run(self, _: str, __: int) -> list[float]:
        """Seconds for a process that imports torch."""
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return [time.perf_counter() - start]


class Cells:
    """A contestant whose workers run already."""

    def __init__(self, name: str, notebook: Notebook) -> None:
        self.name, self._notebook = name, notebook

    def run(self, _: str, count: int) -> list[float]:
        """Seconds for each of so many empty cells."""
        return list(self._notebook.ask("cells", count))


def running_clusters(
    libraries: Sequence[Library], workers: int, cells: int, rounds: int
) -> tuple[list[Library], dict[str, dict[str, list[float]]], harness.Times]:
    """Start a cluster of each: who could, megabytes of the workers before and after the cells, and the cells' times."""
    usable, running = [], []
    memory: dict[str, dict[str, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        for library in libraries:
            try:
                notebook = stack.enter_context(library.open())
                notebook.ask("start", workers)
                time.sleep(1)  # idle
                memory[library.name] = {"idle": notebook.ask("memory")}
            except (RuntimeError, TimeoutError) as error:
                print(f"left out: {library.name}: {error}\n")
                continue
            usable.append(library)
            running.append((library, notebook))
        contestants = [Cells(library.name, notebook) for library, notebook in running if not library.environment]
        times = harness.race(contestants, {CELL: _TURN}, rounds * max(1, cells // _TURN))
        for library, notebook in running:
            if not library.environment:
                memory[library.name]["after the cells"] = notebook.ask("memory")
    return usable, memory, times


def memory_table(memory: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Medians of the workers."""
    columns = ("idle", "after the cells")
    lines = [f"| {MEMORY} of a worker | {' | '.join(columns)} | limit (idle) |", "| --- | ---: | ---: | ---: |"]
    for name, values in memory.items():
        cells = [f"{statistics.median(values[column]):.1f} MB" if column in values else "-" for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} | {f'{MEGABYTES} MB' if name == 'nbdist' else '-'} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the tables."""
    parser: argparse.ArgumentParser = harness.arguments(__doc__ or "")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--cells", type=int, default=50, help="empty cells in each round")
    options = parser.parse_args()
    needed = [name for name in ("jupyter_client", "ipykernel", "nbdist") if not importlib.util.find_spec(name)]
    if needed:
        sys.exit(f"nothing to measure: not installed: {', '.join(needed)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"{harness.machine()}\n")
    absent = [name for name in SIDES if not importlib.util.find_spec(name)]
    print(f"Peers that are not installed, and left out: {', '.join(absent) or 'none'}\n")
    libraries = [Library(name) for name in SIDES if name not in absent]
    spawned = Library("nbdist", "nbdist, spawned", {"NBDIST_FORK": "0"})

    usable, memory, cells = running_clusters([*libraries, spawned], options.workers, options.cells, options.rounds)
    if not any(library.name == "nbdist" for library in usable):
        sys.exit("nbdist does not start here")
    racing = [library for library in usable if library is not spawned]
    starts = harness.race([*racing, ImportTorch()], {START: options.workers}, options.rounds)

    versions = ", ".join(f"{name} {_version(name)}" for name in [*SIDES, "torch", "ipykernel"] if name not in absent)
    print(f"{versions}; {options.workers} workers, medians of {options.rounds} rounds\n")
    peers = {name: statistics.median(starts[START][name]) for name in SIDES if name in starts[START]}
    del peers["nbdist"]
    limits = {"import torch": LIMITS["import torch"]}
    if peers:
        limits[min(peers, key=lambda name: peers[name])] = LIMITS["peer"]
    print(harness.ranking(START, starts[START], "nbdist", limits), end="\n\n")
    starts[WHOLE] = {library.name: library.whole[-options.rounds :] for library in racing}
    print(harness.ranking(WHOLE, starts[WHOLE], "nbdist", {}), end="\n\n")
    print(memory_table(memory), end="\n\n")
    print(harness.ranking(CELL, cells[CELL], "nbdist", {"ipyparallel": LIMITS["px"]}))
    harness.write({"machine": harness.machine(), "times": {**starts, **cells}, "memory": memory}, options.json)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return str(getattr(importlib.import_module(name), "__version__", "?"))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
