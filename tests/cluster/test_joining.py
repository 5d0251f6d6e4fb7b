"""Workers that join from other hosts: what happens as hosts are cut off, freeze and die."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.hosts.keepers import cluster_on
from helpers.hosts.other_hosts import can_make_hosts, hosts
from helpers.waiting import wait_for_file, wait_until

import nbdist
from nbdist import rpc
from nbdist.channel.contract import ChannelError
from nbdist.cluster.kernels.workers import StartError
from nbdist.errors import UsageError, WorkerLost

on_hosts = pytest.mark.skipif(
    not can_make_hosts(), reason="only root can make hosts, and only where the kernel allows it"
)


def test_clusters_that_nobody_can_join_say_so():
    said = r"no worker can join this cluster: start one with `%dist_init -n N --host ADDRESS`"
    with nbdist.Cluster(1) as cluster, pytest.raises(UsageError, match=said):
        cluster.invite("file")
    with pytest.raises(UsageError, match=r"name it with --host ADDRESS"):
        nbdist.Cluster(1, launcher="join").start()
    with pytest.raises(ChannelError, match=r"cannot listen at tcp://203\.0\.113\.77"):
        nbdist.Cluster(1, launcher="join", host="203.0.113.77").start()


def test_the_error_of_a_start_says_how_to_start_the_missing_workers(tmp_path):
    file = tmp_path / "my invitation.json"
    cluster = nbdist.Cluster(2, launcher="join", host="127.0.0.1", invitation=str(file), timeout=0.5)
    with pytest.raises(
        StartError, match=r"2 workers must be started: on each host, .*, run `python -m nbdist worker --c.*my inv"
    ):
        cluster.start()
    assert not file.exists()
    assert not list(tmp_path.iterdir())


@on_hosts
def test_all_ends_when_the_notebook_is_killed(tmp_path):
    """The workers and their keepers end after the 12 seconds of silence, and the run directory is gone at once."""
    with hosts(1) as (address, (other,)):
        file = tmp_path / "invitation.json"
        program = (
            "import nbdist, os, sys\n"
            f"with nbdist.Cluster(1, launcher='join', host={address!r}, invitation={str(file)!r}) as cluster:\n"
            "    print(cluster.folder, flush=True)\n"
            "    cluster.execute('import time; time.sleep(1000)')\n"
        )
        notebook = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        keeper = other.start("-m", "nbdist", "worker", "--connect", "-", stdin=wait_for_file(file))
        folder = Path(notebook.stdout.readline().strip())
        assert folder.is_dir()
        notebook.kill()
        notebook.wait()
        wait_until(lambda: not folder.exists(), within=5)
        assert keeper.wait(25) == 1
        wait_until(lambda: not other.pids())


@on_hosts
def test_a_cut_of_three_seconds_loses_and_repeats_nothing(tmp_path):
    with hosts(2) as (address, others), cluster_on(others, address, tmp_path) as cluster:
        cluster.execute("count = 0\ndef add():\n    global count\n    count += 1\n    return count")
        cell = cluster.execute(
            "import time\nfor i in range(50):\n    print(i, flush=True); time.sleep(0.1)", block=False
        )
        calls = [rpc.rpc_async("worker0", eval, args=("1 + 1",)) for _ in range(10)]
        time.sleep(1)
        others[0].cut()
        calls += [rpc.rpc_async("worker0", eval, args=("__import__('__main__').add()",)) for _ in range(20)]
        time.sleep(3)
        others[0].mend()
        assert sorted(call.wait() for call in calls) == sorted([2] * 10 + list(range(1, 21)))
        cell.wait()
        for outputs in cell.outputs.values():
            assert "".join(output["text"] for output in outputs).split() == [str(i) for i in range(50)]


@pytest.mark.soak
@on_hosts
def test_workers_that_cannot_reach_each_other_are_named_and_a_restart_of_one_joins_them(tmp_path):
    work = "import torch, time\nwhile True: dist.all_reduce(torch.ones(3)); time.sleep(0.01)"
    with hosts(2) as (address, others), cluster_on(others, address, tmp_path) as cluster:
        cell = cluster.execute(work, block=False)
        wait_until(lambda: all(part.began for part in cell.parts.values()))
        others[0].part_from(others[1])
        with pytest.raises(WorkerLost, match=r"(?s)worker1 has been silent for 12.*`%dist_restart worker1` starts it"):
            cell.wait(40)
        with pytest.raises(WorkerLost, match=r"worker1 has been silent for 12.*`%dist_restart worker1`"):
            cluster.evaluate("rpc.rpc_sync('worker1', max, args=(1, 2))", "worker0")
        assert not any(worker.lost for worker in cluster.workers)
        others[0].join_again(others[1])
        assert cluster.restart("worker1") == ["worker1"]
        cluster.execute("import torch; total = torch.tensor(rank + 1.0); dist.all_reduce(total)")
        assert [float(total) for total in cluster.pull("total")] == [3.0, 3.0]
        assert cluster.evaluate("rpc.rpc_sync('worker1', max, args=(1, 2))", "worker0") == 2


@on_hosts
@pytest.mark.parametrize("megabytes", [16, pytest.param(80, marks=pytest.mark.soak)])
def test_small_calls_and_heartbeats_pass_a_large_tensor_on_a_slow_line(tmp_path, megabytes):
    """80 MB take 16 seconds; a worker of which nothing comes for 12 would be lost."""
    with hosts(1) as (address, [other]), cluster_on([other], address, tmp_path) as cluster:
        other.slow_down("40mbit")
        tensor = torch.arange(megabytes * 1_000_000 // 8)
        echo = rpc.rpc_async("worker0", torch.Tensor.clone, args=(tensor,), timeout=100)
        passed = 0
        while not echo.done():
            assert rpc.rpc_sync("worker0", eval, args=("6 * 7",), timeout=5) == 42
            passed += 1
        assert torch.equal(echo.wait(), tensor)
        assert passed > megabytes
        assert not any(peer.resent for peer in cluster.agent.links.peers())


@on_hosts
def test_a_host_that_dies_is_named_and_another_one_takes_its_place(tmp_path):
    with hosts(3) as (address, others), cluster_on(others[:2], address, tmp_path, timeout=60) as cluster:
        cell = cluster.execute(
            "import torch\nif rank == 0: dist.barrier()\nelse:\n    import time; time.sleep(1000)", block=False
        )
        waiting = rpc.rpc_async("worker1", eval, args=("__import__('time').sleep(1000)",))
        time.sleep(0.5)
        addresses = {record.name: record.addresses for record in cluster.agent.members()}
        victim = next(other for other in others[:2] if any(other.address in each for each in addresses["worker1"]))
        began = time.monotonic()
        victim.kill()
        with pytest.raises(WorkerLost, match=r"worker1"):
            waiting.wait()
        with pytest.raises(WorkerLost):
            cell.wait()
        assert time.monotonic() - began < 25
        assert [worker.name for worker in cluster.workers if worker.lost] == ["worker1"]
        file = tmp_path / "another.json"
        cluster.invite(str(file))
        others[2].start("-m", "nbdist", "worker", "--connect", "-", stdin=file.read_bytes())
        assert cluster.restart() == ["worker1"]
        cluster.execute("total = torch.tensor(float(rank + 1)); dist.all_reduce(total)")
        assert [float(total) for total in cluster.pull("total")] == [3.0, 3.0]


@pytest.mark.soak
@on_hosts
def test_a_worker_that_freezes_is_lost_after_twelve_seconds_and_can_be_restarted(tmp_path):
    with hosts(2) as (address, others), cluster_on(others, address, tmp_path) as cluster:
        began = time.monotonic()
        cluster.signal("worker1", signal.SIGSTOP)
        time.sleep(0.5)  # the signal is on its way
        with pytest.raises(WorkerLost, match=r"worker1 has been silent for 12"):
            rpc.rpc_sync("worker1", eval, args=("1",), timeout=0)
        assert 10 < time.monotonic() - began < 20
        wait_until(lambda: cluster.find("worker1").lost)
        assert cluster.restart() == ["worker1"]
        assert cluster.evaluate("rank", "worker1") == 1
