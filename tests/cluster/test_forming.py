"""The process group forms without a listener, survives kills while it forms, and costs no time (issue H, item 1)."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import nbdist
from nbdist.cluster.hosts.group_board import Boards, BoardStore
from nbdist.cluster.kernels.workers import Worker
from nbdist.cluster.processes.group_store import Folders, FolderStore
from nbdist.cluster.processes.setup import group_folder

HERE = Path(__file__).parent


@pytest.fixture
def store(tmp_path):
    store = FolderStore(tmp_path)
    store.set_timeout(timedelta(seconds=20))
    return store


# -- the store ------------------------------------------------------------------------------------

OPERATIONS = [
    ("set", "a", "1"),
    ("get", "a"),
    ("add", "sum", 3),
    ("add", "sum", -5),
    ("get", "sum"),
    ("compare_set", "new", "", "first"),
    ("compare_set", "new", "", "second"),
    ("compare_set", "new", "first", "third"),
    ("get", "new"),
    ("compare_set", "missing", "x", "fourth"),
    ("check", ["a", "new"]),
    ("check", ["a", "nowhere"]),
    ("append", "text", "left"),
    ("append", "text", "right"),
    ("get", "text"),
    ("multi_set", ["x", "a/b c", "empty"], ["7", "8", ""]),
    ("multi_get", ["a/b c", "x", "empty"]),
    ("wait", ["x", "a"]),
    ("num_keys",),
    ("delete_key", "x"),
    ("delete_key", "x"),
    ("check", ["x"]),
    ("has_extended_api",),
]


@pytest.mark.parametrize("of", ["one host", "several hosts"])
@pytest.mark.parametrize("through", ["Python", "C++"])
def test_it_answers_as_torchs_stores_do(store, of, through):
    if of == "several hosts":
        boards = Boards()
        boards.make(1)
        store = BoardStore(1, boards.act)
    theirs = model = dist.HashStore()
    ours = store
    if through == "C++":
        ours, theirs = dist.PrefixStore("p", store), dist.PrefixStore("p", model)
    for name, *arguments in OPERATIONS:
        assert getattr(ours, name)(*arguments) == getattr(theirs, name)(*arguments), (name, arguments)


def test_a_wait_ends_with_the_value_or_with_the_time(store):
    later = threading.Timer(0.2, store.set, ("late", "here"))
    later.start()
    assert store.get("late") == b"here"
    later.join()
    with pytest.raises(dist.DistStoreError, match="'never'"):
        store.wait(["late", "never"], timedelta(seconds=0.1))


def test_a_wait_in_a_forming_that_has_failed_ends_at_once_with_the_reason(tmp_path):
    folders = Folders(tmp_path)
    folders.make(3)
    store = FolderStore(tmp_path / group_folder(3))
    later = threading.Timer(0.2, folders.end, (3, "worker1 was killed"))
    later.start()
    with pytest.raises(nbdist.RendezvousError, match="worker1 was killed"):
        dist.PrefixStore("p", store).get("never")
    later.join()
    with pytest.raises(nbdist.RendezvousError, match="worker1 was killed"):
        store.set("a", "b")


def test_ctrl_c_ends_a_wait_that_cxx_makes(store):
    later = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
    later.start()
    with pytest.raises(KeyboardInterrupt):
        dist.PrefixStore("p", store).get("never")
    later.join()


def test_a_stopped_process_that_holds_the_lock_costs_the_timeout_and_no_more(store, tmp_path):
    code = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'wb')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], **pipes) as holder:
        assert holder.stdout.readline() == b"locked\n"
        store.set_timeout(timedelta(seconds=0.3))
        with pytest.raises(dist.DistStoreError, match="held the lock"):
            store.set("a", "b")
        holder.kill()
        holder.wait()
        store.set("a", "b")  # the kernel has freed the lock
    assert store.get("a") == b"b"


def test_threads_of_one_process_exclude_each_other(store):
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda _: store.add("sum", 1), range(200)))
    assert sorted(sums) == list(range(1, 201))


def kill_writers(folder: Path, kills: int) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "store_killing.py"), str(folder), str(kills), "7"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "whole\n", done.stdout + done.stderr


def test_processes_killed_in_the_middle_of_a_write_spoil_nothing(tmp_path):
    kill_writers(tmp_path, 20)


@pytest.mark.soak
def test_a_thousand_processes_killed_in_the_middle_of_a_write_spoil_nothing(tmp_path):
    kill_writers(tmp_path, 1000)


# -- the cluster ----------------------------------------------------------------------------------


def test_a_death_that_only_another_worker_knows_of_is_a_loss():
    content = {"status": "error", "ename": "WorkerLost", "evalue": "worker1 died", "traceback": ["WorkerLost: ..."]}

    async def call():
        reply = asyncio.get_running_loop().create_future()
        reply.set_result({"content": content})
        worker = Worker("worker2", 2, 2, "cpu", None)
        worker.kernel = SimpleNamespace(ask=lambda kind, request: reply)
        await worker.call("group(2, 3)")

    with pytest.raises(nbdist.WorkerLost, match=r"^worker1 died$"):
        asyncio.run(call())


def kill_while_forming(kills: int, seed: int = 0) -> None:
    """Kill a worker at a random moment of the forming; the next forming, with the same others, has to succeed."""
    moments = random.Random(seed)
    with nbdist.Cluster(3, timeout=60) as cluster:
        began = time.monotonic()
        cluster.rebuild_process_group()
        usual = time.monotonic() - began
        failed = 0
        while failed < kills:
            victim = moments.choice(cluster.workers)
            timer = threading.Timer(moments.random() * usual, os.kill, (victim.pid, signal.SIGKILL))
            timer.start()
            try:
                cluster.rebuild_process_group()
            except nbdist.WorkerLost as error:
                assert victim.name in str(error)  # noqa: PT017 (it may also form, if the kill came late)
                failed += 1
            timer.join()
            assert victim.exited.wait(20)
            cluster.restart(victim.name, process_group=True)
            cluster.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size", timeout=60)
        assert len(list(Path(cluster.folder).glob("group-*"))) == 1


def test_workers_killed_while_the_group_forms_keep_the_others_from_nothing():
    kill_while_forming(3)


@pytest.mark.soak
def test_fifty_workers_killed_while_the_group_forms_keep_the_others_from_nothing():
    kill_while_forming(50)
