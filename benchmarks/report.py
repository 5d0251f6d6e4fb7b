"""Runs the benchmarks and writes what they measured: `benchmarks/README.md`, and the table in the project's README.

On a machine that has nothing else to do. ``--only rpc`` runs one of them, and leaves what is written of the others.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import programs

HERE = Path(__file__).parent
REPORT = HERE / "README.md"
PICTURE = HERE / "programs.svg"
README = HERE.parent / "README.md"
BENCHMARKS = {
    "rpc": "Calls",
    "peers": "Calls, beside other libraries",
    "autograd": "Backward passes",
    "startup": "Workers for a notebook",
    "programs": "Programs",
    "views": "Views",
    "swarm": "A language model in parts",
}
HEAD = """# What was measured

`make bench` writes this file and the table in the project's README, from this tree, on the machine that it runs on.
Contestants take turns within one run; what counts is the ratio of the medians. Where there is a limit, it is what we
want to hold: what is above it is not hidden.
"""
MARK = "<!-- measured: {} -->"


def run(name: str, rounds: int | None) -> tuple[str, dict[str, Any]]:
    """One benchmark: its tables, and the raw numbers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers.json"
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(path)]
        if rounds is not None:
            command += ["--rounds", str(rounds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip(), json.loads(path.read_text()) if path.exists() else {}


def section(name: str, tables: str) -> str:
    """A part of the report, with a mark by which it is found again."""
    return f"{MARK.format(name)}\n## {BENCHMARKS[name]}\n\n{tables}\n{MARK.format('end')}\n"


def sections(report: str) -> dict[str, str]:
    """The parts of a report by name."""
    pattern = rf"{MARK.format('(' + '|'.join(BENCHMARKS) + ')')}\n.*?{MARK.format('end')}\n"
    return {match[1]: match[0] for match in re.finditer(pattern, report, re.DOTALL)}


def rows(times: Mapping[str, Mapping[str, Sequence[float]]], peer: str) -> list[str]:
    """The cases of a benchmark as rows: ours, the peer's, the ratio."""
    found = []
    for case, by_name in times.items():
        ours, theirs = (statistics.median(by_name[name]) for name in ("nbdist", peer))
        found.append(f"| {case} | {harness.duration(ours)} | {harness.duration(theirs)} | {ours / theirs:.2f} |")
    return found


def in_readme(text: str, name: str, table: Sequence[str]) -> str:
    """The README with the rows of one benchmark in the place of those that it had."""
    mark, end = MARK.format(name), MARK.format("end")
    begin = text.index(mark) + len(mark)
    lines = ["", "| | nbdist | torch | ratio |", "| --- | ---: | ---: | ---: |", *table, ""]
    return text[:begin] + "\n".join(lines) + text[text.index(end, begin) :]


def main() -> None:
    """Run what was asked for, and write it down."""
    parser = harness.arguments(__doc__ or "")
    parser.set_defaults(rounds=None)
    parser.add_argument("--only", choices=BENCHMARKS, action="append")
    options = parser.parse_args()
    known = sections(REPORT.read_text()) if REPORT.exists() else {}
    for name in options.only or BENCHMARKS:
        tables, numbers = run(name, options.rounds)
        print(f"{tables}\n", flush=True)
        if name == "programs":
            programs.draw(numbers["times"], PICTURE)
            tables += f"\n\n![How the times grow]({PICTURE.name})"
        known[name] = section(name, tables)
        REPORT.write_text("\n".join([HEAD, *(known[other] for other in BENCHMARKS if other in known)]))
        if name == "rpc":
            README.write_text(
                in_readme(README.read_text(), name, rows(numbers["times"] | numbers["busy"], "tensorpipe"))
            )
        elif name == "autograd":
            README.write_text(in_readme(README.read_text(), name, rows(numbers["times"], "torch")))


if __name__ == "__main__":
    main()
