"""The launcher for Ray: what Ray has no room for, and two nodes of which one is killed or frozen."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from other_hosts import can_make_hosts, hosts

import nbdist
from nbdist.cluster.processes.launchers.ray import _say_room
from nbdist.errors import ResourceError, UsageError

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


def test_a_ray_without_room_says_what_it_has_and_keeps_nothing(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")  # for a busy machine
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        cluster = nbdist.Cluster(3, launcher="ray", timeout=2)
        with pytest.raises(
            ResourceError, match=r"Ray has room for 2 of 3 workers: 1 node with 2 free CPUs\. It waited"
        ):
            cluster.start()
        assert ray.is_initialized(), "a Ray that nbdist did not start must go on"
        with nbdist.Cluster(2, launcher="ray") as cluster:
            assert cluster.evaluate("rank") == [0, 1]
        assert ray.is_initialized()
        deadline = time.monotonic() + 20
        while ray.available_resources().get("CPU") != 2:  # Ray gives a placement group's place back a little later
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:10001")
    with pytest.raises(UsageError, match=r"ray://somewhere:10001 is for clients of Ray outside of its cluster"):
        nbdist.Cluster(1, launcher="ray").start()


@pytest.mark.soak
@pytest.mark.timeout(400)
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
