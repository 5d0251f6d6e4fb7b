"""A cell that ends although the workers have not called the same collectives says so; others say nothing."""

import re

import pytest
from helpers.notebook.frontend import Notebook

ANOTHER_DTYPE = """
x = torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32)
dist.all_reduce(x)"""
ONE_TOO_FEW = """
if rank != 2:
    work = dist.all_reduce(torch.ones(2), async_op=True)"""
MORE_THAN_THE_RECORDER_KEEPS = f"""
for step in range(3000): dist.all_reduce(torch.ones(1))
{ONE_TOO_FEW}"""
AN_ERROR = """
dist.barrier()
if rank == 1: raise ValueError
work = dist.all_reduce(torch.ones(1), async_op=True)"""
A_TIMEOUT = """
from datetime import timedelta
group = dist.new_group(timeout=timedelta(seconds=2))
if rank != 1: dist.all_reduce(torch.ones(1), group=group)"""
ANOTHER_ROOT = """
work = dist.broadcast(torch.ones(2), src=2 if rank == 0 else 1, async_op=True)"""
ANOTHER_DESTINATION = """
dist.reduce(torch.ones(2), dst=rank // 2)"""  # all end, worker1 without its sum
FAULTS = {
    # The program, and what its cell tells.
    ANOTHER_DTYPE: r"#1 of the default group is not the same collective everywhere: "
    r"worker0,2 all_reduce float32\[4\] \((In\[\d+\]:3)\), worker1 all_reduce int32\[4\] \(\1\)\n",
    ONE_TOO_FEW: r"worker2 has not come to all_reduce #1 \(In\[\d+\]:3\), float32\[2\], default group; "
    r"the next collective there will be taken for it\n",
    ANOTHER_ROOT: r"#1 of the default group is not the same collective everywhere: worker0 broadcast float32\[2\] from "
    r"rank 2 \((In\[\d+\]:2)\), worker1,2 broadcast float32\[2\] from rank 1 \(\1\)\n",
    ANOTHER_DESTINATION: r"#1 of the default group is not the same collective everywhere: worker0,1 reduce float32\[2\]"
    r" to rank 0 \((In\[\d+\]:2)\), worker2 reduce float32\[2\] to rank 1 \(\1\)\n",
    AN_ERROR: r"worker1 has not come to all_reduce #2 \(In\[\d+\]:4\), float32\[1\], default group\n",
    A_TIMEOUT: r"worker1 has not come to all_reduce #1 \(In\[\d+\]:4\), float32\[1\], group of worker0-2\n",
    MORE_THAN_THE_RECORDER_KEEPS: r"worker2 has not come to all_reduce #3001 \(In\[\d+\]:5\), .*\n",
}

UNEVEN_RANKS = """
import time
time.sleep(0.2 * rank)
for step in range(3): dist.all_reduce(torch.ones(1))"""
SUBGROUPS = """
left, right = dist.new_group([0, 1]), dist.new_group([1, 2])
for pair in [[left] * 2, [left, left, right], [right]][rank]:
    dist.all_reduce(torch.ones(2), group=pair)"""
ASYNCHRONOUS = """
works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(5)]
for work in works: work.wait()"""
OBJECTS = """
dist.broadcast_object_list([rank, 'x' * 100 * rank], src=0)
dist.all_gather_object([None] * 3, 'y' * 1000 * rank)"""
UNEVEN_SIZES = """
three = [torch.ones(2) for _ in range(3)] if rank == 0 else None
dist.gather(torch.ones(2), three)
dist.scatter(torch.ones(2), three)
sizes = [[1, 2, 3], [2, 1, 1], [3, 1, 1]]
received = [each[rank] for each in sizes]
dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sizes[rank])), received, sizes[rank])
if rank == 0: dist.send(torch.ones(3), 1)
if rank == 1: dist.recv(torch.ones(3), 0)"""
CHANGING_ROOTS = """
import time
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
for root in (0, 1, 2, 1):
    time.sleep(0.1 * rank)
    parts = [torch.ones(2)] * 3 if rank == root else None
    dist.broadcast(torch.ones(2), src=root)
    dist.scatter(torch.ones(2), parts, group_src=root)
    dist.reduce(torch.ones(2), root)
    dist.gather(torch.ones(2), parts, root)
    dist.gather_object(rank, [None] * 3 if rank == root else None, root)
    dist.broadcast_object_list([rank], group_src=root)
    dist.scatter_object_list([None], [1, 2, 3] if rank == root else None, root)
    for first, pair in enumerate(pairs):
        if rank in (first, first + 1):
            dist.broadcast(torch.ones(1), group=pair, group_src=root % 2)
try: dist.broadcast(torch.ones(1), src=7)
except ValueError: pass
try: dist.broadcast([], src=rank)
except TypeError: pass
mesh = init_device_mesh('cpu', (3,))
for placement in (Replicate(), Shard(0)): distribute_tensor(torch.ones(6), mesh, [placement])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(2))
for step in range(3): model(torch.ones(2, 2)).sum().backward()"""
UNEVEN_INPUTS = """
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(2, 2))
with Join([model]):
    for step in range(2 + rank): model(torch.ones(1, 2)).sum().backward()"""
