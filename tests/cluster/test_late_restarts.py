"""A restart that runs out of time leaves nothing behind, and can be tried again."""

import contextlib

import pytest

import nbdist
from nbdist.cluster.workers import StartError


@pytest.mark.parametrize(
    "seconds", [0.0, 0.02, 0.1, *(pytest.param(n, marks=pytest.mark.soak) for n in (0.01, 0.05, 0.2))]
)
def test_a_restart_that_ran_out_of_time_can_be_repeated(seconds):
    """It may stop at any step: none of its processes is left, and the end of an old one does not end the new worker."""
    with nbdist.Cluster(2) as cluster:
        object.__setattr__(cluster.spec, "timeout", seconds)
        with contextlib.suppress(StartError):
            cluster.restart(["worker1"])
        object.__setattr__(cluster.spec, "timeout", 60.0)
        for _ in range(2):
            assert cluster.restart(["worker1"]) == ["worker1"]
            assert cluster.evaluate("rank") == [0, 1]
            assert cluster.find("worker1").lost is None
