"""The launcher for Ray: what Ray has no room for, and two nodes of which one is killed or frozen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from helpers.hosts.other_hosts import can_make_hosts, hosts
from helpers.suite.python_path import python_path
from helpers.waiting import wait_until

import nbdist
from nbdist.cluster.hosts.launchers import ray_room
from nbdist.cluster.hosts.launchers.ray import RayLauncher, _start_here
from nbdist.cluster.hosts.launchers.ray_room import say_room
from nbdist.errors import ResourceError, UsageError

pytestmark = pytest.mark.timeout(600)  # Ray may take minutes to start on a busy machine
DRIVER = str(Path(__file__).with_name("ray_driver.py"))
AUTOSCALER = str(Path(__file__).with_name("ray_autoscaler.py"))
RAY = str(Path(__file__).with_name("ray_small.py"))
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "120"}
"""For Rays on hosts of their own: whether this user has a token of Ray's or not, and however busy the machine is."""


def points(program: subprocess.Popen[bytes]) -> Iterator[list[str]]:
    """Return the words of each line with which a program says how far it is; the other lines are Ray's."""
    return (line.decode().split()[1:] for line in program.stdout if line.startswith(b"point"))


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
    assert f"Ray has room for {said}" in say_room(free, needs, count)


@pytest.fixture(scope="module")
def ray():
    """A Ray with room for two workers, which no launcher started. It takes 15 s to start, so the tests share it."""
    ray = pytest.importorskip("ray")
    _start_here(ray, 2)
    try:
        yield ray
    finally:
        ray.shutdown()


def test_a_ray_without_room_says_what_it_has_and_keeps_nothing(ray):
    cluster = nbdist.Cluster(3, launcher="ray", timeout=2)
    with pytest.raises(ResourceError, match=r"Ray has room for 2 of 3 workers: 1 node with 2 free CPUs\. It waited"):
        cluster.start()
    assert ray.is_initialized(), "a Ray that nbdist did not start must go on"
    with nbdist.Cluster(2, launcher="ray") as cluster:
        assert cluster.evaluate("rank") == [0, 1]
    assert ray.is_initialized()
    wait_until(
        lambda: ray.available_resources().get("CPU") == 2
    )  # Ray gives a placement group's place back a little later


def test_a_line_says_what_the_autoscaler_does_once_for_each_change(ray, monkeypatch):
    """Here its answers are made up; the soak test below has a real one."""
    answers = iter([0, 2, 2, 1, 1, 1])
    monkeypatch.setattr(ray_room, "nodes_starting", lambda ray: next(answers))
    monkeypatch.setattr(ray_room, "_LOOK_EVERY", 0.1)
    lines: list[str] = []
    monkeypatch.setattr(ray_room.trace, "steps", lambda: lines.append)

    class Group:
        waits = 0

        def wait(self, seconds: float) -> bool:
            time.sleep(seconds)
            self.waits += 1
            return self.waits == 6

    ray_room.wait_for_room(ray, Group(), {"CPU": 1.0}, 2, within=100)
    starting = "Ray's autoscaler is starting"
    assert lines == [
        f"{starting} 2 nodes; waiting up to 100 s for room",
        f"{starting} 1 node; waiting up to 100 s for room",
        "Ray's autoscaler has started 0 nodes: there is room for all workers",
    ]
    monkeypatch.setattr(ray_room, "nodes_starting", lambda ray: 3)
    with pytest.raises(ResourceError, match=r"CPUs\. After 0\.2 s its autoscaler was still starting 3 nodes; -t 300"):
        ray_room.wait_for_room(ray, Group(), {"CPU": 1.0}, 5, within=0.2)


def parent_of_keeper(cluster: nbdist.Cluster, name: str) -> int:
    """The pid of the actor whose keeper has a worker."""
    (member,) = [each for each in cluster.lifecycle.launcher.hub.members if name in each.workers]
    return psutil.Process(member.record.pid).ppid()


def pid_of_actor(ray, actor) -> int:
    return ray._private.state.actors(actor._actor_id.hex()).get("Pid") or 0


