"""Several processes use one swarm: each writes, and blocks are given to workers by one placer."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch
from helpers.models import swarm_models
from helpers.processes import swarm_clients
from helpers.suite.python_path import TESTS, python_path
from helpers.waiting import wait_until

import nbdist
from nbdist.errors import UsageError
from nbdist.rpc import api
from nbdist.swarm import NoRoute, connect, serve
from nbdist.swarm.directory.placing import FarPlacer
from nbdist.testing import World

# -- clients --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    with nbdist.Cluster(4, backend="none", preload=["nbdist.swarm"]) as cluster:
        yield cluster


def test_workers_write_as_the_notebook_does(cluster):
    model = swarm_models.make("llama")
    expected = swarm_models.generate(model, "greedy")
    swarm = serve(model, workers=[0, 1])
    texts = [api.rpc_async(f"worker{n}", swarm_clients.write, args=(swarm.address(), 1)) for n in (1, 2)]
    own = swarm_models.generate(swarm.causal_lm(), "greedy")
    assert torch.equal(own, expected)
    for each in texts:
        assert torch.equal(each.wait()[0], expected)
    ids = [id for n in (0, 2) for id in api.rpc_sync(f"worker{n}", swarm_clients.session_ids, (swarm.address(),))]
    assert len(set(ids)) == len(ids) == 4
    swarm.close()
    with pytest.raises(UsageError, match="this swarm is closed"):
        api.rpc_sync("worker2", swarm_clients.write, args=(swarm.address(), 1))


def test_a_client_changes_who_serves_and_all_see_it(cluster):
    swarm = serve(swarm_models.make("llama"), workers=[0, 1])
    there = api.rpc_sync("worker2", swarm_clients.change, (swarm.address(),))
    assert there == [
        {"worker0": [0, 1, 2], "worker1": [3, 4, 5]},
        {"worker0": [0, 1, 2], "worker1": [3, 4, 5], "worker3": [0, 1, 2]},
        {"worker0": [0], "worker1": [3, 4, 5], "worker3": [0, 1, 2]},
        {"worker1": [3, 4, 5], "worker3": [0, 1, 2]},
    ]
    assert swarm.blocks == there[-1]
    swarm.close()


def test_two_write_while_a_third_moves_blocks_and_a_worker_is_killed(cluster):
    model = swarm_models.make("llama")
    expected = swarm_models.generate(model, "greedy")
    swarm = serve(model, workers=[0, 1, 2])
    own, count = [], 6
    remote = swarm.causal_lm()
    writing = threading.Thread(target=lambda: own.extend(swarm_models.generate(remote, "greedy") for _ in range(count)))
    far = api.rpc_async("worker3", swarm_clients.write, args=(swarm.address(), count), timeout=120)
    writing.start()
    for begin, end, to in [(0, 2, "worker1"), (0, 2, "worker0"), (2, 4, "worker1"), (3, 6, "worker2")]:
        swarm.move(begin, end, to)
    os.kill(cluster.workers[1].pid, signal.SIGKILL)
    writing.join()
    for text in [*own, *far.wait()]:
        assert torch.equal(text, expected)
    assert len(own) == count
    held = [number for blocks in swarm.blocks.values() for number in blocks]
    assert sorted(held) == list(range(6))  # none twice, none lost
    wait_until(lambda: api.rpc_sync("worker3", swarm_clients.blocks, (swarm.address(),)) == swarm.blocks)
    swarm.close()
    cluster.restart()


def test_no_address():
    with World(1) as world, world[0].activate():
        for wrong in ("worker0", ("worker0", "swarm 1.1"), None):
            with pytest.raises(UsageError, match="address is what"):
                connect(wrong)
        with pytest.raises(UsageError, match="this swarm is closed"):
            connect("#worker0#swarm 1.1")


def test_a_process_with_workers_of_its_own(cluster):
    with pytest.raises(UsageError, match="this process has workers of its own"):
        connect("file:///nowhere/members#worker0#swarm 1.1")


_PROGRAM = """
import sys, torch
from helpers.models import swarm_models
from nbdist.swarm import connect
connect(sys.argv[1]).close()  # and join anew
swarm, again = connect(sys.argv[1]), connect(sys.argv[1])
again.close()
model = swarm.causal_lm()
for _ in range(int(sys.argv[2])):
    print(swarm_models.generate(model, "greedy").tolist(), flush=True)
    if sys.stdin.readline() == "":
        break
swarm.close()
"""


def program(arguments):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, *arguments], text=True, env={**os.environ, **python_path(TESTS)}, **pipes)


def client(address, count):
    return program(["-c", _PROGRAM, address, str(count)])


def test_another_program_writes(cluster):
    model = swarm_models.make("llama")
    expected = swarm_models.generate(model, "greedy").tolist()
    swarm = serve(model, workers=[0, 1, 2])
    members = len(api.current_agent().members())
    first, second = client(swarm.address(), 2), client(swarm.address(), 9)
    assert json.loads(first.stdout.readline()) == json.loads(second.stdout.readline()) == expected
    os.kill(cluster.workers[0].pid, signal.SIGKILL)
    first.stdin.write("on\n"), first.stdin.flush()
    assert json.loads(first.stdout.readline()) == expected
    first.communicate("on\n", timeout=30)
    assert first.returncode == 0
    second.kill()  # it says no goodbye
    second.communicate()
    wait_until(lambda: len(api.current_agent().members()) == members - 1)  # worker0
    wait_until(lambda: not any(each.sessions for each in swarm.info().values()))
    swarm.close()
    cluster.restart()


_SERVES = """
import sys, nbdist
from helpers.models import swarm_models
from nbdist.swarm import serve
if __name__ == "__main__":
    with nbdist.Cluster(2, backend="none", preload=["nbdist.swarm"]):
        swarm = serve(swarm_models.make("llama"), workers=[0, 1])
        print(swarm.address(), flush=True)
        sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["it is killed", "it ends"])
