"""Scripts for ``torchrun`` run in cells: the process group is theirs, and forms again after they have destroyed it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nbdist
from nbdist.cluster.processes.generations import Generations

SCRIPT = Path(__file__).parents[2] / "notebooks" / "programs" / "torchrun_ddp.py"
THERE = "init_process_group: the process group is there already: gloo, 2 workers"
SUM = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size, t"


@pytest.fixture
def two(two):
    """The cluster of the module, on which the test before has left a process group."""
    two.run(f"%%remote\n{SUM}")
    return two


def loss_in(text: str) -> str:
    line = next(line for line in text.splitlines() if "mean loss" in line)
    return line.partition("ranks: ")[2]


def test_no_other_module_of_torch_has_the_functions_that_are_replaced():
    from nbdist.cluster.worker.default_group import HOMES

    found = """
import importlib, sys
for name in ("_dynamo", "distributed.checkpoint", "distributed.fsdp", "distributed.pipelining", "distributed.tensor",
             "distributed.run", "distributed.nn", "distributed.optim", "distributed.algorithms.join", "nn.parallel"):
    importlib.import_module(f"torch.{name}")
from torch.distributed.distributed_c10d import destroy_process_group, init_process_group
both = {init_process_group, destroy_process_group}
print({name for name, module in sys.modules.items() if any(vars(module).get(each.__name__) is each for each in both)})
"""
    said = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True).stdout
    assert ast.literal_eval(said) - {"__main__", "__mp_main__"} == set(HOMES)


def test_a_pasted_script_runs_ten_times_in_a_row(two):
    runs = [two.run(f"%%remote\n{SCRIPT.read_text()}").stdout for _ in range(10)]
    assert all(run.count(THERE) == 1 for run in runs), runs
    assert len({loss_in(run) for run in runs}) == 1
    two.run(f"%%remote\n{SUM}")


def test_a_script_that_is_run_by_its_name_runs_ten_times_in_a_row(two):
    for _ in range(10):
        assert "mean loss of 2 ranks" in two.run(f"%%remote\n%run {SCRIPT}").stdout


def test_a_cell_forms_the_group_again_as_often_as_it_destroys_it_and_the_last_one_stays(two):
    two.run(
        "%%remote\n"
        "for _ in range(10):\n"
        "    dist.destroy_process_group()\n"
        "    dist.init_process_group('gloo', rank=rank, world_size=world_size)\n"
        f"    {SUM}\n"
        "kept = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))"
    )
    two.run("%%remote\nkept(torch.ones(2)).sum().backward()")
    two.run(
        "from pathlib import Path\n"
        "folders = list(Path(Cluster.current.folder).glob('group-*'))\n"
        "assert len(folders) <= 2, folders"
    )


def test_other_code_of_torch_that_forms_a_group_forms_this_one(two):
    two.run(
        "%%remote\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "dist.destroy_process_group()\n"
        "mesh = init_device_mesh('cpu', (2,))\n"
        f"{SUM}\n"
        "assert dist.get_backend() == 'gloo'"
    )


def test_between_destroying_and_forming_there_is_no_group_and_the_error_says_what_forms_it(two):
    cell = two.run("%%remote\ndist.destroy_process_group()\ndist.barrier()", check=False)
    assert "destroy_process_group has ended this worker's process group" in cell.error["evalue"]
    two.run(f"%%remote\n{SUM}")


def test_one_worker_that_destroys_its_group_costs_the_next_cell_nothing(two):
    two.run("%%remote 0\ndist.destroy_process_group()")
    two.run(f"%%remote\n{SUM}")


def test_a_called_function_that_destroys_the_group_does_so_until_the_next_cell_has_ended(two):
    two.run("import torch.distributed as dist\nfrom nbdist import rpc")
    two.run("for each in ('worker0', 'worker1'): rpc.rpc_sync(each, dist.destroy_process_group)")
    two.run("%%remote\nassert not dist.is_initialized()")
    two.run(f"%%remote\n{SUM}")


@pytest.mark.parametrize(
    ("call", "asks"),
    [
        ("init_process_group('nccl')", "nccl, rank 0 of 2"),
        ("init_process_group('gloo', rank=0, world_size=1)", "gloo, rank 0 of 1"),
        ("init_process_group(backend='gloo', rank=1 - rank)", "gloo, rank 1 of 2"),
    ],
)
def test_a_group_for_other_workers_or_another_backend_is_refused(two, call, asks):
    for before in ("", "dist.destroy_process_group()\n"):
        cell = two.run(f"%%remote 0\n{before}dist.{call}", check=False)
        assert f"init_process_group asks for {asks}, but this cluster's process group is gloo" in cell.error["evalue"]
        assert "%dist_init --backend none" in cell.error["evalue"]
    two.run(f"%%remote\n{SUM}")


def test_a_script_that_sets_another_rank_in_the_environment_is_refused(two):
    lines = "import os\nold, os.environ['RANK'] = os.environ['RANK'], '7'\n"
    cell = two.run(f"%%remote 1\n{lines}try: dist.init_process_group()\nfinally: os.environ['RANK'] = old", check=False)
    assert "rank 7 of 2" in cell.error["evalue"]


@pytest.mark.parametrize(
    "call", ["()", "(None)", "('cpu:gloo,cuda:nccl')", "('gloo', init_method='tcp://localhost:1')"]
)
def test_ways_to_ask_for_the_group_that_is_there(two, call):
    assert THERE in two.run(f"%%remote\ndist.init_process_group{call}").stdout


def test_a_timeout_that_is_asked_for_holds_for_the_group_that_is_there(two):
    slow = "if rank == 0: dist.barrier()"
    cell = two.run(
        "%%remote\nfrom datetime import timedelta\n"
        f"dist.init_process_group('gloo', timeout=timedelta(seconds=1.5))\n{slow}",
        check=False,
    )
    assert "1500ms" in cell.error["evalue"] or "Timed out" in cell.error["evalue"], cell.error["evalue"]
    two.run("%dist_restart -p")


ANSWERS_LATE = """
import time
from nbdist.cluster.mending import Mending