def test_each_worker_has_the_actor_that_was_made_for_it(ray, monkeypatch):
    """Although that of worker0 is the last one to start. So the loss of one's keeper harms no other worker."""
    make = RayLauncher.make_actor
    late = threading.Event()

    def make_slowly(self, setup):
        if setup.rank == 0 and not late.is_set():
            late.set()
            threading.Timer(2, self._provide).start()
        else:
            make(self, setup)

    monkeypatch.setattr(RayLauncher, "make_actor", make_slowly)
    with nbdist.Cluster(2, launcher="ray", timeout=60) as cluster:
        launcher = cluster.lifecycle.launcher
        for name, placed in launcher.actors.items():
            assert parent_of_keeper(cluster, name) == pid_of_actor(ray, placed.actor)
        (keeper,) = psutil.Process(parent_of_keeper(cluster, "worker1")).children()
        keeper.kill()
        wait_until(lambda: cluster.find("worker1").lost)
        assert cluster.restart() == ["worker1"]
        assert cluster.evaluate("rank") == [0, 1]


@pytest.mark.soak  # the test above kills a keeper and restarts its worker, too
def test_a_keeper_that_never_comes_is_told_of_at_once_and_tried_again(ray):
    with nbdist.Cluster(1, launcher="ray", timeout=60) as cluster:
        launcher = cluster.lifecycle.launcher
        (keeper,) = psutil.Process(parent_of_keeper(cluster, "worker0")).children()
        keeper.kill()
        wait_until(lambda: cluster.find("worker0").lost)

        def kill_the_next() -> None:
            wait_until(lambda: launcher.actors and pid_of_actor(ray, launcher.actors["worker0"].actor))
            actor = psutil.Process(pid_of_actor(ray, launcher.actors["worker0"].actor))
            wait_until(lambda: any("nbdist" in each.cmdline() for each in actor.children()))
            for each in actor.children():
                each.kill()

        killing = threading.Thread(target=kill_the_next)
        killing.start()
        with pytest.raises(ResourceError, match=r"Ray has not started worker0: its keeper has ended, see Ray's"):
            cluster.restart()
        killing.join()
        assert cluster.restart() == ["worker0"]
        assert cluster.evaluate("rank") == [0]


@pytest.mark.soak
def test_an_actor_that_dies_before_its_keeper_comes_is_asked_for_again(ray, monkeypatch):
    """As where Ray places it on a node that is frozen, before Ray has noticed that. But not without end."""
    make = RayLauncher.make_actor
    made = []
    deaths = 2

    def make_one_that_dies(self, setup):
        make(self, setup)
        placed = self.actors[setup.name]
        made.append(placed)
        if len(made) <= deaths:
            threading.Thread(target=kill, args=(placed.actor,)).start()

    def kill(actor) -> None:
        wait_until(lambda: pid_of_actor(ray, actor))
        os.kill(pid_of_actor(ray, actor), signal.SIGKILL)

    monkeypatch.setattr(RayLauncher, "make_actor", make_one_that_dies)
    with nbdist.Cluster(1, launcher="ray", timeout=60) as cluster:
        assert cluster.evaluate("rank") == [0]
        assert len(made) == 3
    made.clear()
    deaths = 100
    with pytest.raises(
        ResourceError, match=r"Ray has not started worker0: The actor died unexpectedly .* Restart it to"
    ):
        nbdist.Cluster(1, launcher="ray", timeout=60).start()
    assert len(made) == 3


def test_an_actor_has_no_torch(ray):
    """It would take seconds and 200 MB of each worker, for nothing."""
    with nbdist.Cluster(1, launcher="ray", timeout=60) as cluster:
        maps = Path(f"/proc/{parent_of_keeper(cluster, 'worker0')}/maps").read_text()
        assert "libtorch" not in maps


def test_a_start_without_rays_head_fails_at_once(ray, monkeypatch):
    """To ask Ray would block the launcher, and its shutdown with it, until Ray ends this process."""
    with nbdist.Cluster(1, launcher="ray", timeout=60) as cluster:
        (keeper,) = psutil.Process(parent_of_keeper(cluster, "worker0")).children()
        keeper.kill()
        wait_until(lambda: cluster.find("worker0").lost)
        with monkeypatch.context() as patch:
            patch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
            with pytest.raises(ResourceError, match=r"Ray cannot start worker0: its head at 127\.0\.0\.1:1 cannot be"):
                cluster.restart()
        assert cluster.restart() == ["worker0"]


