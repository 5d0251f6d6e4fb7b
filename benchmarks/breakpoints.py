"""What a worker's debugger costs code that does not stop: a loop of Python calls in a worker, with it and without it.

A worker takes over ``breakpoint()`` and keeps its last error. The loop runs so, and in the same process with all of
that removed: two processes differ by some percent anyway. It also runs so once more: how far two equal sides differ in
the same rounds is how far to trust the ratios. So the limit is 1.00, or the upper quartile of the ratios of these two,
if that is more. A breakpoint of `%dist_break` in another file has a limit, 1.1, for Python 3.12 and newer.
"""

from __future__ import annotations

import contextlib
import os
import pdb
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import pairs
from harness import Contestant
from pairs import Bound, Pair, Round, Turn

SCRIPT = str(Path(__file__))
PLACES = ("in a cell", "in a function called by RPC")
"""Where the loop runs."""

DEBUGGER, EQUAL, ELSEWHERE, REMOVED = "as it is", "as it is, again", "a breakpoint elsewhere", "no debugger"
COMPARED = ((DEBUGGER, REMOVED), (EQUAL, DEBUGGER), (ELSEWHERE, REMOVED))
"""The states of the worker in which the loop is compared."""

LIMIT = 1.00
LIMIT_ELSEWHERE = 1.1
_COUNT = 50
_CALLS = 100_000
"""Python calls of a loop: some milliseconds."""


# -- in the worker -------------------------------------------------------------------------------


def nothing() -> None:
    """Do nothing."""


def loop() -> None:
    """Call a Python function often."""
    for _ in range(_CALLS):
        nothing()


def run(state: str, count: int) -> list[float]:
    """Run the loop ``count`` times in the calling thread. Returns the seconds of each."""
    clock = time.thread_time if os.environ.get("BENCH_CPU") else time.perf_counter
    times = []
    with without_debugger() if state == REMOVED else contextlib.nullcontext():
        for _ in range(count):
            start = clock()
            loop()
            times.append(clock() - start)
    return times


@contextlib.contextmanager
def without_debugger() -> Iterator[None]:
    """Undo in this worker what its debugger and its breakpoints have set, for as long as the block runs."""
    import torch
    from IPython import get_ipython

    from nbdist.cluster.worker.breakpoints import BreakpointsHere
    from nbdist.cluster.worker.debugger import Debugger
    from nbdist.rpc.api import current_agent

    shell: Any = get_ipython()
    actions = [(event, action) for event, actions in shell.events.callbacks.items() for action in actions]
    own = [each for each in actions if type(getattr(each[1], "__self__", None)) in (BreakpointsHere, Debugger)]
    assert len(own) == 2, own
    executor: Any = current_agent().executor
    places = ((sys, "breakpointhook"), (pdb, "set_trace"), (torch.distributed, "breakpoint"), (executor, "on_error"))
    before = [getattr(*place) for place in places]
    after = sys.__breakpointhook__, None, None, None
    for place, value in zip(places, after, strict=True):
        setattr(*place, value)
    for each in own:
        shell.events.unregister(*each)
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            setattr(*place, value)
        for each in own:
            shell.events.register(*each)


# -- the contestant --------------------------------------------------------------------------------


def serve() -> None:
    """Run the cases in the worker of a cluster."""
    import breakpoints  # not __main__: the same module as in the worker

    import nbdist
    from nbdist.cluster.inspection.breakpoints import ClusterBreakpoints

    with nbdist.Cluster(1, backend="none") as cluster:
        cluster.execute(f"import sys; sys.path.insert(0, {str(Path(SCRIPT).parent)!r}); import breakpoints")
        elsewhere = ClusterBreakpoints(cluster.agent, cluster.workers)

        def times(place: str, state: str, count: int) -> Sequence[float]:
            if state == ELSEWHERE:
                elsewhere.add("elsewhere.py:1", "", [])
            try:
                if place == PLACES[0]:
                    cluster.execute(f"times = breakpoints.run({state!r}, {count})")
                    return list(cluster.pull("times", "worker0"))
                return list(nbdist.rpc.rpc_sync("worker0", breakpoints.run, (state, count)))
            finally:
                elsewhere.delete(0)

        states = (DEBUGGER, EQUAL, ELSEWHERE, REMOVED)
        cases = {f"{place}, {state}": partial(times, place, state) for place in PLACES for state in states}
        harness.serve(nbdist.__version__, cases)


# -- the table -------------------------------------------------------------------------------------


def pair_of(place: str, ours: str, theirs: str) -> Pair:
    """Return the pair of two states of the worker."""
    turns = (Turn("worker", f"{place}, {state}", _COUNT) for state in (ours, theirs))
    has_limit = ours == ELSEWHERE and sys.version_info >= (3, 12)
    return Pair(f"{place}: {ours} / {theirs}", *turns, Bound(LIMIT_ELSEWHERE) if has_limit else Bound())


def bounded(pair: Pair, equal: Sequence[Round]) -> Pair:
    """Return the pair with its limit, which is by what the two sides of ``equal`` differ."""
    ratios = pairs.ratios(equal, lambda sample: statistics.median(sample.times))
    return replace(pair, bound=Bound(max(LIMIT, round(pairs.quantile(ratios, 0.75), 3))))


def main() -> None:
    """Measure, and print the table."""
    parser = harness.paired_arguments(__doc__ or "")
    parser.add_argument("--cpu", action="store_true", help="the CPU time of the loop: for a machine with other work")
    options = parser.parse_args()
    print(f"{harness.machine()}\n")
    worker = Contestant("worker", [sys.executable, SCRIPT, "worker"], {"BENCH_CPU": "1"} if options.cpu else {})
    compared = {place: [pair_of(place, *states) for states in COMPARED] for place in PLACES}
    every = [pair for chosen in compared.values() for pair in chosen]
    rounds = harness.measure({"worker": worker}, every, options.rounds, options.seed)
    worker.close()
    lines = []
    for debugger, equal, elsewhere in compared.values():
        for pair in (bounded(debugger, rounds[equal.name]), equal, elsewhere):
            lines += pairs.lines(pair, rounds[pair.name])
    print(f"{harness.conditions({'worker': worker}, options, 'processes are not pinned')}\n")
    print(pairs.comparison(lines, "first", "second"))
    harness.write(harness.kept(options, {"loop": rounds}, {"loop": lines}), options.json)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["worker"] else main()
