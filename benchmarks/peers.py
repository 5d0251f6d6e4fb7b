"""Calls beside other libraries: Ray, Dask, ipyparallel, Monarch and RPyC, each with one worker process on this host.

A call runs a method of an actor in another process (a function, in ipyparallel), and waits for its value. Peers are
taken from the Python that runs this; peers that are not installed, or do not start, are named and left out.
nbdistributed runs cells and has no calls: `startup.py` compares with it.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import harness
import rpc

PEERS = {
    "Ray": ("ray", "ray"),
    "Dask": ("dask", "distributed"),
    "ipyparallel": ("ipyparallel", "ipyparallel"),
    "Monarch": ("monarch", "monarch"),
    "RPyC": ("rpyc", "rpyc"),
}
"""By the name in the table: the function of `contestants.py`, and the module that is imported."""

CASES = {name: rpc.CASES[name] for name in ("empty call", "torch.add, small tensor", "echo 1 MB", "echo 64 MB")}


def table(times: harness.Times) -> str:
    """Return medians of all, and the ratio of nbdist's to the fastest peer's, as Markdown."""
    names = list(next(iter(times.values())))
    lines = [f"| case | {' | '.join(names)} | nbdist / fastest peer |", f"| --- |{' ---: |' * (len(names) + 1)}"]
    for case, by_name in times.items():
        medians = {name: statistics.median(by_name[name]) for name in names}
        peers = [median for name, median in medians.items() if name != "nbdist"]
        cells = [harness.duration(medians[name]) for name in names]
        ratio = f"{medians['nbdist'] / min(peers):.2f}" if peers else "-"
        lines.append(f"| {case} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def left_out(reasons: Mapping[str, str]) -> str:
    """Return one line that names each peer without numbers, and why it has none."""
    return "Left out: " + ("; ".join(f"{name} ({why})" for name, why in reasons.items()) or "none") + "."


def start(names: Sequence[str]) -> tuple[list[harness.Contestant], dict[str, str]]:
    """Start the peers of these names. Returns those that run, and for the others why not."""
    running, reasons = [rpc.start("nbdist")], {}
    for name in names:
        function, module = PEERS[name]
        if importlib.util.find_spec(module) is None:
            reasons[name] = "not installed"
            continue
        try:
            running.append(rpc.start(function, name))
        except RuntimeError as error:  # its own words are above, on stderr
            reasons[name] = f"did not start: {error}"
    return running, reasons


def main() -> None:
    """Measure, and print the table."""
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--only", choices=PEERS, action="append", help="compare with this peer alone")
    options = parser.parse_args()
    print(f"{harness.machine()}\n")
    contestants, reasons = start(options.only or list(PEERS))
    times = harness.race(contestants, CASES, options.rounds)
    for contestant in contestants:
        contestant.close()
    versions = ", ".join(f"{contestant.name} {contestant.version}".strip() for contestant in contestants)
    print(f"{versions}; medians of {options.rounds} rounds. {left_out(reasons)}\n")
    print(table(times))
    print("\nnbdistributed has no calls; its cells are below, in *Workers for a notebook*.")
    harness.write({"machine": harness.machine(), "times": times, "left out": reasons}, options.json)


if __name__ == "__main__":
    main()