@pytest.mark.parametrize("disconnects", [True, False])
def test_a_cluster_leaves_a_ray_without_a_head(monkeypatch, disconnects):
    groups = pytest.importorskip("ray.util.placement_group")
    asked, ended = threading.Event(), threading.Event()

    def block(group) -> None:
        asked.set()
        ended.wait(60)

    monkeypatch.setattr(groups, "remove_placement_group", block)
    monkeypatch.setattr("nbdist.cluster.hosts.launchers.ray._LEAVES_WITHIN", 0.1)
    said = []
    ray = SimpleNamespace(shutdown=lambda: said.append("shut down"))
    launcher = SimpleNamespace(_group="group", _disconnects=disconnects, _ray=ray)
    RayLauncher._leave_ray(launcher)
    ended.set()
    assert (asked.is_set(), said) == ((False, ["shut down"]) if disconnects else (True, []))
    assert launcher._group is None


WITH_RUNTIME_ENV = """
import sys

import ray

import nbdist

runtime_env = {"env_vars": {"ONLY_IN_WORKERS": "1"}, "working_dir": sys.argv[2]}
ray.init(address=sys.argv[1], runtime_env=runtime_env, log_to_driver=False, logging_level="ERROR")
with nbdist.Cluster(2, launcher="ray", timeout=60) as cluster:
    cluster.execute("import os, only_there")
    print("told", *cluster.evaluate("os.environ['ONLY_IN_WORKERS'] + only_there.SAID + open('data.txt').read()"))
"""


@pytest.mark.soak
def test_a_runtime_env_of_rays_comes_to_the_workers(ray, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "only_there.py").write_text("SAID = '2'")
    (folder / "data.txt").write_text("3")
    done = subprocess.run(
        [sys.executable, "-c", WITH_RUNTIME_ENV, ray.get_runtime_context().gcs_address, folder],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "told 123 123" in done.stdout, done.stdout + done.stderr


def test_an_address_of_rays_clients_is_refused(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test may have one
    monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:10001")
    with pytest.raises(UsageError, match=r"ray://somewhere:10001 is for clients of Ray outside of its cluster"):
        nbdist.Cluster(1, launcher="ray").start()


@pytest.mark.soak
@pytest.mark.skipif(not can_make_hosts(), reason="only root can make hosts, and only where the kernel allows it")
@pytest.mark.parametrize("version", ["1", "2"])
def test_while_an_autoscaler_starts_nodes_a_line_says_so_and_the_error_too(version):
    pytest.importorskip("ray")
    path = python_path(Path(AUTOSCALER).parent)  # for its class of nodes, which the autoscaler imports
    with hosts(1) as (_, (host,)):
        program = host.start("-u", AUTOSCALER, version, stdout=subprocess.PIPE, environment={**ENVIRONMENT, **path})
        told = [" ".join(words) for words in points(program)]
        assert program.wait(60) == 0
    starting = "Ray's autoscaler is starting 2 nodes; waiting up to"
    assert told[:4] == [
        "head",
        "error Ray has room for 0 of 1 worker: 1 node with 0 free GPUs. It waited for 4 s; -t SECONDS waits longer, "
        "-n N asks for fewer",
        f"line {starting} 4 s for room",
        "error Ray has room for 1 of 5 workers: 1 node with 1 free CPU. After 4 s its autoscaler was still starting "
        "2 nodes; -t 300 waits longer, -n N asks for fewer",
    ]
    assert told[4] == f"line {starting} 180 s for room"
    assert told[-2:] == ["line Ray's autoscaler has started 2 nodes: there is room for all workers", "ranks 0 1 2 3 4"]
    assert len(told) == len(set(told)), "a line was shown again"


@pytest.mark.soak
@pytest.mark.skipif(not can_make_hosts(), reason="only root can make hosts, and only where the kernel allows it")
@pytest.mark.parametrize("harm", ["killed", "frozen"])
def test_a_node_that_is_lost_is_named_and_training_goes_on_on_the_other_one(harm):
    pytest.importorskip("ray")
    with hosts(2) as (_, (first, second)):
        driver = first.start("-u", DRIVER, first.address, stdout=subprocess.PIPE, environment=ENVIRONMENT)
        lines = points(driver)
        assert next(lines) == ["head"]
        start = ["--address", f"{first.address}:6379", f"--node-ip-address={second.address}", "--num-cpus=2", "--block"]
        second.start(RAY, "start", *start, stdout=subprocess.DEVNULL, environment=ENVIRONMENT)
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
