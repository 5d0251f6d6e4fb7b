"""Joined workers when things go wrong at the worst moment: Ctrl-C, keepers that die, starts that are given up.

The keepers run on this host, at addresses of their own in 127.0.0.0/8.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest
from helpers.hosts.keepers import Keepers, keeper_of
from helpers.waiting import wait_for_file, wait_until

import nbdist
from nbdist.cluster.errors import CellTimeout
from nbdist.cluster.kernels.workers import StartError


def limit(cluster: nbdist.Cluster, seconds: float) -> None:
    """Give the cluster's next starts another time limit."""
    object.__setattr__(cluster.spec, "timeout", seconds)


def test_ctrl_c_during_a_shutdown_leaves_nothing_open(keepers):
    with keepers.cluster(addresses=["127.0.0.1", "127.0.0.1"]) as cluster:
        hub, folder = cluster.lifecycle.launcher.hub, cluster.folder
        os.kill(keeper_of(cluster, "worker1").record.pid, signal.SIGSTOP)
        threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            cluster.shutdown()
    assert not os.path.exists(folder)
    assert not keepers.file.exists()
    assert hub.agent.closed
    assert not [thread for thread in threading.enumerate() if thread.name == "nbdist-entrance"]


def test_what_a_worker_that_holds_the_gil_has_called_is_asked_of_its_host(keepers):
    code = """
import ctypes, sys, torch, torch.distributed as dist
dist.all_reduce(torch.ones(1))
if rank == 1:
    dist.all_reduce(torch.ones(2), async_op=True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the signal that asks for frames cuts one of the sleeps short, and nothing gets between
    for _ in range(8): ctypes.PyDLL(None).sleep(1)
    sys.setswitchinterval(before)
else:
    dist.all_reduce(torch.ones(3))
"""
    with keepers.cluster(addresses=["127.0.0.2", "127.0.0.3"]) as cluster:
        told = r"#2 of the default group is .* worker0 all_reduce float32\[3\] .*, worker1 all_reduce float32\[2\]"
        with pytest.raises(CellTimeout, match=told):
            cluster.execute(code, timeout=3)


def test_a_restart_that_nobody_could_serve_in_time_is_forgotten(keepers):
    with keepers.cluster(addresses=["127.0.0.1", "127.0.0.1"]) as cluster:
        os.kill(keeper_of(cluster, "worker1").record.pid, signal.SIGKILL)
        wait_until(lambda: cluster.find("worker1").lost)
        limit(cluster, 1.0)
        with pytest.raises(StartError, match=r"worker1 \(last step: starting\); 1 worker must be started"):
            cluster.restart()
        keepers.another(cluster)
        wait_until(lambda: len(cluster.lifecycle.launcher.hub.members) == 2)
        time.sleep(0.5)
        assert not keeper_of(cluster, "worker0").workers - {"worker0"}
        assert cluster.find("worker1").lost, "nobody waits for it, so it must not have started"
        limit(cluster, 60.0)
        for _ in range(2):
            assert cluster.restart(["worker1"]) == ["worker1"]
            assert cluster.evaluate("rank") == [0, 1]


def test_a_restart_says_at_once_that_somebody_must_start_the_worker(keepers):
    with keepers.cluster(addresses=["127.0.0.1", "127.0.0.1"]) as cluster:
        os.kill(keeper_of(cluster, "worker1").record.pid, signal.SIGKILL)
        wait_until(lambda: cluster.find("worker1").lost)
        said = []

        def read(line):  # who reads the line starts the worker for which the restart waits
            said.append(line)
            keepers.another(cluster)

        cluster.on_joined = read
        assert cluster.restart() == ["worker1"]
        assert cluster.restart("worker0") == ["worker0"], "its host is there, so nothing is said"
        (line,) = said
        assert line.startswith("1 worker must be started: on each host, ")
        assert line.endswith("write another one with %dist_invite")


@pytest.mark.soak  # a test above has a restart that nobody can serve, too
def test_a_worker_without_a_place_does_not_keep_others_from_theirs(keepers):
    with keepers.cluster(addresses=["127.0.0.1", "127.0.0.1"]) as cluster:
        os.kill(keeper_of(cluster, "worker0").record.pid, signal.SIGKILL)
        wait_until(lambda: cluster.find("worker0").lost)
        limit(cluster, 1.0)
        with pytest.raises(StartError, match="worker0"):
            cluster.restart(["worker0"])
        cluster.signal("worker1", signal.SIGKILL)
        wait_until(lambda: cluster.find("worker1").lost)
        limit(cluster, 60.0)
        assert cluster.restart(["worker1"]) == ["worker1"]


