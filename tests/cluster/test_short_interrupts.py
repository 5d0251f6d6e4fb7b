"""Ctrl-C in a wait of nbdist's own shows the user's line, and none of nbdist's."""

import time

import pytest
from helpers.notebook.frontend import Notebook


@pytest.fixture(scope="module")
def notebook():
    with Notebook() as notebook:
        yield notebook


def press_stop(notebook, cell, then=0.5):
    """Press stop ``then`` seconds after the cell has printed something, when it waits."""
    notebook.until(lambda: cell.stdout)
    time.sleep(then)  # of the wait itself nothing tells; an interrupt before it is as short
    notebook.interrupt()
    notebook.finish(cell)


def expect_short(cell, line):
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert line in cell.traceback
    assert len(cell.traceback.splitlines()) < 15, cell.traceback
    for internals in ("/nbdist/", "threading.py", "concurrent"):
        assert internals not in cell.traceback


def test_while_workers_are_awaited(notebook, tmp_path):
    line = f"%dist_init -n 1 --launcher join --host 127.0.0.1 --invitation {tmp_path}/invitation"
    cell = notebook.send(line)
    press_stop(notebook, cell)
    assert "Waiting for 1 worker" in cell.stdout
    expect_short(cell, "'dist_init'")


def test_while_a_process_group_waits_for_a_busy_worker(notebook):
    notebook.run("%dist_init -n 2")
    notebook.run("%%remote 0 -a\nimport time; time.sleep(600)")
    for code in (
        "print('begun', flush=True)\n%dist_restart -p",
        "print('begun')\nCluster.current.rebuild_process_group()",
    ):
        cell = notebook.send(f"from nbdist import Cluster\n{code}")
        press_stop(notebook, cell)
        expect_short(cell, code.splitlines()[1].removeprefix("%").removesuffix(" -p"))
    notebook.run("Cluster.current.interrupt()")


def test_while_a_watch_pauses_a_backward_pass(notebook):
    notebook.run("def double(x): return x * 2")
    cell = notebook.send(
        "%%watch --paused\nx = torch.ones(2, requires_grad=True)\nprint('begun', flush=True)\n"
        "with dist_autograd.context() as context:\n"
        "    loss = rpc.rpc_sync('worker1', double, args=(x,)).sum()\n"
        "    dist_autograd.backward(context, [loss])"
    )
    press_stop(notebook, cell, then=1.5)
    expect_short(cell, "dist_autograd.backward(context, [loss])")
