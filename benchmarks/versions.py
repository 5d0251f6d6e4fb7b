"""Measures two versions of nbdist beside each other, in pairs (see `pairs`): calls, and backward passes.

``versions.py PYTHON`` compares the nbdist of the Python that runs this with the one that is installed for ``PYTHON``,
for example ``make bench BENCH=versions ARGS=../before/.venv/bin/python``, to see what a change gained or lost. There
are no limits here; each case has a line for its time and one for its CPU time.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import autograd
import harness
import pairs
import rpc
from harness import Contestant
from pairs import Bound, Line, Pair, Round

OTHER = "other nbdist"


def beside_other(compared: Sequence[Pair]) -> list[Pair]:
    """Return the pairs with the other version in the place of torch: without limits, and with lines for CPU time."""
    return [
        replace(
            pair,
            theirs=replace(pair.theirs, contestant=OTHER),
            bound=Bound(),
            cpu=None if pair.busy else (f"CPU: {pair.name}", Bound()),
        )
        for pair in compared
    ]


def main() -> None:
    """Measure."""
    parser = harness.paired_arguments(__doc__ or "")
    parser.add_argument("python", help="the Python that has the other nbdist")
    options = parser.parse_args()
    tables = {name: beside_other(rpc.TABLES[name]) for name in ("calls", "busy")}
    tables["passes"] = beside_other(autograd.PASSES)
    rounds: dict[str, dict[str, list[Round]]] = {}
    lines: dict[str, list[Line]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for chosen, ours, theirs in (
            (("calls", "busy"), rpc.start("nbdist"), rpc.start("nbdist", OTHER, options.python)),
            (("passes",), autograd.start("nbdist", folder), autograd.start("nbdist", folder, OTHER, options.python)),
        ):
            racing: dict[str, Contestant] = {"nbdist": ours, OTHER: theirs}
            pinned = harness.pin(racing.values())
            for table in chosen:
                rounds[table] = harness.measure(racing, tables[table], options.rounds, options.seed)
                lines[table] = harness.lines_of(racing, tables[table], rounds[table])
            for contestant in racing.values():
                contestant.close()
    print(f"{harness.machine()}\n\n{harness.conditions(racing, options, pinned)}\n")
    found = [line for of_table in lines.values() for line in of_table]
    print(f"{pairs.comparison(found, 'nbdist', OTHER)}\n\n{pairs.costs(found, 'nbdist', OTHER)}")
    harness.write(harness.kept(options, rounds, lines), options.json)


if __name__ == "__main__":
    main()
