"""Workers that die: named at once, with how and with their last words; and that come back."""

import pytest

import nbdist
from nbdist.cluster.kernels.workers import Worker

DEATHS = {
    "import os; os._exit(3)": "exited with code 3",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": "was killed by SIGKILL",
    "import ctypes; ctypes.string_at(0)": "was killed by SIGSEGV",
    "import sys, os; sys.__stderr__.write('my last words\\n'); sys.__stderr__.flush(); os._exit(1)": "my last words",
}


@pytest.mark.parametrize("code", DEATHS)
def test_a_death_fails_its_cell_at_once_and_says_how(two, code):
    cell = two.run(f"%%remote 1\n{code}", check=False, timeout=20)
    assert cell.error["ename"] == "WorkerLost"
    assert "worker1" in cell.error["evalue"]
    assert DEATHS[code] in cell.error["evalue"]
    assert "%dist_restart worker1" in cell.error["evalue"]
    assert two.run("%%remote 0\nprint('alive')").stdout == "alive\n"
    cell = two.run("%%remote\nprint(rank)", check=False)
    assert cell.stdout == "[worker0] 0\n"
    assert cell.error["ename"] == "WorkerLost"
    assert two.run("%dist_status").result.count("worker1") == 1


def test_calls_to_it_fail_with_the_same(two):
    cell = two.run("import os\nrpc.rpc_sync('worker1', os._exit, args=(5,))", check=False)
    assert cell.error["ename"] == "WorkerLost"
    assert "worker1 exited with code 5" in cell.error["evalue"]
    assert "_exit" in cell.error["evalue"]
    cell = two.run("rpc.rpc_sync('worker1', len, args=([],))", check=False)
    assert "worker1 exited with code 5" in cell.error["evalue"]


def test_one_comes_back_under_its_name_and_rank_and_others_are_untouched(two):
    two.run("%%remote -o held\ntorch.ones(1) * rank")
    two.run("%%remote 0\nkept = 1")
    two.run("%%remote 1\nimport os; os._exit(0)", check=False)
    assert two.run("%dist_restart").stdout == "Restarted worker1.\nThe process group is formed anew.\n"
    assert two.run("%%remote\nprint(rank, world_size)").stdout == "[worker0] 0 2\n[worker1] 1 2\n"
    assert two.run("%remote 0 kept").result == "1"
    assert two.run("held[0].to_here()").result == "tensor([0.])"
    dead = two.run("held[1].to_here()", check=False)
    assert dead.error["ename"] in ("WorkerLost", "RRefError")
    assert two.run("rpc.rpc_sync('worker1', max, args=(3, 4))").result == "4"
    two.run("def ask(): return rpc.rpc_sync('worker1', max, args=(5, 6))")
    assert two.run("rpc.rpc_sync('worker0', ask)").result == "6"
    two.run("%dist_restart -p")
    assert two.run("%%remote\nt = torch.ones(1); dist.all_reduce(t); t.item()").stdout == "[worker0,1] 2.0\n"


def test_the_progress_bar_of_a_cell_that_has_ended_does_not_explain_a_death(two):
    two.run("%%remote 1\nimport sys; print('99% of a bar', end='\\r', file=sys.stderr, flush=True)")
    two.run("os.kill(Cluster.current.find('worker1').pid, signal.SIGKILL)")
    cell = two.run("%%remote 1\n1 + 1", check=False)
    assert "worker1 was killed by SIGKILL" in cell.error["evalue"]
    assert "of a bar" not in cell.error["evalue"]


def test_a_living_one_can_be_restarted_while_it_is_stuck(two):
    two.run("%%remote 1 -a\nimport ctypes; ctypes.PyDLL(None).sleep(600)")
    two.run("%dist_restart worker1")
    assert two.run("%%remote\nprint(rank)").stdout == "[worker0] 0\n[worker1] 1\n"


def test_all_can_be_restarted_group_and_all(two):
    two.run("%%remote\nold = True")
    assert "process group is formed anew" in two.run("%dist_restart all").stdout
    assert two.run("%remote all 'old' in globals()").result == "[False, False]"
    assert two.run("%%remote\nt = torch.ones(1); dist.all_reduce(t); t.item()").stdout == "[worker0,1] 2.0\n"


def test_a_reset_kills_and_a_new_cluster_starts(two):
    two.run("%%remote -a\nimport time; time.sleep(600)")
    two.run("%dist_mode -e")
    assert "0 processes left" in two.run("%dist_reset").stdout
    assert two.run("1 + 1").result == "2"
    assert two.run("%%remote\n1", check=False).error["evalue"].startswith("no cluster runs")
    two.run("%dist_init -n 2 --seed 5 --driver master")
    assert two.run("%%remote\nprint(rank, rpc.get_worker_info().id)").stdout == "[worker1] 0 1\n[worker2] 1 2\n"
    assert two.run("rpc.get_worker_info().name, rpc.get_worker_info().id").result == "('master', 0)"
    assert two.run("%remote 0 torch.initial_seed(), rank").result == "(5, 0)"
    assert two.run("%remote worker2 torch.initial_seed()").result == "6"
    first = two.run("%remote all torch.rand(1).item()").result
    two.run("%dist_shutdown")
    two.run("%dist_init -n 2 --seed 5 --driver master")
    assert two.run("%remote all torch.rand(1).item()").result == first


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n", ""),
        (
            "[Gloo] Rank 0 is connected to 1 peer ranks.\nout of luck\n",
            "\nits standard error ended with:\n    out of luck",
        ),
    ],
)
def test_what_gloo_says_when_a_group_forms_is_no_reason(said, told):
    """Torch 2.10 writes a line to standard error for each process group. Else the cell's own words count."""
    why = Worker("worker0", 0, 0, "cpu", None).end(-9, said)
    assert why == f"was killed by SIGKILL (out of memory, or killed by hand){told}"


def test_a_worker_that_its_cluster_ends_was_not_killed_by_hand(monkeypatch):
    with nbdist.Cluster(2, backend="none") as cluster:
        cell = cluster.execute("import time; time.sleep(600)", block=False)
        launcher, told = cluster.lifecycle.launcher, []
        close = launcher.close

        def slowly():
            left = close()
            assert all(worker.ended.wait(20) for worker in cluster.workers)  # the news of their ends have come
            told.extend(worker.lost for worker in cluster.workers)
            return left

        monkeypatch.setattr(launcher, "close", slowly)
    with pytest.raises(nbdist.WorkerLost) as raised:
        cell.wait()
    told += [worker.lost for worker in cluster.workers] + [str(raised.value)]
    assert all("has been shut down with its cluster" in each for each in told), told
