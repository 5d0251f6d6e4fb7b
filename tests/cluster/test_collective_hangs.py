"""The line below a cell that hangs in a collective names who is missing, or what the members do differently."""

import os
import re
import signal

import pytest
from helpers.notebook.frontend import Notebook

DDP = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))
for step in range(3 if rank != 1 else 2):
    model(torch.ones(2, 4)).sum().backward()"""
FSDP = """
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 3))
for layer in model:
    fully_shard(layer)
fully_shard(model)
for step in range(3 if rank != 1 else 2):
    model(torch.ones(2, 6)).sum().backward()"""
MESH = """
from torch.distributed.device_mesh import init_device_mesh
groups = [dist.new_group([0, 1], group_desc='pair'), dist.new_group([1, 2])]
if rank:
    dist.all_reduce(torch.ones(3), group=groups[1])
    dist.all_reduce(torch.ones(3), group=groups[1] if rank == 2 else groups[0])"""
WAITS = {
    # The program, and the line below its cell, after the first seconds.
    "one computes": (
        "if rank == 1:\n    while True: pass\ndist.all_reduce(torch.ones(1024))",
        r"worker1 has not come to all_reduce #1 \(In\[\d+\]:4\), float32\[1024\], default group: "
        r"worker0,2 wait in dist\.all_reduce\(\), In\[\d+\]:4, \d+ s; worker1 computes at In\[\d+\]:3",
    ),
    "one has ended": (
        "for step in range(3):\n    dist.all_reduce(torch.ones(2))\nif rank != 2: dist.barrier()",
        r"worker2 has not come to barrier #4 \(In\[\d+\]:4\), default group: "
        r"worker0,1 wait in dist\.barrier\(\), In\[\d+\]:4, \d+ s; worker2 is through with this cell",
    ),
    "asynchronous": (
        "if rank:\n    work = dist.all_reduce(torch.ones(5), async_op=True)\n    work.wait()",
        r"worker0 has not come to all_reduce #1 \(In\[\d+\]:3\), float32\[5\], default group: "
        r"worker1,2 wait in work\.wait\(\), In\[\d+\]:4, \d+ s; worker0 is through with this cell",
    ),
    "two groups": (
        MESH,
        r"worker0 has not come to all_reduce #1 \(In\[\d+\]:7\), float32\[3\], group 'pair'; "
        r"worker1 has not come to all_reduce #2 \(In\[\d+\]:7\), float32\[3\], group of worker1,2: .*",
    ),
    "DDP": (
        DDP,
        r"worker1 has not come to all_reduce #\d+ \(In\[\d+\]:6\), float32\[30\], default group, for the gradients "
        r"of 1\.bias to 0\.weight: worker0,2 wait in Tensor\.backward\(\), In\[\d+\]:6, \d+ s; worker1 is through .*",
    ),
    "FSDP2": (
        FSDP,
        r"worker1 has not come to all_gather\w+ #\d+ \(In\[\d+\]:9\), float32\[14\], default group, for module 0: "
        r"worker0,2 wait in model\(torch\.ones\(2, 6\)\)\.sum\(\)\.backward\(\), In\[\d+\]:9, \d+ s; .*",
    ),
}
DIFFERENCES = {
    # The program, and the line below its cell, after the first look.
    "kind": (
        "x = torch.ones(4)\nif rank == 1:\n    dist.broadcast(x, 0)\nelse:\n    dist.all_reduce(x)",
        r"#1 of the default group is not the same collective everywhere: worker0,2 all_reduce float32\[4\] "
        r"\(In\[\d+\]:6\), worker1 broadcast float32\[4\] from rank 0 \(In\[\d+\]:4\)",
    ),
    "shape": (
        "dist.all_reduce(torch.ones(4 if rank == 1 else 2))",
        r"#1 of the default group is not the same collective everywhere: worker0,2 all_reduce float32\[2\] "
        r"\(In\[\d+\]:2\), worker1 all_reduce float32\[4\] \(In\[\d+\]:2\)",
    ),
    "source": (
        "dist.broadcast(torch.ones(3), src=1 if rank == 1 else 0)",
        r"#1 of the default group is not the same collective everywhere: worker0,2 broadcast float32\[3\] from rank 0 "
        r"\(In\[\d+\]:2\), worker1 broadcast float32\[3\] from rank 1 \(In\[\d+\]:2\)",
    ),
    "source in a group": (
        "pair = dist.new_group([1, 2], group_desc='pair')\n"
        "if rank: dist.scatter(torch.ones(2), [torch.ones(2)] * 2, group=pair, group_src=rank - 1)",
        r"#1 of the group 'pair' is not the same collective everywhere: worker1 scatter float32\[2\] from rank 1 "
        r"\(In\[\d+\]:3\), worker2 scatter float32\[2\] from rank 2 \(In\[\d+\]:3\)",
    ),
    "destination": (
        "dist.barrier()\ndist.gather_object('x', [None] * 3 if rank != 1 else None, dst=rank // 2 * 2)",
        r"#3 of the default group is not the same collective everywhere: .*",
    ),
    "destination of a sum": (
        "x = torch.ones(2)\nfor dst in (0, 1 if rank == 2 else 2): dist.reduce(x, dst)",
        r"#2 of the default group is not the same collective everywhere: worker0,1 reduce float32\[2\] to rank 2 "
        r"\(In\[\d+\]:3\), worker2 reduce float32\[2\] to rank 1 \(In\[\d+\]:3\)",
    ),
    "order": (
        "x, y = torch.ones(4), torch.ones(2, dtype=torch.int64)\nfor z in (x, y) if rank else (y, x):\n"
        "    dist.all_gather([torch.empty_like(z) for _ in range(3)], z) if z is x else dist.barrier()",
        r"#1 of the default group is not the same collective everywhere: worker0 barrier \(In\[\d+\]:4\), "
        r"worker1,2 all_gather float32\[4\] \(In\[\d+\]:4\)",
    ),
}

UNMATCHED = {
    # The program, and the line below its cell, after the first seconds.
    "recv": (
        "x = torch.ones(4)\nif rank == 0:\n    while True: pass\nif rank == 1: dist.recv(x, 0)",
        r"worker0 has not come to send #1 to worker1 \(recv at In\[\d+\]:5\), float32\[4\], default group: "
        r"worker1 waits in dist\.recv\(src=0\), In\[\d+\]:5, \d+ s; worker0 computes at In\[\d+\]:4; "
        r"worker2 is through with this cell",
    ),
    "send": (
        "x = torch.ones(4)\nfor step in range(3):\n    if rank == 2: dist.send(x, 0)\n"
        "    if rank == 0 and step < 2: dist.recv(x, 2)",
        r"worker0 has not come to recv #3 from worker2 \(send at In\[\d+\]:4\), float32\[4\], default group: .*",
    ),
    "another tag": (
        "x = torch.ones(4)\nif rank == 1: dist.irecv(x, 0, tag=3).wait()\nif rank == 0: dist.send(x, 1, tag=2)",
        r"worker1 has not come to recv #1 from worker0 \(send at In\[\d+\]:4\), float32\[4\], tag 2, default group; "
        r"worker0 has not come to send #1 to worker1 \(irecv at In\[\d+\]:3\), float32\[4\], tag 3, default group: .*",
    ),
    "a group": (
        "pair = dist.new_group([1, 2], group_desc='pair')\nif rank == 2: dist.recv(torch.ones(2), group=pair, src=1)",
        r"worker1 has not come to send #1 to worker2 \(recv at In\[\d+\]:3\), float32\[2\], group 'pair': .*",
    ),
    "batched": (
        "ops = [dist.P2POp(dist.irecv, torch.ones(2), (rank + 1) % 3)]\n"
        "if rank: ops.append(dist.P2POp(dist.isend, torch.ones(2), rank - 1))\n"
        "for work in dist.batch_isend_irecv(ops): work.wait()",
        r"worker0 has not come to send #1 to worker2 \(batch_isend_irecv at In\[\d+\]:4\), float32\[2\], .*",
    ),
}


@pytest.fixture(scope="module")
def shared():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 3 -t 60")
        yield notebook


@pytest.fixture
def notebook(shared):
    """Three idle workers in a process group that works."""
    yield shared
    shared.end_all()


@pytest.mark.parametrize("name", WAITS)
def test_who_has_not_come_is_named(notebook, name):
    code, told = WAITS[name]
    cell = notebook.send(f"%%remote --progress-after 3\n{code}")
    notebook.until(lambda: re.fullmatch(told, cell.line), what=told)


def test_a_stopped_cell_keeps_who_has_not_come(notebook):
    """The line below the cell is gone then, and a saved notebook would not say it."""
    cell = notebook.send("%%remote --progress-after 1\nif rank != 1: dist.all_reduce(torch.ones(5))")
    notebook.until(lambda: "worker1 has not come to all_reduce" in cell.line)
    notebook.interrupt()
    notebook.finish(cell)
    assert "before it was stopped: worker1 has not come to all_reduce #" in cell.traceback


@pytest.mark.parametrize("name", DIFFERENCES)
def test_different_collectives_are_told_at_the_first_look(notebook, name):
    code, told = DIFFERENCES[name]
    cell = notebook.send(f"%%remote --progress-after 600\n{code}")
    notebook.until(lambda: re.fullmatch(told, cell.line), what=told)


@pytest.mark.parametrize("name", UNMATCHED)
def test_who_has_not_sent_or_received_is_named(notebook, name):
    code, told = UNMATCHED[name]
    cell = notebook.send(f"%%remote --progress-after 3\n{code}")
    notebook.until(lambda: re.fullmatch(told, cell.line), what=told)


HEALTHY = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
for schedule in (ScheduleGPipe, Schedule1F1B):
    stage = PipelineStage(torch.nn.Linear(8, 8), rank, world_size, torch.device('cpu'))
    schedule = schedule(stage, 6, loss_fn=torch.nn.functional.mse_loss)
    for step in range(4):
        schedule.step(*[torch.ones(12, 8)] * (rank == 0), **{'target': torch.ones(12, 8)} if rank == 2 else {})
for step in range(30):
    ops = [dist.P2POp(dist.isend, torch.ones(9), (rank + 1) % 3), dist.P2POp(dist.irecv, torch.ones(9), (rank - 1) % 3)]
    for work in dist.batch_isend_irecv(ops): work.wait()
    for other in (1, 2):
        if rank == 0: dist.recv(torch.ones(5), tag=step + 1)
        elif rank == other: dist.send(torch.ones(5), 0, tag=step + 1)
early = dist.irecv(torch.ones(3), (rank - 1) % 3)
dist.all_reduce(torch.ones(3))
dist.isend(torch.ones(3), (rank + 1) % 3).wait()
early.wait()
group = dist.group.WORLD  # its methods, by position and by name, and one that refuses
if rank == 0: group.send([torch.ones(2)], 1, 7).wait(); group.send(tensors=[torch.ones(2)], dstRank=1, tag=8).wait()
if rank == 1: group.recv([torch.ones(2)], 0, tag=7).wait(); group.recv(tensors=[torch.ones(2)], srcRank=0, tag=8).wait()
try: dist.isend(torch.ones(4, 4)[:, 0], (rank + 1) % 3)
except RuntimeError: pass
else: raise AssertionError('gloo sends tensors with gaps')
dist.send_object_list(['x'], 2) if rank == 0 else dist.recv_object_list([None], 0) if rank == 2 else None
"""