def test_rank_0_takes_the_address_of_the_master_along(keepers):
    address = "__import__('os').environ['MASTER_ADDR']"
    with keepers.cluster(addresses=["127.0.0.2", "127.0.0.3"]) as cluster:
        before = cluster.evaluate(address)
        assert before[0] == before[1] == keeper_of(cluster, "worker0").address
        os.kill(keeper_of(cluster, "worker0").record.pid, signal.SIGKILL)
        wait_until(lambda: cluster.find("worker0").lost)
        keepers.another(cluster, address="127.0.0.4")
        assert cluster.restart(["worker0", "worker1"]) == ["worker0", "worker1"]
        assert cluster.evaluate(address) == ["127.0.0.4", "127.0.0.4"]
        os.kill(keeper_of(cluster, "worker0").record.pid, signal.SIGKILL)
        wait_until(lambda: cluster.find("worker0").lost)
        keepers.another(cluster, address="127.0.0.5")
        assert cluster.restart(["worker0"]) == ["worker0"]
        assert cluster.evaluate(address) == ["127.0.0.5", "127.0.0.5"], "a worker that lives must learn it, too"


def test_a_keeper_that_dies_while_it_starts_a_worker_leaves_it_to_another(keepers):
    (keepers.folder / "slow_to_import.py").write_text("import time\ntime.sleep(3)\n")

    def start() -> None:
        wait_until(lambda: hasattr(cluster, "lifecycle"))
        launcher = cluster.lifecycle.launcher
        file = keepers.folder / "two.json"
        launcher.hub.invite(60, 2).write(file)
        keepers.start(file=file)
        keepers.start(file=file)
        wait_until(lambda: len(launcher.hub.members) == 2 and launcher.placed)
        time.sleep(1)  # it imports
        os.kill(launcher.placed["worker0"].member.record.pid, signal.SIGKILL)

    options = {"host": "127.0.0.1", "invitation": str(keepers.file), "timeout": 60, "preload": ("slow_to_import",)}
    cluster = nbdist.Cluster(1, launcher="join", **options)
    starting = threading.Thread(target=start)
    starting.start()
    with cluster:
        assert cluster.evaluate("rank") == [0]
    starting.join()


def test_exit_handlers_of_joined_workers_run(keepers):
    file = keepers.folder / "said"
    with keepers.cluster(addresses=["127.0.0.1"]) as cluster:
        cluster.execute(f"import atexit\natexit.register(lambda: open({str(file)!r}, 'w').write('goodbye'))")
    assert wait_for_file(file) == b"goodbye"


def first_refused(keepers: Keepers, address: str, then=lambda: None) -> str:
    """Start a cluster of one with two keepers, one after the other, and one invitation; return the error of the first.

    ``then`` is called between the two.
    """
    said = []

    def start() -> None:
        wait_for_file(keepers.file)
        first = keepers.start(address=address, stderr=subprocess.PIPE)
        said.append((first.wait(30), first.stderr.read().decode()))
        then()
        keepers.start()

    threading.Thread(target=start, daemon=True).start()
    with nbdist.Cluster(1, launcher="join", host="127.0.0.1", invitation=str(keepers.file), timeout=60) as cluster:
        assert cluster.evaluate("rank") == [0]
    ((code, text),) = said
    assert code == 2
    return text


def test_an_address_that_cannot_be_used_does_not_use_up_an_invitation(keepers):
    assert "203.0.113.77 is no address of this host" in first_refused(keepers, "203.0.113.77")


def test_a_keeper_that_was_let_in_and_did_not_come_gives_its_use_back(keepers, monkeypatch):
    monkeypatch.setattr("nbdist.cluster.hosts.hub._ARRIVES_WITHIN", 0.0)
    assert "came too late" in first_refused(keepers, "127.0.0.1", monkeypatch.undo)


def test_two_notebooks_in_one_folder_keep_off_each_others_invitation(keepers):
    with keepers.cluster(addresses=["127.0.0.1"]):
        other = nbdist.cluster.spec.Spec(count=1, launcher="join", host="127.0.0.1", invitation=str(keepers.file))
        from nbdist.cluster.hosts.launchers.join import JoinLauncher

        second = JoinLauncher(other, lambda name, how: None)
        text = keepers.file.read_bytes()
    assert keepers.file.read_bytes() == text
    second.close()
    assert not keepers.file.exists()