A_THREAD = """
import threading, time
group = dist.new_group()
def run():
    for step in range(2):
        time.sleep(0.3 * rank)
        dist.all_reduce(torch.ones(1), group=group)
running = threading.Thread(target=run)
running.start()"""
HEALTHY = (UNEVEN_RANKS, SUBGROUPS, ASYNCHRONOUS, OBJECTS, UNEVEN_SIZES, CHANGING_ROOTS, UNEVEN_INPUTS, A_THREAD)


@pytest.fixture(scope="module")
def shared():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 3 -t 60")
        yield notebook


@pytest.fixture
def notebook(shared):
    """Three idle workers in a process group that has done nothing."""
    shared.run("%dist_restart -p")
    return shared


@pytest.mark.parametrize("program", FAULTS)
def test_a_difference_is_told_once(notebook, program):
    assert re.fullmatch(FAULTS[program], notebook.run(f"%%remote{program}", check=False).stderr)
    assert notebook.run("%%remote\nlater = dist.new_group(); dist.barrier(later)").stderr == ""


@pytest.mark.parametrize("program", HEALTHY)
def test_a_healthy_program_is_told_nothing(notebook, program):
    assert "collective" not in notebook.run(f"%%remote{program}", check=False).stderr
    assert notebook.run("%%remote\nif 'running' in globals(): running.join()").stderr == ""


def test_cells_for_some_workers_are_not_compared_with_what_others_have_not_run(notebook):
    assert notebook.run("%%remote 0\nwork = dist.all_reduce(torch.ones(1), async_op=True)").stderr == ""
    assert notebook.run("%%remote 1,2\ndist.all_reduce(torch.ones(1))").stderr == ""
    assert notebook.run("%%remote\nrank").stderr == ""


def test_what_a_broken_group_refuses_is_not_told(notebook):
    waiting = notebook.send("%%remote 0 --progress-after 1\ndist.all_reduce(torch.ones(1))")
    notebook.until(lambda: waiting.line)
    notebook.interrupt()
    notebook.finish(waiting)
    for _ in range(2):
        cell = notebook.run("%%remote\nif rank == 0:\n    dist.all_reduce(torch.ones(1))", check=False)
        assert cell.error["ename"] == "GroupError"
        assert "all_reduce #1" not in cell.stderr
    said = "worker0-2: an interrupt has broken off a process group: `%dist_restart -p` forms all anew"
    assert said in notebook.run("%dist_status").result
    notebook.run("%dist_restart -p")
    assert "broken" not in notebook.run("%dist_status").result


def test_who_is_not_in_a_group_is_told_at_the_users_line(notebook):
    cell = notebook.run("%%remote\npair = dist.new_group([0, 1])\nfor step in range(3):\n    dist.barrier(pair)")
    told = "worker2 is not in the group of this dist.barrier(), and takes no part in it"
    assert cell.stderr == f"[worker2] {cell.name}:4: UserWarning: {told}\n"


def test_the_same_fault_is_told_again_in_a_new_group(notebook):
    told = "worker2 has not come to all_reduce #1 "
    assert notebook.run(f"%%remote{ONE_TOO_FEW}").stderr.startswith(told)
    notebook.run("%dist_restart -p")
    assert notebook.run(f"%%remote{ONE_TOO_FEW}").stderr.startswith(told)
