"""`%dist_stacks` says where the threads of each worker are, and what they wait for."""

import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from helpers.notebook.frontend import Notebook

from nbdist.cluster.held_locks import say_lock
from nbdist.thread_frames import thread_frames


@pytest.fixture(scope="module")
def shared():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 3 -t 60\nfrom nbdist import rpc")
        yield notebook


@pytest.fixture
def notebook(shared):
    yield shared
    shared.run("import nbdist; nbdist.Cluster.current.interrupt()")  # calls and cells in the background, too
    shared.end_all()


def until_told(notebook, told, magic="%dist_stacks"):
    notebook.until(lambda: re.search(told, notebook.run(magic).stdout), what=told)


def test_equal_threads_share_their_lines_and_a_collective_says_who_is_missing(notebook):
    cell = notebook.run(
        "%%remote -a\ndef train():\n    dist.all_reduce(torch.ones(3))\nif rank == 1:\n    while True: pass\ntrain()"
    )
    at = re.escape(cell.name)
    until_told(
        notebook,
        rf"worker1 has not come to all_reduce #1 \({at}:3\), float32\[3\], default group\.\n"
        rf"worker0,2: MainThread, in dist\.all_reduce\(\)\n"
        rf"    {at}:3 in train: dist\.all_reduce\(torch\.ones\(3\)\)\n    {at}:6: train\(\)\n"
        rf"worker1: MainThread\n    {at}:5: while True: pass\n",
    )
    assert "worker0" not in notebook.run("%dist_stacks worker1").stdout.partition(".\n")[2]


def test_an_rpc_thread_is_shown_with_its_call_and_a_lock_with_its_holder(notebook):
    cell = notebook.run(
        "%%remote\nimport threading, time\nturn = threading.Lock()\ndef slow():\n    with turn:\n        time.sleep(99)"
    )
    caller = notebook.run(
        "%%remote 0\nfrom nbdist import rpc\na, b = (rpc.rpc_async('worker1', slow) for _ in range(2))"
    )
    place = re.escape(f"{cell.name}:6")
    until_told(
        notebook,
        rf"worker1: \S+, serves slow for worker0, [^,]*, waits for the lock `turn`, which \S+ holds at {place}\n",
        "%dist_stacks worker1",
    )
    found = notebook.run("%dist_stacks").stdout
    assert f"    {cell.name}:6 in slow: time.sleep(99)\n" in found
    assert "worker0,2 run no code of yours." in found
    assert caller.stderr == ""


def test_a_worker_that_keeps_the_gil_is_seen_from_outside(notebook):
    code = "%%remote 1 -a\nimport ctypes\ndef keep():\n    ctypes.PyDLL(None).sleep(9)\nkeep()"
    cell = notebook.run(code)
    at = re.escape(cell.name)
    until_told(
        notebook,
        rf"worker1: MainThread, while a thread holds the GIL; the others are not seen\n"
        rf"    {at}:4 in keep: ctypes[^\n]*\n    {at}:5: keep\(\)\n",
        "%dist_stacks worker1",
    )


def test_a_worker_that_is_dead_or_stopped_says_so(notebook):
    pid = int(notebook.run("%remote 2 __import__('os').getpid()").result)
    os.kill(pid, signal.SIGSTOP)
    until_told(notebook, r"worker2 does not answer: it starts, has been stopped", "%dist_stacks 2")
    os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGKILL)
    until_told(notebook, r"worker2 was killed by SIGKILL", "%dist_stacks 2")


# -- in this process ------------------------------------------------------------------------------


def blocked(take, *, hold):
    """What is said of a thread that runs ``take``, while one called "holder" runs ``hold``, which sets an event."""
    held, let_go = threading.Event(), threading.Event()
    holder = threading.Thread(target=hold, args=(held, let_go), name="holder", daemon=True)
    holder.start()
    held.wait()
    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    time.sleep(0.2)
    try:
        return say_lock(taker.ident, thread_frames())
    finally:
        let_go.set()
        holder.join()
        taker.join()


@pytest.mark.parametrize("kind", [threading.Lock, threading.RLock, threading.Condition])
def test_who_holds_a_lock_is_named(kind):
    mine = SimpleNamespace(turn=kind())

    def hold(held, let_go):
        with mine.turn:
            held.set()
            let_go.wait()

    def take():
        with mine.turn:
            pass

    assert re.fullmatch(
        r"the lock `mine\.turn`, which holder holds at test_thread_stacks\.py:\d+", blocked(take, hold=hold)
    )


class Slotted:
    __slots__ = ("turn",)

    def __init__(self):
        self.turn = threading.Lock()


def test_a_lock_in_a_table_is_found():
    tables, key = {"a": [Slotted()]}, "a"

    def hold(held, let_go):
        with tables["a"][0].turn:
            held.set()
            let_go.wait()

    def take():
        with tables[key][0].turn:
            pass

    assert "the lock `tables[key][0].turn`, which holder holds at" in blocked(take, hold=hold)


def test_the_holder_of_a_lock_that_acquire_has_taken_is_not_known():
    turn = threading.Lock()

    def hold(held, let_go):
        turn.acquire()
        held.set()
        let_go.wait()
        turn.release()

    def take():
        turn.acquire()
        turn.release()

    assert blocked(take, hold=hold) == "the lock `turn`"


def test_a_thread_that_waits_for_itself():
    turn = threading.Lock()

    def take():
        with turn:
            take_again()

    def take_again():
        with turn:
            pass

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    time.sleep(0.2)
    assert say_lock(thread.ident, thread_frames()) == "the lock `turn`, which it holds itself"
    turn.release()
    thread.join(0.2)


def test_a_free_lock_and_a_line_without_one_are_nothing():
    turn = threading.Lock()
    with turn:
        assert say_lock(threading.get_ident(), thread_frames()) == ""
    assert say_lock(threading.get_ident(), thread_frames()) == ""