def test_a_program_whose_swarm_ends(end, tmp_path):
    (tmp_path / "serves.py").write_text(_SERVES)
    serving = program([str(tmp_path / "serves.py")])
    try:
        other = client(serving.stdout.readline().strip(), 9)
        assert other.stdout.readline()
        serving.kill() if end == "it is killed" else serving.communicate("\n", timeout=60)
        _, error = other.communicate("on\n" * 9, timeout=60)
        assert "WorkerLost" in error or "this swarm is closed" in error
        assert other.returncode == 1
    finally:
        serving.kill()
        serving.communicate()


# -- clients in one process -----------------------------------------------------------------------


@pytest.fixture
def world():
    with World(4) as world, world[0].activate():
        yield world


def test_a_move_that_is_not_ended_gives_no_block_to_two(world):
    swarm = serve(swarm_models.make("llama"), workers=[0, 1])
    with swarm_clients.another(world, swarm.address()) as other:
        with mock.patch.object(FarPlacer, "unload", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            other.move(0, 2, "worker1")
        swarm.move(4, 5, "worker0")  # worker0 still has the weights of blocks 0 and 1
        assert swarm.blocks == other.blocks == {"worker0": [2, 4], "worker1": [0, 1, 3, 5]}
    swarm.close()


def test_a_server_that_serves_again_is_not_dismissed(world):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2])
    dismiss = FarPlacer.dismiss

    def late(placer, server):
        swarm.crew.lose(swarm.crew.member("worker2").incarnation, "it is said to be gone")
        with pytest.raises(NoRoute):
            swarm.leave("worker1")  # it alone has the blocks now
        dismiss(placer, server)

    with swarm_clients.another(world, swarm.address()) as other:
        with mock.patch.object(FarPlacer, "dismiss", late), pytest.raises(UsageError, match="worker1 serves again"):
            other.leave("worker1")
        wait_until(lambda: swarm.blocks == {"worker1": list(range(6))})  # those of worker2 as well
    swarm.close()


def test_who_leaves_takes_no_blocks(world):
    swarm = serve(swarm_models.make("llama"), workers=[1, 2])

    def late(placer, server):
        swarm.move(0, 6, server.worker)

    with swarm_clients.another(world, swarm.address()) as other:
        refused = pytest.raises(UsageError, match="worker1 is draining, so it takes no blocks")
        with mock.patch.object(FarPlacer, "dismiss", late), refused:
            other.leave("worker1")
        assert swarm.blocks["worker2"] == list(range(6))
    swarm.close()


def test_who_alone_has_lost_a_worker_goes_on_with_another(world):
    model = swarm_models.make("llama")
    swarm = serve(model, workers=[1, 2])
    with swarm_clients.another(world, swarm.address()) as other:
        other.crew.lose(other.crew.member("worker1").incarnation, "only here")
        with world[3].activate():
            assert torch.equal(
                swarm_models.generate(other.causal_lm(), "greedy"), swarm_models.generate(model, "greedy")
            )
        assert swarm.states == {"worker1": "online", "worker2": "online"}
    swarm.close()


def test_two_let_one_worker_join_at_once(world):
    swarm = serve(swarm_models.make("llama"), workers=[1])
    with swarm_clients.another(world, swarm.address()) as other:
        threads = [
            threading.Thread(target=each.join, args=("worker2", *span))
            for each, span in [(swarm, (0, 2)), (other, (4, 6))]
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert swarm.blocks["worker2"] == [0, 1, 4, 5]
        mine = set(swarm_models.servers_here())
        assert sum(name.startswith(f"server {world[0].me.incarnation}") for name in mine) == 2
    swarm.close()
    wait_until(lambda: not swarm_models.servers_here())


def test_a_swarm_ends_with_its_last_use_in_the_process_that_serves(world):
    swarm = serve(swarm_models.make("llama"), workers=[0, 1])
    with swarm_clients.another(world, swarm.address()) as other:
        gc.collect()
        gc.disable()  # no cycle must keep it
        try:
            folder = swarm.checkpoint.folder
            del swarm
            wait_until(lambda: not folder.exists())
        finally:
            gc.enable()
        with world[3].activate(), pytest.raises(UsageError, match="this swarm is closed"):
            other.join("worker2")


def test_a_spending_function_stays_with_its_client(world):
    lock = threading.Lock()
    swarm = serve(swarm_models.make("llama"), workers=[0], spend=lambda kind, tokens: float(lock.locked()))
    with swarm_clients.another(world, swarm.address()) as other:
        assert other.crew.policy.spend("step", 1) == 0.0
    swarm.close()
