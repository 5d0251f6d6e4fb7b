"""A cluster without a notebook: in a script, and under `python -i`."""

import os
import subprocess
import sys
import threading
import time

import pytest
from helpers.waiting import wait_until

import nbdist
from nbdist.cluster.cell_sender import CellSender

SCRIPT = """
import torch
import nbdist
from nbdist.cluster.cell_sender import CellSender
import nbdist.cluster.output.arranger
from nbdist import rpc

nbdist.cluster.output.arranger.FOLD_AFTER = 5  # however slow the machine is

def double(x):
    print("doubling")
    return 2 * x

if __name__ == "__main__":
    with nbdist.Cluster(2, seed=3) as cluster:
        cluster.execute("x = rank + 1; print('rank', rank)")
        print(cluster.pull("x"), cluster.evaluate("x * 10", 1))
        cluster.push({"y": torch.ones(2)}, "worker1")
        print(cluster.evaluate("y.sum().item()", 1))
        print(rpc.rpc_sync("worker0", double, args=(21,)))
        try:
            cluster.execute("1/0", 0)
        except ZeroDivisionError as error:
            print("caught", type(error).__name__, error, [e.worker for e in error.errors])
        cell = cluster.execute("total = torch.tensor([float(rank)]); dist.all_reduce(total); total", block=False)
        cell.wait()
        print(cell.outputs["worker1"][-1]["data"]["text/plain"])
        try:
            cluster.execute("import os; os._exit(4)", 1)
        except nbdist.cluster.errors.CellError as error:
            print("lost:", str(error).splitlines()[0])
        cluster.restart()
        print(cluster.evaluate("rank"))
        pids = [worker.pid for worker in cluster.workers]
    import os
    print("left:", [pid for pid in pids if os.path.exists(f"/proc/{pid}")])
"""


def run(arguments, text=None, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        **options,
    )


def test_a_script_drives_a_cluster(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = run([str(path)])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if "doubling" not in line and not line.startswith("[worker0,1] (")] == [
        "[worker0] rank 0",
        "[worker1] rank 1",
        "[1, 2] 20",
        "2.0",
        "42",
        "caught ZeroDivisionError division by zero ['worker0']",
        "[worker0,1] tensor([1.])",
        "tensor([1.])",
        "lost: worker1 exited with code 4",
        "[0, 1]",
        "left: []",
    ]
    assert "[worker0] doubling" in lines


def test_a_cluster_under_python_i():
    done = run(
        ["-i", "-q"],
        "import nbdist\n"
        "cluster = nbdist.Cluster(1, backend='none')\n"
        "cell = cluster.execute('print(6 * 7)')\n"
        "cluster.evaluate('world_size', 0)\n"
        "exit()\n",
    )
    assert "42" in done.stdout
    assert "1" in done.stdout.splitlines()
    assert done.returncode == 0, done.stderr


def test_a_script_that_ends_without_a_word_leaves_nothing(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import nbdist\n"
        "if __name__ == '__main__':\n"
        "    cluster = nbdist.Cluster(1, backend='none').start()\n"
        "    print(cluster.workers[0].pid, cluster.folder)\n"
    )
    done = run([str(path)])
    pid, folder = done.stdout.split()
    assert not os.path.exists(f"/proc/{pid}")
    assert not os.path.exists(folder)


def test_a_handle_can_be_awaited_when_the_cluster_is_gone_and_by_several(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import asyncio, os, threading\n"
        "import nbdist\n"
        "async def await_it(cell):\n"
        "    await cell\n"
        "if __name__ == '__main__':\n"
        "    with nbdist.Cluster(1, backend='none') as cluster:\n"
        "        cell = cluster.execute('import time; time.sleep(0.3)', block=False)\n"
        "        waiters = [threading.Thread(target=cell.wait) for _ in range(3)]\n"
        "        for waiter in waiters: waiter.start()\n"
        "        for waiter in waiters: waiter.join(30)\n"
        "        print([waiter.is_alive() for waiter in waiters], flush=True)\n"
        "        if os.fork() == 0:\n"
        "            try:\n"
        "                cluster.execute('1')\n"
        "            except nbdist.UsageError as error:\n"
        "                print(error, flush=True)\n"
        "            os._exit(0)\n"
        "        os.wait()\n"
        "        print(cluster.evaluate('6 * 7', 0))\n"
        "        unfinished = cluster.execute('import time; time.sleep(600)', block=False)\n"
        "    asyncio.run(await_it(cell))\n"
        "    try:\n"
        "        asyncio.run(await_it(unfinished))\n"
        "    except nbdist.WorkerLost as error:\n"
        "        print('lost')\n"
    )
    done = run([str(path)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:4] == [
        "[False, False, False]",
        "this cluster belongs to the process that this one was forked from; use it there",
        "42",
        "lost",
    ]


def test_a_cluster_of_one_worker():
    with nbdist.Cluster(1, backend="none") as cluster:
        assert cluster.evaluate("rank", "all") == [0]
        assert cluster.evaluate("rank", None) == [0]
        assert cluster.evaluate("rank", "worker0") == cluster.evaluate("rank", 0) == 0
        cell = cluster.execute("rank + 1", keep=True)
        assert [rref.to_here() for rref in cluster.references(cell)] == [1]
        for again in (cell, cluster.execute("rank + 1")):
            with pytest.raises(nbdist.UsageError, match="no value of this cell"):
                cluster.references(again)
        with pytest.raises(nbdist.UnknownWorker, match="no worker 'worker1'; its workers are worker0"):
            cluster.find("worker1")


@pytest.fixture
def cluster(shared_cluster, own_variables):
    return shared_cluster


def test_an_interrupt_just_behind_the_sending_reaches_the_workers(cluster, monkeypatch):
    thread = cluster.kernel_thread
    soon = thread.soon

    def interrupted(function, *args):
        sent = soon(function, *args)
        if getattr(function, "__func__", None) is CellSender.send:
            monkeypatch.undo()
            wait_until(lambda: cluster.workers[0].state, equals="busy")
            time.sleep(0.3)
            raise KeyboardInterrupt
        return sent

    monkeypatch.setattr(thread, "soon", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cluster.execute("import time; time.sleep(600)", 0, quiet=True)
    cluster.execute("done = True", timeout=20)
    assert cluster.pull("done", 0) is True


def test_a_prompt_that_nobody_can_answer_ends_on_the_worker(cluster, monkeypatch):
    def fail(error):
        def ask(prompt):
            raise error

        monkeypatch.setattr("builtins.input", ask)

    fail(EOFError("EOF when reading a line"))
    with pytest.raises(EOFError):
        cluster.execute("text = input('? ')", 0, timeout=60)
    fail(LookupError("no terminal"))
    with pytest.raises(LookupError, match="no terminal"):
        cluster.execute("text = input('? ')", 0, timeout=60)
    cluster.execute("done = True", timeout=60)


def test_a_cell_that_ends_when_its_time_is_up_is_no_timeout(cluster):
    cell = cluster.execute("1", block=False)
    cell.wait(60)
    cell._finished = False  # as just before the end, when all parts are done
    ending = threading.Timer(0.3, cell._tell_end)
    ending.start()
    while not cell._events.empty():
        cell._events.get()
    cell.wait(0.1)
    ending.join()