def late(self, name, enter_group=Mending.enter_group):
    number = enter_group(self, name)
    time.sleep(1)
    return number

Mending.enter_group = late
"""
AT_ONCE = "Mending.enter_group = late.__defaults__[0]"


@pytest.mark.parametrize("answers", ["at once", "late"])
def test_stop_ends_the_wait_for_a_worker_that_does_not_form_the_group(two, answers, request):
    """Also if it comes before the notebook has answered with the group's number."""
    if answers == "late":
        two.run(ANSWERS_LATE)
        request.addfinalizer(lambda: two.run(AT_ONCE))
    cell = two.send("%%remote 0\ndist.destroy_process_group()\nprint('waits')\ndist.init_process_group('gloo')")
    two.until(lambda: "waits" in cell.stdout)
    two.interrupt()
    two.finish(cell)
    assert cell.error["ename"] == "KeyboardInterrupt", cell.error
    two.run(f"%%remote\n{SUM}")


INTERRUPTED_AT_A_START = """
import threading

def interrupted(self, start=threading.Thread.start):
    start(self)
    if self.name == "nbdist-forming":
        threading.Thread.start = start
        raise KeyboardInterrupt

threading.Thread.start = interrupted
dist.destroy_process_group()
dist.init_process_group('gloo')
"""


def test_an_interrupt_leaves_no_thread_that_spoils_the_next_group(two):
    """A thread that still watched the first forming would connect to the next group in its members' place."""
    cell = two.run(f"%%remote 0\n{INTERRUPTED_AT_A_START}", check=False)
    assert cell.error["ename"] == "KeyboardInterrupt", cell.error
    two.run(f"%%remote\n{SUM}")
    two.run("%%remote 0\nassert not [each for each in threading.enumerate() if each.name == 'nbdist-forming']")


def test_a_worker_that_dies_while_the_others_wait_for_it_to_form_the_group_ends_their_wait(two):
    two.run(
        "%%remote\nimport os, signal\ndist.destroy_process_group()\n"
        "def form():\n"
        "    if rank == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    dist.init_process_group('gloo')\n"
        "dist.init_process_group('gloo')"
    )
    cell = two.run("%%remote\ndist.destroy_process_group()\nform()", check=False)
    assert "worker1" in cell.error["evalue"]
    assert "was killed" in cell.error["evalue"]
    two.run("%dist_restart")
    two.run(f"%%remote\n{SUM}")


