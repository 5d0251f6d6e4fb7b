"""Runs the benchmarks and writes what they measured: `benchmarks/README.md`.

On a machine that has nothing else to do. ``--only rpc`` runs one of them, and leaves what is written of the others.
Raw rounds go to ``build/bench``, one JSON for each benchmark.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import programs

HERE = Path(__file__).parent
REPORT = HERE / "README.md"
PICTURE = HERE / "programs.svg"
RAW = HERE.parent / "build" / "bench"
BENCHMARKS = {
    "rpc": "Calls",
    "peers": "Calls, beside other libraries",
    "autograd": "Backward passes",
    "pipelines": "Pipelines",
    "startup": "Workers for a notebook",
    "programs": "Programs",
    "views": "Views",
    "swarm": "A language model in parts",
}
MARK = "<!-- measured: {} -->"


def run(name: str, rounds: int | None) -> tuple[str, dict[str, Any]]:
    """Run one benchmark. Returns its tables, and the raw numbers."""
    RAW.mkdir(parents=True, exist_ok=True)
    path = RAW / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(path)]
    if rounds is not None:
        command += ["--rounds", str(rounds)]
    # In this folder, because a contestant's processes import what they find in theirs: not the package's source.
    done = subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip(), json.loads(path.read_text()) if path.exists() else {}


def section(name: str, tables: str) -> str:
    """Return a part of the report, with a mark by which it is found again."""
    return f"{MARK.format(name)}\n## {BENCHMARKS[name]}\n\n{tables}\n{MARK.format('end')}\n"


def head(report: str) -> str:
    """Return what a report says before its first part, which people write."""
    return report.partition(MARK.partition("{}")[0])[0].rstrip() + "\n"


def sections(report: str) -> dict[str, str]:
    """Return the parts of a report by name."""
    pattern = rf"{MARK.format('(' + '|'.join(BENCHMARKS) + ')')}\n.*?{MARK.format('end')}\n"
    return {match[1]: match[0] for match in re.finditer(pattern, report, re.DOTALL)}


def medians(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the medians of each case, by library."""
    return {line["name"]: {"nbdist": line["ours"], "torch": line["theirs"]} for line in lines}


def main() -> None:
    """Run what was asked for, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="instead of as many as each benchmark finds right")
    parser.add_argument("--only", choices=BENCHMARKS, action="append")
    options = parser.parse_args()
    before = REPORT.read_text()
    known = sections(before)
    for name in options.only or BENCHMARKS:
        tables, numbers = run(name, options.rounds)
        print(f"{tables}\n", flush=True)
        if name == "programs":
            lines = [line for table in programs.WORLDS for line in numbers["lines"].get(table, ())]
            programs.draw(medians(lines), PICTURE)
            tables += f"\n\n![How the times grow]({PICTURE.name})"
        known[name] = section(name, tables)
        REPORT.write_text("\n".join([head(before), *(known[other] for other in BENCHMARKS if other in known)]))


if __name__ == "__main__":
    main()
