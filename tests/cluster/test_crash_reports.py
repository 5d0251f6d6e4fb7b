"""What a process wrote before it died is cut to the lines that say why."""

import os
import re
import threading

import pytest
from helpers.notebook.frontend import Notebook

from nbdist.cluster.kernels.crash_reports import lines_that_say_why, share_expected
from nbdist.cluster.kernels.sightings import Sighting, say_last_seen
from nbdist.cluster.processes.last_operations import LastOperations, split_off
from nbdist.torch_private import torch_version

HAS_HOOKS = torch_version() >= (2, 14)

PYTHONS = threading.__file__
CELL = "/tmp/ipykernel_7/123.py"
PYTHON = f"""warning: something
Fatal Python error: Segmentation fault

Thread 0x01 (most recent call first):
  File "{PYTHONS}", line 327 in wait
  File "{PYTHONS}", line 1002 in _bootstrap

Current thread 0x02 (most recent call first):
  File "{PYTHONS}", line 519 in string_at
  File "{CELL}", line 3 in f
  File "{CELL}", line 5 in <module>

Extension modules: numpy, torch (total: 2)
"""
GLOO = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 16 vs 8. Received data size doesn't match.
"""
# gloo aborts. SIGSEGV, sometimes: Python writes the frames of all threads then, also of those that run.
ENDED = re.compile(r"worker1 was killed by SIG(ABRT|SEGV)")
SAID = "gloo: the workers gave tensors of different sizes to a collective: this one expected 8 bytes and was sent 16"
EARLIER = re.escape("all_reduce float32[9] (In[7]:9), all_reduce float32[8] (In[7]:8)")
FRAMES = [f'  File "{CELL}", line 3 in f', f'  File "{CELL}", line 5 in <module>']


def test_a_crash_of_python_is_told_with_the_users_lines():
    assert lines_that_say_why(PYTHON, ["other"]) == ["Fatal Python error: Segmentation fault", *FRAMES]


@pytest.mark.parametrize("at", [0, 36, PYTHON.index(FRAMES[1]), len(PYTHON) - 40, len(PYTHON)])
def test_gloos_end_is_explained_wherever_its_text_stands(at):
    lines = lines_that_say_why(PYTHON[:at] + GLOO + PYTHON[at:], [])
    assert SAID in lines
    assert lines[-2:] == FRAMES
    assert not any("Extension" in line for line in lines)
    assert share_expected("\n".join(lines)) == 0.5
    assert share_expected("killed") is None


def test_without_a_crash_the_last_lines_count_and_else_those_of_the_cell():
    assert lines_that_say_why("\n".join("abcdefg"), []) == list("cdefg")
    assert lines_that_say_why("\n\n", ["said in the cell"]) == ["said in the cell"]


def test_where_a_worker_was_seen_last_is_told_with_the_growth_of_its_memory():
    call = "dist.barrier()", "In[3]:4"
    seen = [Sighting(1.0, *call, 50), Sighting(10.0, *call, 2_000_000_000), Sighting(14.0, *call, 5_000_000_000)]
    assert say_last_seen(seen[1:2], 11.4) == "it was seen last in dist.barrier(), In[3]:4, 1 s before, with 2.0 GB"
    assert say_last_seen(seen, 64.0).endswith(", with 5.0 GB, 3.0 GB more than 4 s earlier")
    assert say_last_seen(seen[:1], 64.0) == say_last_seen([], 0.0) == ""
    assert say_last_seen([Sighting(1.0, *call, 0)], 3.0) == "it was seen last in dist.barrier(), In[3]:4, 2 s before"


def test_the_last_operations_stand_in_the_memory_that_survives():
    kept = LastOperations()
    try:
        for number in range(20):
            kept.note(1000.0 + number, f"all_reduce float32[{number // 2}] (In[7]:{number // 2})".encode())
        kept.note(1021.0, b"x" * 1000)  # cut, and the one before stays whole
        left = os.pread(kept.file, 1 << 16, 0).decode()
    finally:
        os.close(kept.file)
    assert len(left) <= 4096
    crash = f"{PYTHON}{GLOO}"
    rest, said = split_off(f"{crash}{left}", 1021.4)  # as the zygote appends it
    assert rest == crash.strip()
    assert re.fullmatch(rf"it called last: x+, 0 s before, with [\d.]+ [MG]B; before that {EARLIER}", said), said
    assert split_off("all is well\n", 0.0) == ("all is well", "")
    assert split_off("\n@nbdist-operation 3000 0 barrier (In[7]:12)  ", 5.0)[1] == (
        "it called last: barrier (In[7]:12), 2 s before"
    )


def test_a_forked_process_notes_its_operations_elsewhere():
    kept = LastOperations()
    try:
        kept.note(1000.0, b"all_reduce (In[7]:1)")
        child = os.fork()
        if not child:
            kept.note(1001.0, b"barrier (In[7]:2)")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        left = os.pread(kept.file, 1 << 16, 0).decode()
    finally:
        os.close(kept.file)
    assert "all_reduce" in left
    assert "barrier" not in left


# -- with workers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notebook():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 3 -t 30")
        yield notebook


def test_a_receiver_that_gloo_ends_says_who_gave_what_and_dies_once(notebook):
    code = "pair = dist.new_group([0, 1])\nif rank < 2: dist.broadcast(torch.ones(4 - 2 * rank), src=0, group=pair)"
    cell = notebook.run(f"%%remote\n{code}", check=False)
    told = "\n".join(cell.error["traceback"])
    assert SAID in told
    assert f"Cell {cell.name} on worker1, line 3" in told
    own = "" if HAS_HOOKS else "; of worker1, its own record is lost"
    given = f"broadcast float32[4] from rank 0 ({cell.name}:3)"
    assert cell.stderr == f"last in the group of worker0,1: worker0 {given} (#1){own}\n"
    assert (f"it called last: broadcast float32[2] ({cell.name}:3), " in told) == HAS_HOOKS
    for question in ("%remote all rank", "%dist_diff rank"):
        found = notebook.run(question)
        assert found.stdout == "worker1 is lost, and left out.\n"
        assert "gloo" not in found.result
    assert notebook.run("%remote all rank").result == "[0, 2]"
    again = notebook.run("%%remote\nrank", check=False).error["evalue"]
    assert ENDED.search(again)
    assert "gloo" not in again
    assert SAID in notebook.run("%dist_log worker1").stdout
    assert notebook.run("%dist_restart").error is None
    assert notebook.run("%remote all rank").result == "[0, 1, 2]"


def test_the_worker_that_gave_another_size_is_named_and_not_the_one_that_gloo_ends(notebook):
    cell = notebook.run("%%remote\ndist.all_reduce(torch.ones(1500 if rank == 2 else 1000))", check=False)
    assert ENDED.search("\n".join(cell.error["traceback"]))
    assert cell.stderr.endswith(
        "worker2 gave another size than all others: worker1, which gloo ended, gave the same as the rest\n"
    ), cell.stderr
    notebook.run("%dist_restart")


def test_a_worker_that_is_killed_was_seen_at_a_line_with_its_memory(notebook):
    code = """import os, signal, time
