"""Runs contestants in processes of their own, which take turns, and hands what they measure to `pairs`.

A contestant is a subprocess that reads a case's name and a count per line and answers with seconds per operation and
the CPU time of its processes. While it is not its turn all its processes are stopped (SIGSTOP): an idle TensorPipe
agent keeps a core busy with polling, and would be measured as part of the others.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pairs
import processes
from pairs import Line, Pair, Round, Sample, Side, duration

Case = Callable[[int], list[float]]
"""Runs an operation as often as it is told, and has the seconds that each took."""

Count = Callable[[Case, int], float]
"""Runs a case so often; returns the messages that were sent for one operation."""

Times = dict[str, dict[str, list[float]]]
"""Seconds per operation, by case and contestant."""

_WARM = 20
"""Of so many operations, one more runs before they are timed: the contestant has just stood still."""


class Contestant:
    """A library under test, in its own process."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Without SAFEPATH, a worker that is started with ``-c`` would import nbdist from the working directory.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", **(environment or {})},
            process_group=0,  # to be stopped as one
        )
        # Workers of torch wait for ever for one that is gone, so nobody else ends them if this process is ended.
        atexit.register(self.kill)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self.version = self._read()["version"]
        self._signal(signal.SIGSTOP)

    def run(self, case: str, count: int) -> list[float]:
        """Run a case ``count`` times. Returns the seconds of each."""
        return list(self.measure(case, count).times)

    def measure(self, case: str, count: int) -> Sample:
        """Run a case ``count`` times. Returns times and CPU time."""
        return Sample(**self._ask(case=case, count=count))

    def count_messages(self, case: str, count: int) -> float | None:
        """Run a case ``count`` times. Returns the messages of one operation; None if this contestant cannot tell."""
        found: float | None = self._ask(case=case, count=count, messages=True)["messages"]
        return found

    def pin(self, cores: Sequence[int]) -> None:
        """Pin each of its processes to one core, in turn, the process that calls to the first one.

        Raises:
            OSError: The system refuses.
        """
        for number, pid in enumerate(processes.group(self._process.pid)):
            processes.allow(pid, {cores[number % len(cores)]})

    def unpin(self, cores: Sequence[int]) -> None:
        """Let its processes run on all these cores. Raises as `pin` does."""
        for pid in processes.group(self._process.pid):
            processes.allow(pid, cores)

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"{self.name} ended with {self._process.wait()}")

    def close(self) -> None:
        """Let the contestant end, and kill what is left of it after 20 seconds."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self.kill()

    def kill(self) -> None:
        """End all its processes at once; a second call does nothing."""
        atexit.unregister(self.kill)
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()


def search_path(*folders: str | Path, python: str = sys.executable) -> str:
    """Return the ``PYTHONPATH`` of processes of ``python``: these folders, then this process's own for the same Python.

    Another Python has another nbdist, which a checkout on this process's path must not replace.
    """
    own = os.environ.get("PYTHONPATH") if python == sys.executable else None
    return os.pathsep.join(filter(None, [*map(str, folders), own]))


def each(operation: Callable[[], Any]) -> Case:
    """Time an operation, one at a time."""

    def run(count: int) -> list[float]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            operation()
            times.append(time.perf_counter() - start)
        return times

    return run


def serve(version: str, cases: Mapping[str, Case], count_messages: Count | None = None) -> None:
    """Run cases as asked, until the input ends: a contestant's side."""
    print(json.dumps({"version": version}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        case, count = cases[request["case"]], request["count"]
        if request.get("messages"):
            answer: dict[str, Any] = {"messages": count_messages(case, count) if count_messages else None}
        else:
            answer = _measured(case, count)
        print(json.dumps(answer), flush=True)


def _measured(case: Case, count: int) -> dict[str, Any]:
    if count >= _WARM:
        case(count // _WARM)
    pids = processes.group(os.getpgrp())
    before = processes.cpu_of_group(pids)
    times = case(count)
    after = processes.cpu_of_group(pids)
    caller, others = (a - b for a, b in zip(after, before, strict=True)) if before and after else (None, None)
    return {"times": times, "count": count, "caller": caller, "others": others}


def pin(contestants: Iterable[Contestant]) -> str:
    """Pin the processes of all contestants alike. Returns a sentence that says what came of it."""
    if not hasattr(os, "sched_setaffinity"):
        return "processes are not pinned: this system cannot"
    cores = sorted(os.sched_getaffinity(0))
    try:
        for contestant in contestants:
            contestant.pin(cores)
    except OSError as error:
        return f"processes are not pinned: {error}"
    return f"each process of a contestant is pinned to one of cores {', '.join(map(str, cores))}, in turn"


def unpin(contestants: Iterable[Contestant]) -> None:
    """Leave the processes of all contestants to the system's scheduler again."""
    if hasattr(os, "sched_setaffinity"):
        for contestant in contestants:
            contestant.unpin(sorted(os.sched_getaffinity(0)))


def measure(
    contestants: Mapping[str, Contestant], compared: Sequence[Pair], rounds: int, seed: int
) -> dict[str, list[Round]]:
    """Let both sides of each pair take their turns, round after round; one more round before the first warms up."""
    found: dict[str, list[Round]] = {pair.name: [] for pair in compared}
    for number, turns in enumerate(pairs.schedule(compared, rounds + 1, seed)):
        for pair, order in turns:
            samples: dict[Side, Sample] = {}
            for side in order:
                turn = pair.turn(side)
                samples[side] = contestants[turn.contestant].measure(turn.case, turn.count)
            if number:
                found[pair.name].append(samples)
    return found


def lines_of(
    contestants: Mapping[str, Contestant], compared: Sequence[Pair], rounds: Mapping[str, Sequence[Round]]
) -> list[Line]:
    """Return what is said of each pair; our side runs once more, to count messages."""
    found = []
    for pair in compared:
        sent = contestants[pair.ours.contestant].count_messages(pair.ours.case, pair.ours.count)
        found += pairs.lines(pair, rounds[pair.name], sent)
    return found


def conditions(contestants: Mapping[str, Contestant], options: argparse.Namespace, pinned: str) -> str:
    """Return under which conditions was measured."""
    versions = ", ".join(dict.fromkeys(f"{one.name} {one.version}" for one in contestants.values()))
    few = "" if options.rounds >= pairs.FEWEST else f" Fewer than {pairs.FEWEST} rounds: decide nothing by this."
    return f"{versions}; rounds of pairs: {options.rounds}, order drawn from seed {options.seed}; {pinned}.{few}"


def kept(options: argparse.Namespace, rounds: Mapping[str, Any], lines: Mapping[str, Sequence[Line]]) -> dict[str, Any]:
    """Return what is kept as JSON: each round as it was measured, and what the tables say of all of them."""
    return {
        "machine": machine(),
        "seed": options.seed,
        "rounds": {
            table: {
                case: [{side: asdict(sample) for side, sample in samples.items()} for samples in measured]
                for case, measured in by_case.items()
            }
            for table, by_case in rounds.items()
        },
        "lines": {table: [asdict(line) for line in found] for table, found in lines.items()},
    }


def race(contestants: Sequence[Contestant], cases: Mapping[str, int], rounds: int) -> Times:
    """Let the contestants take turns at every case; the first round warms up and is not counted."""
    times: Times = {case: {contestant.name: [] for contestant in contestants} for case in cases}
    for number in range(rounds + 1):
        for case, count in cases.items():
            for contestant in contestants:
                measured = contestant.run(case, count)
                if number:
                    times[case][contestant.name] += measured
    return times


def touch_memory(most: int = 8 << 30) -> None:
    """Have memory that others do not need given to this machine, if it is a virtual one.

    Its host gives a page at the first touch, which takes ten times as long as a page fault does else, and would be
    measured as part of whoever comes first.
    """
    touch = "import mmap, sys; m = mmap.mmap(-1, int(sys.argv[1]))\nfor i in range(0, len(m), 4096): m[i] = 1"
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    subprocess.run([sys.executable, "-c", touch, str(min(most, available // 2))])  # a container may have less than that


def ranking(case: str, times: Mapping[str, Sequence[float]], subject: str, limits: Mapping[str, float]) -> str:
    """One case, a contestant a row: its median and range, and the subject's ratio to it, as Markdown."""
    lines = [f"| {case} | median | fastest | slowest | {subject} / it | limit |", f"| --- |{' ---: |' * 5}"]
    ours = statistics.median(times[subject])
    for name, values in times.items():
        median = statistics.median(values)
        cells = [duration(value) for value in (median, min(values), max(values))]
        limit = f"{limits[name]:g}" if name in limits else "-"
        lines.append(f"| {name} | {' | '.join(cells)} | {ours / median:.2f} | {limit} |")
    return "\n".join(lines)


def machine() -> str:
    """One line about where this ran."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = models[0] if models else model
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return (
        f"{model}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, load {load}"
    )


def write(results: dict[str, Any], path: str | None) -> None:
    """Keep the raw numbers."""
    if path:
        Path(path).write_text(json.dumps(results, indent=1))


def arguments(description: str, rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", help="write the raw numbers to this file")
    return parser


def paired_arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that benchmarks in pairs have."""
    parser = arguments(description, pairs.FEWEST)
    parser.add_argument("--seed", type=int, default=0, help="of the order within the pairs")
    return parser