COMPARED = """
from msgspec.structs import replace
from nbdist.cluster.group_history import GroupHistory
from nbdist.cluster.partings import find_partings
from nbdist.cluster.worker import flight_recorder
[own] = flight_recorder.read(0, places=True)
told = [None] * 3
dist.all_gather_object(told, [replace(each, waits=True) for each in own.transfers])
groups = {f'worker{who}': [GroupHistory('0', '', [0, 1, 2], transfers=each)] for who, each in enumerate(told)}
print(sum(each.count for each in own.transfers) > 100, [each.text for each in find_partings(groups, list(groups))])
"""


def test_all_transfers_of_healthy_programs_match(notebook):
    notebook.run("%dist_restart -p")  # the counts begin anew
    notebook.run(f"%%remote\n{HEALTHY}")
    assert notebook.run(f"%%remote\n{COMPARED}").stdout == "[worker0-2] True []\n"
    notebook.run("%%remote\nif rank == 1: dist.isend(torch.ones(3), 2)")
    [line] = notebook.run(f"%%remote\n{COMPARED}").stdout.splitlines()
    assert "worker2 has not come to recv #" in line


def test_a_worker_that_was_not_sent_the_cell_is_missing(notebook):
    cell = notebook.send("%%remote 0 --progress-after 3\ndist.all_reduce(torch.ones(1))")
    told = (
        r"worker1,2 have not come to all_reduce #1 \(In\[\d+\]:2\), float32\[1\], default group: "
        r"worker0 waits in dist\.all_reduce\(\), In\[\d+\]:2, \d+ s; worker1,2 are not in this cell"
    )
    notebook.until(lambda: re.fullmatch(told, cell.line), what=told)


