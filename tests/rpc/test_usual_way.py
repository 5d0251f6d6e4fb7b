"""How many calls are encoded in the short way, and that it is the general way which takes the others."""

import os
import subprocess
import sys
import textwrap

import pytest
from helpers.processes import workers
from helpers.suite.python_path import TESTS

from nbdist import rpc
from nbdist.wire import quick

pytestmark = pytest.mark.skipif(not quick.USUAL_IS_ON, reason="NBDIST_USUAL=0: no call takes the short way")

CALLS = workers.CALLS
PATH = [*sys.path, str(TESTS)]


@pytest.fixture(scope="module")
def others():
    with workers.world(3) as others:
        yield others


def test_calls_of_a_script(others):
    assert workers.count_from_here("worker1") >= 0.99 * CALLS


def test_calls_between_workers(others):
    assert rpc.rpc_sync("worker1", workers.count_from_here, args=("worker2",), timeout=60) >= 0.99 * CALLS


def test_calls_of_a_cell():
    run(
        f"""
        import nbdist

        calls = '''
        import sys
        sys.path += {PATH!r}
        from helpers.processes.workers import CALLS, count_short
        from nbdist import rpc
        from nbdist.rpc.api import current_agent

        assert current_agent().sender.origin is not None
        found = count_short(lambda number: rpc.rpc_sync("worker0", mine, args=(number,)))
        assert found >= 0.99 * CALLS, found
        '''
        with nbdist.Cluster(2, backend="none") as cluster:
            cluster.execute("def mine(number): return number")
            cluster.execute(calls, [1])
        """
    )


def test_calls_under_compat():
    run(
        """
        import os, socket
        import nbdist.compat
        nbdist.compat.install()
        import torch.distributed.rpc as rpc
        from helpers.processes.workers import CALLS, count_short

        def mine(number):
            return number

        free = socket.create_server(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
        free.close()
        rpc.init_rpc("worker0", rank=0, world_size=1)
        found = count_short(lambda number: rpc.rpc_sync("worker0", mine, args=(number,)))
        assert found >= 0.99 * CALLS, found
        rpc.shutdown()
        """
    )


def run(program):
    """Run a program of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path += {PATH!r}\n{textwrap.dedent(program)}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
