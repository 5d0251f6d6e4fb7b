"""The cluster that tests share: a test that leaves something fails, by its name, and the next one finds nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.suite.python_path import python_path

TESTS = Path(__file__).parent

PROGRAM = """
import os, signal, sys, threading, time
import pytest
import torch
import nbdist
from helpers.waiting import wait_until
from nbdist import rpc
from torch.nn.modules import module

kept = []

def test_lasting(shared_cluster):
    shared_cluster.execute("left = 1; rank = [rank]; dist.new_group([0, 1]); None")
    cell = shared_cluster.execute("dist.all_reduce(torch.ones(1))", 0, block=False)
    time.sleep(1)
    cell.cancel()
    with pytest.raises(KeyboardInterrupt):
        cell.wait(60)
    shared_cluster.execute("torch.nn.modules.module.register_module_forward_hook(print); None", 0)
    shared_cluster.execute("torch.autograd.graph.saved_tensors_hooks(abs, abs).__enter__()", 0)
    module.register_module_full_backward_hook(print)
    sys.excepthook = print
    torch.set_default_dtype(torch.float64)
    shared_cluster.progress = print
    shared_cluster.execute("__import__('time').sleep(600)", 1, block=False)

def test_no_hooks():
    assert sys.excepthook is sys.__excepthook__
    assert torch.get_default_dtype() is torch.float32
    assert not module._global_backward_hooks

def test_references(shared_cluster):
    assert shared_cluster.evaluate("'left' in globals()") == [False, False]
    kept.append(rpc.remote("worker0", list))
    kept[0].to_here()
    waits = "__import__('threading').Thread(target=__import__('threading').Event().wait, daemon=True).start()"
    shared_cluster.execute(waits)

def test_innocent(shared_cluster, own_variables):
    shared_cluster.execute("mine = torch.ones(1); dist.all_reduce(mine)")
    kept.append(shared_cluster.workers[0].pid)

def test_the_same_workers(shared_cluster):
    assert shared_cluster.workers[0].pid == kept[-1]
    assert shared_cluster.evaluate("'mine' in globals()") == [False, False]
    os.kill(kept[-1], signal.SIGKILL)
    wait_until(lambda: shared_cluster.workers[0].lost)

def test_others_in_the_place_of_lost_ones(shared_cluster):
    shared_cluster.execute("__import__('torch').distributed.all_reduce(torch.ones(1))")
    assert shared_cluster.workers[0].pid != kept[-1]

def test_nothing_of_it():
    assert rpc.api.is_initialized()

def test_another():
    with nbdist.Cluster(1, backend="none") as cluster:
        assert cluster.evaluate("rank") == [0]
"""
LEFT = {
    "lasting": [
        "worker1: a cell that runs",
        "the cluster's progress",
        "the hook print in torch's global_backward_hooks (1)",
        "sys.excepthook was",
        "torch's default dtype was torch.float32, is torch.float64",
        "worker0: the hook print in torch's global_forward_hooks (1)",
        "worker0: the variable left (1)",
        "worker0: the default process group was whole, is broken off",
        "worker0: hooks of saved tensors was none, is tuple",
        "worker0: the process group",
        "worker0: the variable rank was 0, is list",
    ],
    "references": [
        "used references was 0, is 1",
        "worker0: owned values was 0, is 1",
        "worker1: the thread of wait() (1)",
    ],
}
"""By the name of a test of the program: how the lines begin that say what it leaves."""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What pytest says of the program."""
    file = tmp_path_factory.mktemp("shared") / "test_program.py"
    file.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "--rootdir", file.parent, "-rA", file],
        env={**os.environ, **python_path(TESTS)},
        cwd=file.parent,
        capture_output=True,
        text=True,
        timeout=280,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", LEFT)
def test_what_a_test_leaves_fails_it_by_name(report, name):
    (said,) = re.findall(rf"ERROR at teardown of test_{name} _+\n(.*?)\n[_=-]{{5}}", report, re.DOTALL)
    for line in LEFT[name]:
        assert re.search(rf"^{re.escape(line)}", said, re.MULTILINE), said


def test_no_other_test_fails(report):
    assert re.search(rf"^=+ 8 passed.*{len(LEFT)} errors", report, re.MULTILINE), report[-6000:]
