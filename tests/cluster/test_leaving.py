"""However a notebook ends, nothing of its cluster is left: no process, socket, segment, file (G5)."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from helpers.notebook.frontend import Notebook

RUNTIME = Path(os.environ["NBDIST_RUNTIME_DIR"])

STATES = {
    "idle": "pass",
    "asleep": "import time; time.sleep(600)",
    "in C, holding the GIL": "import ctypes; ctypes.PyDLL(None).sleep(600)",
    "in a collective": "if rank == 0: dist.all_reduce(torch.ones(1))",
    "deaf": "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(600)",
    "with children": "import subprocess, time\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)",
}


def family(pid):
    """A process and all that came from it, by pid and start, so that a reused pid is somebody else."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def traces():
    found = {path for pattern in ("cluster-*", "agent-*") for path in RUNTIME.glob(pattern)}
    return found | {path for path in Path("/dev/shm").glob("*") if path.name.startswith(("nbdist", "torch_"))}


def assert_gone(processes, before, seconds=5.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        living = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not living and not traces() - before:
            return
        time.sleep(0.05)
    raise AssertionError(f"left after {seconds} s: {living}, {traces() - before}")


@pytest.mark.parametrize(
    "state", [pytest.param(name, marks=pytest.mark.soak if name in ("idle", "asleep") else []) for name in STATES]
)
def test_a_killed_notebook_leaves_nothing(state):
    before = traces()
    notebook = Notebook()
    try:
        notebook.run("%dist_init -n 2")
        notebook.run(f"%%remote -a\n{STATES[state]}")
        time.sleep(0.5)
        processes = family(notebook.pid)
        assert len(processes) >= 4  # the notebook, the zygote, two workers
        os.kill(notebook.pid, signal.SIGKILL)
        assert_gone(processes, before)
    finally:
        notebook.kill()


@pytest.mark.parametrize("after", [0.5, 1.5, 2.1, *(pytest.param(n, marks=pytest.mark.soak) for n in (0.05, 1.0, 1.8))])
def test_a_notebook_killed_while_workers_start_leaves_nothing(after):
    before = traces()
    notebook = Notebook()
    try:
        notebook.send("%dist_init -n 2")
        time.sleep(after)
        processes = family(notebook.pid)
        os.kill(notebook.pid, signal.SIGKILL)
        assert_gone(processes, before)
    finally:
        notebook.kill()


def test_a_notebook_killed_before_it_had_a_cluster_leaves_nothing():
    before = traces()
    notebook = Notebook()
    try:
        processes = family(notebook.pid)
        assert len(processes) >= 2  # the extension has a process import what workers will need
        os.kill(notebook.pid, signal.SIGKILL)
        assert_gone(processes, before)
    finally:
        notebook.kill()


def test_an_unloaded_extension_leaves_nothing():
    before = traces()
    with Notebook() as notebook:
        notebook.run("%dist_init -n 1 --backend none")
        processes = family(notebook.pid)[1:]
        notebook.run("%unload_ext nbdist")
        assert_gone(processes, before)
        assert notebook.run("%dist_status", check=False).result is None
        notebook.run("%load_ext nbdist")
        notebook.run("%dist_init -n 1 --backend none")
        assert notebook.run("%%remote\nprint(1)").stdout == "1\n"


def test_a_restarted_kernel_leaves_nothing_and_can_start_anew():
    before = traces()
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2")
        processes = family(notebook.pid)[1:]
        notebook.restart()
        assert_gone(processes, before)
        notebook.run("%load_ext nbdist")
        notebook.run("%dist_init -n 2")
        assert notebook.run("%%remote\nprint(world_size)").stdout == "[worker0,1] 2\n"
        processes = family(notebook.pid)[1:]
        assert "0 processes left" in notebook.run("%dist_shutdown").stdout
        assert_gone(processes, before)


def test_start_interrupted_leaves_nothing_and_can_be_repeated():
    before = traces()
    with Notebook() as notebook:
        for after in (0.3, 1.5):
            cell = notebook.send("%dist_init -n 2")
            time.sleep(after)
            processes = family(notebook.pid)[1:]
            notebook.interrupt()
            # Not for the reply: for some ms after a cell's code ends, ipykernel drops it at an interrupt.
            notebook.until(lambda cell=cell: cell.idle, 60, "the end of the start")
            if cell.error is not None:
                assert cell.error["ename"] == "KeyboardInterrupt"
            notebook.run("%dist_shutdown")
            assert_gone(processes, before)
        notebook.run("%dist_init -n 2")
        assert notebook.run("%%remote\nprint(1)").stdout == "[worker0,1] 1\n"


def test_two_notebooks_never_touch_each_other():
    with Notebook() as one, Notebook() as other:
        one.run("%dist_init -n 2")
        other.run("%dist_init -n 2")
        one.run("%%remote\nx = 'one'")
        other.run("%%remote\nx = 'other'")
        assert one.run("%remote all x").result == "['one', 'one']"
        os.kill(one.pid, signal.SIGKILL)
        assert other.run("%remote all x").result == "['other', 'other']"
        assert other.run("rpc.rpc_sync('worker1', len, args=([1, 2],))").result == "2"
        assert (
            other.run("%%remote\nt = torch.ones(1); dist.all_reduce(t); print(t.item())").stdout == "[worker0,1] 2.0\n"
        )


def test_workers_that_are_not_ready_in_time_are_named_and_leave_nothing():
    before = traces()
    with Notebook() as notebook:
        cell = notebook.run("%dist_init -n 2 -t 0.02", check=False)
        assert cell.error["ename"] == "StartError"
        assert "not all workers were ready within 0.02 s: worker0 (" in cell.error["evalue"]
        assert_gone(family(notebook.pid)[1:], before)
        notebook.run("%dist_init -n 2")
        assert notebook.run("%%remote\nprint(1)").stdout == "[worker0,1] 1\n"
