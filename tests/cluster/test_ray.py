"""The launcher for Ray: what Ray has no room for, and two nodes of which one is killed or frozen."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
from other_hosts import can_make_hosts, hosts

import nbdist
from nbdist.cluster.processes.launchers.ray import RayLauncher, _say_room, _start_here
from nbdist.errors import ResourceError, UsageError

pytestmark = pytest.mark.timeout(600)  # Ray may take minutes to start on a busy machine
DRIVER = str(Path(__file__).with_name("ray_driver.py"))


@pytest.mark.parametrize(
    ("free", "needs", "count", "said"),
    [
        (
            [{"CPU": 4.0, "GPU": 2.0}] * 5,
            {"CPU": 1.0, "GPU": 1.0},
            16,
            "10 of 16 workers: 5 nodes with 2 free GPUs each",
        ),
        (
            [{"CPU": 4.0}, {"CPU": 1.0}, {}],
            {"CPU": 1.0},
            8,
            "5 of 8 workers: 1 node with 4 free CPUs, 1 node with 1 free",
        ),
        ([{"CPU": 9.0}], {"CPU": 1.0}, 4, "4 of 4 workers: 1 node with 9 free CPUs"),
        ([], {"CPU": 1.0}, 4, "0 of 4 workers: no node"),
        ([{"CPU": 1.0, "GPU": 1.0}], {"CPU": 1.0, "GPU": 0.5}, 2, "1 of 2 workers: 1 node with 1 free GPU"),
    ],
)
def test_what_there_is_room_for_is_said(free, needs, count, said):
    assert f"Ray has room for {said}" in _say_room(free, needs, count)


@pytest.fixture(scope="module")
def ray():
    """A Ray with room for two workers, which no launcher started. It takes 15 s to start, so the tests share it."""
    ray = pytest.importorskip("ray")
    _start_here(ray, 2)
    try:
        yield ray
    finally:
        ray.shutdown()


def until(happened, within: float = 20.0) -> None:
    deadline = time.monotonic() + within
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_ray_without_room_says_what_it_has_and_keeps_nothing(ray):
    cluster = nbdist.Cluster(3, launcher="ray", timeout=2)
    with pytest.raises(ResourceError, match=r"Ray has room for 2 of 3 workers: 1 node with 2 free CPUs\. It waited"):
        cluster.start()
    assert ray.is_initialized(), "a Ray that nbdist did not start must go on"
    with nbdist.Cluster(2, launcher="ray") as cluster:
        assert cluster.evaluate("rank") == [0, 1]
    assert ray.is_initialized()
    until(lambda: ray.available_resources().get("CPU") == 2)  # Ray gives a placement group's place back a little later


def parent_of_keeper(cluster: nbdist.Cluster, name: str) -> int:
    """The pid of the actor whose keeper has a worker."""
    (member,) = [each for each in cluster._lives.launcher.hub.members if name in each.workers]
    return psutil.Process(member.record.pid).ppid()


def pid_of_actor(ray, actor) -> int:
    return ray._private.state.actors(actor._actor_id.hex()).get("Pid") or 0


def test_each_worker_has_the_actor_that_was_made_for_it(ray, monkeypatch):
    """Although that of worker0 is the last one to start. So the loss of one's keeper harms no other worker."""
    make = RayLauncher._make_actor
    late = threading.Event()

    def make_slowly(self, setup):
        if setup.rank == 0 and not late.is_set():
            late.set()
            threading.Timer(2, self._provide).start()
        else:
            make(self, setup)

    monkeypatch.setattr(RayLauncher, "_make_actor", make_slowly)
    with nbdist.Cluster(2, launcher="ray", timeout=60) as cluster:
        launcher = cluster._lives.launcher
        for name, placed in launcher._actors.items():
            assert parent_of_keeper(cluster, name) == pid_of_actor(ray, placed.actor)
        (keeper,) = psutil.Process(parent_of_keeper(cluster, "worker1")).children()
        keeper.kill()
        until(lambda: cluster.find("worker1").lost)
        assert cluster.restart() == ["worker1"]
        assert cluster.evaluate("rank") == [0, 1]


def test_a_keeper_that_never_comes_is_told_of_at_once_and_tried_again(ray):
    with nbdist.Cluster(1, launcher="ray", timeout=60) as cluster:
        launcher = cluster._lives.launcher
        (keeper,) = psutil.Process(parent_of_keeper(cluster, "worker0")).children()
        keeper.kill()
        until(lambda: cluster.find("worker0").lost)

        def kill_the_next() -> None:
            until(lambda: launcher._actors and pid_of_actor(ray, launcher._actors["worker0"].actor))
            actor = psutil.Process(pid_of_actor(ray, launcher._actors["worker0"].actor))
            until(lambda: any("nbdist" in each.cmdline() for each in actor.children()))
            for each in actor.children():
                each.kill()

        killing = threading.Thread(target=kill_the_next)
        killing.start()
        with pytest.raises(ResourceError, match=r"Ray has not started worker0: its keeper has ended, see Ray's"):
            cluster.restart()
        killing.join()
        assert cluster.restart() == ["worker0"]
        assert cluster.evaluate("rank") == [0]


def test_an_address_of_rays_clients_is_refused(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test may have one
    monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:10001")
    with pytest.raises(UsageError, match=r"ray://somewhere:10001 is for clients of Ray outside of its cluster"):
        nbdist.Cluster(1, launcher="ray").start()


@pytest.mark.soak
@pytest.mark.skipif(not can_make_hosts(), reason="only root can make hosts, and only where the kernel allows it")
@pytest.mark.parametrize("harm", ["killed", "frozen"])
def test_a_node_that_is_lost_is_named_and_training_goes_on_on_the_other_one(harm):
    pytest.importorskip("ray")
    with hosts(2) as (_, (first, second)):
        # Whether this user has a token of Ray's or not, and however busy the machine is.
        environment = {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "120"}
        driver = first.start("-u", DRIVER, first.address, stdout=subprocess.PIPE, environment=environment)
        lines = (line.decode().split()[1:] for line in driver.stdout if line.startswith(b"point"))  # not Ray's own
        assert next(lines) == ["head"]
        start = ["--address", f"{first.address}:6379", f"--node-ip-address={second.address}", "--num-cpus=2", "--block"]
        program = ["-m", "ray.scripts.scripts", "start"]
        second.start(*program, *start, stdout=subprocess.DEVNULL, environment=environment)
        assert next(lines) == ["sum", "3.0", "3.0"]
        before = next(lines)
        assert before[0] == "losses"
        assert next(lines) == ["training"]
        if harm == "killed":
            threading.Timer(1.0, second.kill).start()
        else:
            threading.Timer(1.0, lambda: [os.kill(pid, signal.SIGSTOP) for pid in second.pids()]).start()
        assert next(lines) == ["lost", "WorkerLost", "True"]
        restarted = next(lines)
        assert restarted[0] == "restarted"
        after = next(lines)
        assert float(after[1]) < float(before[-1]), "training did not go on where it was"
        assert next(lines) == ["alive", "True"]
        assert driver.wait(60) == 0