def test_survivors_are_not_compared_by_what_they_did_before_a_restart(notebook):
    notebook.run("%%remote\nfor step in range(5): dist.all_reduce(torch.ones(1))")
    notebook.run("%dist_restart 1")
    cell = notebook.send("%%remote --progress-after 3\nif rank != 1: dist.all_reduce(torch.ones(1))")
    told = r"worker1 has not come to all_reduce #1 \(In\[\d+\]:2\), float32\[1\], default group: "
    notebook.until(lambda: re.match(told, cell.line), what=told)


HOLD_THE_GIL = """
import ctypes, sys
if rank == 1:
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the signal that asks for frames cuts one of the sleeps short, and nothing gets between
    for _ in range(12): ctypes.PyDLL(None).sleep(1)
    sys.setswitchinterval(before)
dist.all_reduce(torch.ones(3))"""


@pytest.mark.parametrize("before", [0, 4])
def test_a_worker_that_holds_the_gil_is_missing(notebook, before):
    notebook.run("%dist_restart 2")  # the others' records of earlier groups do not count
    notebook.run(f"%%remote\nfor _ in range({before}): dist.all_reduce(torch.ones(1))")
    cell = notebook.send(f"%%remote --progress-after 3\n{HOLD_THE_GIL}")
    told = (
        rf"worker1 has not come to all_reduce #{before + 1} \(In\[\d+\]:9\), float32\[3\], default group: "
        r"worker0,2 wait in dist\.all_reduce\(\), In\[\d+\]:9, \d+ s; "
        r"worker1 has not released the GIL for \d+ s \(its cell is at In\[\d+\]:7\)"
    )
    notebook.until(lambda: re.fullmatch(told, cell.line), what=told)