def test_a_worker_that_fails_before_it_forms_the_group_leaves_the_next_cell_a_group(two):
    code = "dist.destroy_process_group()\nif rank == 1: raise ValueError('before')\ndist.init_process_group('gloo')"
    two.run(f"%%remote -t 2\n{code}", check=False)
    two.run(f"%%remote\n{SUM}")
    two.run(f"%%remote\n{SCRIPT.read_text()}")


def test_spawn_says_what_to_write_instead(two):
    code = "import torch.multiprocessing as mp\ndef train(rank, size): ...\nmp.spawn(train, args=(2,), nprocs=2)"
    cell = two.run(f"%%remote\n{code}", check=False)
    assert "call `train(rank, *args)` in a cell with %%remote" in cell.error["evalue"]
    cell = two.run(code, check=False)
    assert "start them with `%dist_init -n 4`, and call `train(rank, *args)`" in cell.error["evalue"]


def test_spawn_of_a_function_in_a_file_is_torchs_own(two, tmp_path):
    (tmp_path / "in_a_file.py").write_text(
        "import os\ndef note(index, folder): open(f'{folder}/{index}', 'w').close()\n"
    )
    two.run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport in_a_file, torch.multiprocessing as mp\n"
        f"mp.spawn(in_a_file.note, args=({str(tmp_path)!r},), nprocs=1)"
    )
    assert (tmp_path / "0").exists()


def test_scripts_run_again_and_again_where_the_group_is_theirs_alone():
    with nbdist.Cluster(2, backend="none", timeout=60) as cluster:
        for _ in range(10):
            cluster.execute(SCRIPT.read_text(), timeout=60)
        cluster.execute(f"assert not dist.is_initialized(); dist.init_process_group('gloo'); {SUM}", timeout=60)
        with pytest.raises(Exception, match="initialize the default process group twice"):
            cluster.execute("dist.init_process_group('gloo')", timeout=60)
        cluster.execute("dist.destroy_process_group()", timeout=60)
        cluster.execute("dist.init_process_group('gloo', rank=0, world_size=1); dist.barrier()", 0, timeout=60)


def test_scripts_run_again_and_again_where_the_store_is_in_the_notebook():
    with nbdist.Cluster(2, host="127.0.0.1", timeout=60) as cluster:
        for _ in range(3):
            cluster.execute(SCRIPT.read_text(), timeout=60)
        cluster.execute(f"dist.destroy_process_group(); dist.init_process_group(); {SUM}", timeout=60)


# -- the numbers of groups ------------------------------------------------------------------------


class Stores:
    """Stores of groups that only note what is done to them."""

    def __init__(self) -> None:
        self.made, self.ended = set[int](), dict[int, str]()

    def make(self, generation: int) -> None:
        self.made.add(generation)

    def end(self, generation: int, why: str) -> None:
        assert generation in self.made
        self.ended[generation] = why

    def remove(self, generation: int) -> None:
        self.made.remove(generation)


def test_each_worker_enters_a_group_once_and_older_stores_go_when_all_have_entered():
    stores = Stores()
    generations = Generations(stores)
    assert generations.begin() == 1
    assert generations.enter("a", "ab") == 2
    assert stores.made == {1, 2}
    assert generations.enter("b", "ab") == 2
    assert stores.made == {2}
    assert generations.enter("b", "ab") == 3
    assert not stores.ended
    assert generations.enter("b", "ab") == 4
    assert stores.ended.keys() == {3}
    assert generations.enter("a", "ab") == 4
    assert stores.made == {4}


def test_a_group_that_has_ended_is_entered_by_nobody_else():
    stores = Stores()
    generations = Generations(stores)
    assert generations.enter("a", "abc") == 1
    generations.end(1, "a has failed")
    generations.end(7, "there is none")
    assert generations.enter("b", "abc") == 2
    generations.lose("a", "a has died")
    assert stores.ended == {1: "a has failed", 2: "a has died"}
    assert generations.enter("c", "abc") == 3
    generations.lose("c", "c has died")
    assert 3 not in stores.ended, "c has entered, and the others learn of its death from their agents"
    assert generations.begin() == 4
    assert 3 in stores.ended
