"""What every benchmark here shares: contestants in processes of their own, taking turns, and honest tables.

Contestants alternate within one run, so that a machine that slows down slows all of them; what is compared is
the ratio of medians over all rounds. A contestant is a subprocess that reads a case's name and a count per
line and answers with seconds per operation. While it is not its turn all its processes are stopped: an idle
TensorPipe agent keeps a core busy with polling, and would be measured as part of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Case = Callable[[int], list[float]]
"""Runs an operation as often as it is told, and has the seconds that each took."""

Times = dict[str, dict[str, list[float]]]
"""Seconds per operation, by case and contestant."""


class Contestant:
    """A library under test, in its own process."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            # A group of its own, to be stopped as one. In our session: should we die, the system wakes and ends it.
            process_group=0,
        )
        self.version = self._read()["version"]
        self._signal(signal.SIGSTOP)

    def run(self, case: str, count: int) -> list[float]:
        """Seconds per operation, ``count`` times."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        print(json.dumps({"case": case, "count": count}), file=self._process.stdin, flush=True)
        times = self._read()["times"]
        self._signal(signal.SIGSTOP)
        return list(times)

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"{self.name} ended with {self._process.wait()}")

    def close(self) -> None:
        """End the contestant's processes."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


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


def serve(version: str, cases: Mapping[str, Case]) -> None:
    """A contestant's side: run cases as asked, until the input ends."""
    print(json.dumps({"version": version}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"times": cases[request["case"]](request["count"])}), flush=True)


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


def table(times: Times, base: str, subject: str, limits: Mapping[str, float]) -> str:
    """Medians of all, and the subject's ratio to the base, as Markdown."""
    names = list(next(iter(times.values())))
    lines = [
        f"| case | {' | '.join(names)} | {subject} / {base} | limit |",
        f"| --- |{' ---: |' * (len(names) + 2)}",
    ]
    for case, by_name in times.items():
        medians = {name: statistics.median(values) if values else None for name, values in by_name.items()}
        cells = [duration(medians[name]) for name in names]
        ours, theirs = medians.get(subject), medians.get(base)
        ratio = f"{ours / theirs:.2f}" if ours and theirs else "-"
        limit = f"{limits[case]:g}" if case in limits else "-"
        lines.append(f"| {case} | {' | '.join(cells)} | {ratio} | {limit} |")
    return "\n".join(lines)


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


def duration(seconds: float | None) -> str:
    """For people."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


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


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the raw numbers to this file")
    return parser
