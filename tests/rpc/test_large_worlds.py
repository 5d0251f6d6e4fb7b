"""How many messages each agent sends in worlds of many agents: the counts of `benchmarks/large_worlds.py`, exactly.

They have the shape that docs/howto/large_deployments.md describes. A change that sends more fails here, and one that
sends less lowers the number below, and in the benchmark's table.
"""

import importlib
import math
import re
import sys
from pathlib import Path

import pytest

import nbdist.rpc.links
from nbdist.cluster.jupyter.kernel_connection import KernelConnection, KernelThread
from nbdist.errors import RendezvousError
from nbdist.rpc.core.watching import ALL_WATCH_ALL, EACH_SIDE
from nbdist.rpc.world.shutdown import _NAMES_SHOWN

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def large_worlds():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("large_worlds")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def measured(large_worlds):
    """What agents send, by the world's size; all pairs meet in the two small worlds."""
    return {size: large_worlds.measure(size, full=size < 64) for size in (8, 16, 64)}


EXPECTED = {
    # case: messages of the busiest agent and of the median one in a world of n
    "join": lambda n: (n - 1, n - 1),
    "join fixed": lambda n: (7 * (n - 1), 7 * (n - 1)),
    "barrier": lambda n: (min(3 * (n - 1), 50), 2),
    "shutdown": lambda n: (8 * (n - 1), 9),
    "broadcast": lambda n: (2 * (n - 1), 1),
    "idle": lambda n: (n - 1, n - 1) if n <= ALL_WATCH_ALL else (2 * EACH_SIDE, 2 * EACH_SIDE),
    "talk": lambda n: (n - 1 - 4, n - 1 - 4) if n <= ALL_WATCH_ALL else (EACH_SIDE, EACH_SIDE),
    # In large worlds, the first agent tells its neighbours on the ring, of which the one that is gone was one.
    "leave": lambda n: (2 * (n - 2), 1) if n <= ALL_WATCH_ALL else (2 * (n - 2) + 3, 1 + 2 * EACH_SIDE),
    "loss": lambda n: (2 * (n - 3), 1) if n <= ALL_WATCH_ALL else (2 * (n - 3) + 3, 1 + 2 * EACH_SIDE),
}


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("case", EXPECTED)
def test_what_an_agent_sends(measured, case, size):
    use = measured[size][case]
    assert (use.busiest, use.median) == EXPECTED[case](size)


def test_all_cases_are_counted(large_worlds):
    assert EXPECTED.keys() == large_worlds.CASES.keys()


def test_the_watched_agents_stand_for_all(large_worlds, measured):
    """What the benchmark counts in large worlds, in which three agents meet everybody, is right in small ones."""
    some = large_worlds.measure(16, full=False)
    for case, use in measured[16].items():
        assert (some[case].busiest, some[case].median) == (use.busiest, use.median), case


def test_the_leader_of_a_shutdown_names_few_members(large_worlds):
    """The leader of a shutdown tells each member who is late: in a large world not all names of n, n times."""
    with large_worlds.Crowd(_NAMES_SHOWN + 5, full=False) as crowd:
        crowd.join_as_a_program()
        late = sorted(agent.me.name for agent in crowd.agents[1:])
        told = ", ".join([*late[:_NAMES_SHOWN], "4 more"])
        crowd.turn = 0.1
        with pytest.raises(RendezvousError, match=re.escape(f"still waiting for {told} to call shutdown")):
            crowd.run({0: lambda: crowd.agents[0].ending.end(5.0)})


@pytest.mark.parametrize("size", [8, 64, 512])
def test_an_idle_agent_looks_at_its_connections_seldom(large_worlds, size):
    """The heartbeats of n connections are due at n moments of a second, and each look takes time for all n."""
    looks, _ = large_worlds.ticks(size)
    assert looks <= min(size, math.ceil(1 / (size * nbdist.rpc.links._PAUSE_PER_CONNECTION)) + 1)


def test_joins_at_the_same_moment_compete(large_worlds):
    """Of n agents that read the list together, one writes it. Without pauses, each needs n + 1 requests."""
    assert [large_worlds.competing(size) for size in (4, 16, 64)] == [18, 112, 688]


def test_the_notebook_may_have_sockets_to_thousands_of_kernels(tmp_path):
    thread = KernelThread()
    try:
        names = ("shell", "iopub", "stdin", "control")
        ports = {f"{name}_port": number for number, name in enumerate(names)}
        kernel = KernelConnection(
            thread, {"key": "", "ip": str(tmp_path / "kernel"), **ports}, lambda channel, message: None
        )
        opening = thread.run(kernel.open())
        while thread.context is None:
            assert not opening.done()
        assert thread.context.max_sockets >= len(names) * 4000
    finally:
        thread.close()