kept = []
def load():
    for step in range(8 if rank == 2 else 0):
        kept.append(torch.ones(25_000_000))
        time.sleep(0.5)
    if rank == 2: os.kill(os.getpid(), signal.SIGKILL)
load()"""
    cell = notebook.run(f"%%remote\n{code}", check=False)
    told = (
        rf"worker2 was killed by SIGKILL \(out of memory, or killed by hand\)\n"
        rf"it was seen last in .*, {re.escape(cell.name)}:[67], \d s before, with \S+ [MG]B, "
        r"\S+ MB more than \d s earlier\n"
        r"(it called last: .*\n)?"  # in an earlier cell
        r"`%dist_restart worker2` starts it again"
    )
    assert re.search(told, "\n".join(cell.error["traceback"])), cell.error
    assert "it was seen last in" in notebook.run("%dist_log worker2").stdout
    notebook.run("%dist_restart")


@pytest.mark.skipif(not HAS_HOOKS, reason="torch calls no hooks")
@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "os.abort()"])
def test_what_a_worker_was_about_to_do_survives_it(notebook, how):
    code = f"""import os, signal, threading
if rank == 1:
    threading.Timer(1, lambda: {how}).start()
    dist.broadcast(torch.ones(2, 5), src=1)
    dist.recv(torch.ones(3), src=0)
else:
    dist.broadcast(torch.ones(2, 5), src=1)
dist.barrier()"""
    cell = notebook.run(f"%%remote\n{code}", check=False)
    told = (
        rf"it called last: recv float32\[3\] \({re.escape(cell.name)}:6\) from rank 0, "
        r"\d+ s before, with [\d.]+ [MG]B; "
        rf"before that broadcast float32\[2, 5\] \({re.escape(cell.name)}:5\)"
    )
    assert re.search(told, "\n".join(cell.error["traceback"])), cell.error
    assert "its own record is lost" not in cell.stderr
    assert re.search(told, notebook.run("%dist_log worker1").stdout)
    notebook.run("%dist_restart")


@pytest.mark.skipif(not HAS_HOOKS, reason="torch calls no hooks")
def test_a_bucket_of_ddp_is_told_with_its_line(notebook):
    code = """import os, signal
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(4, 4))
loss = model(torch.ones(2, 4)).sum()
loss.backward()
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()"""
    cell = notebook.run(f"%%remote\n{code}", check=False)
    told = "\n".join(cell.error["traceback"])
    assert f"it called last: all_reduce ({cell.name}:6), " in told, told
    notebook.run("%dist_restart")