def test_a_time_limit_says_it_of_a_worker_that_holds_the_gil(notebook):
    cell = notebook.run(f"%%remote --timeout 2\n{HOLD_THE_GIL}", check=False)
    assert "; worker1 has not come to all_reduce #" in cell.error["evalue"]


def test_a_time_limit_says_it_too(notebook):
    cell = notebook.run("%%remote --timeout 2\nif rank != 1: dist.barrier()", check=False)
    assert cell.error["evalue"].startswith(
        "worker0,2 did not end the cell within 2 s; "
        f"worker1 has not come to barrier #1 ({cell.name}:2), default group; "
    )


def test_the_status_and_the_panel_say_it(notebook):
    cell = notebook.run("%%remote -a\nif rank != 1: dist.barrier()")
    told = f"worker1 has not come to barrier #1 ({cell.name}:2), default group"
    notebook.until(lambda: told in notebook.run("%dist_status").result)
    notebook.run("import nbdist; from nbdist.views.workers.panel import Panel")
    panel = notebook.run("print(Panel(nbdist.Cluster.current))")
    assert told in panel.stdout
    assert "worker0 → worker1" in panel.stdout
    assert "worker2 → worker1" in panel.stdout
    notebook.run("_.cancel()", check=False)
    notebook.run("nbdist.Cluster.current.interrupt()")
    assert cell.idle


def test_a_healthy_program_has_no_line(notebook):
    notebook.run("%%remote\nimport time\nfor step in range(20): dist.all_reduce(torch.ones(1))")
    cell = notebook.run(
        "%%remote --progress-after 600\ntime.sleep(rank)\ndist.all_reduce(torch.ones(1))\ntime.sleep(3)"
    )
    assert cell.line == ""


def test_a_recorder_that_is_off_is_told(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2")
        cell = notebook.send("%%remote --progress-after 2\nif rank: dist.barrier()")
        notebook.until(lambda: cell.line.endswith("=0 has switched off torch's record of collectives"))
        os.kill(notebook.pid, signal.SIGINT)
        notebook.finish(cell)
