"""Runs storms and says what they found; the exit code is 1 if they found anything."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from chaos.storm import WORKLOADS, Outcome, Storm, storms


def main() -> int:
    """Run the storms that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each storm strikes")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this; may be given again")
    parser.add_argument("--storm", type=int, help="only the storm of that number, once")
    asked = parser.parse_args()
    workloads = tuple(asked.workload or WORKLOADS)
    if asked.storm is not None:
        chosen = iter([Storm(workloads[asked.storm % len(workloads)], asked.seed, asked.storm, asked.seconds)])
    else:
        chosen = storms(asked.seed, asked.minutes, workloads, asked.seconds)
    counts: Counter[str] = Counter()
    found = 0
    print(f"chaos: seed {asked.seed}, workloads {', '.join(workloads)}", flush=True)
    for storm in chosen:
        outcome = storm.run()
        counts.update(outcome.counts)
        counts[f"storms of {storm.workload}"] += 1
        report(storm, outcome, workloads)
        found += len(outcome.findings)
    print(f"chaos: seed {asked.seed}: {found} findings")
    for name, count in sorted(counts.items()):
        print(f"  {count:8} {name}")
    return 1 if found else 0


def report(storm: Storm, outcome: Outcome, workloads: tuple[str, ...]) -> None:
    """Print what a storm found, and how to run it again."""
    calls = outcome.counts.get("calls", 0)
    strikes = sum(count for name, count in outcome.counts.items() if name.startswith("struck"))
    print(f"storm {storm.number}: {storm.workload}: {calls} calls, {strikes} strikes", flush=True)
    for finding in outcome.findings:
        print(f"  FOUND  {finding}", flush=True)
    if outcome.findings:
        only = "".join(f" --workload {each}" for each in workloads) if workloads != WORKLOADS else ""
        again = f"python -m chaos --seed {storm.seed} --storm {storm.number} --seconds {storm.seconds:g}{only}"
        print(f"  again with: {again}; ledger and logs in {outcome.folder}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
