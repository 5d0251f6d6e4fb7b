"""The stop button: interrupts the workers that a cell waits for, and them alone, at once."""

import random
import re
import time

import pytest


def interrupt_when(notebook, cell, ready=None):
    """Press stop once the cell has said that it is where it should be."""
    if ready is not None:
        notebook.until(lambda: ready in cell.stdout, what=f"{ready!r} in the output of {cell}")
    else:
        time.sleep(0.5)  # it waits for its turn, of which nothing tells the front end
    notebook.interrupt()
    notebook.finish(cell, timeout=30)
    return cell


# A flush of ipykernel's ends before the text is sent: what keeps the GIL must not begin at once.
STARTED = "import time, threading; print('started', flush=True); time.sleep(0.2)\n"
SOON = "import threading, time; threading.Timer(0.5, print, ['started']).start()\n"  # when the cell is in its wait


@pytest.mark.parametrize(
    "code",
    [
        "time.sleep(600)",
        "threading.Lock().acquire(); lock = threading.Lock(); lock.acquire(); lock.acquire()",
        "while True: pass",
        "threading.Event().wait()",
        "import subprocess; subprocess.run(['sleep', '600'])",
        "await __import__('asyncio').sleep(600)",
        "rpc.rpc_sync('worker1', time.sleep, args=(2,))",
    ],
)
def test_a_cell_is_interrupted_where_it_is(two, code):
    cell = interrupt_when(two, two.send(f"%%remote 0\n{SOON}{code}"), "started")
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert "on worker0" in cell.traceback
    assert re.fullmatch(rf"worker0 stopped in .*, {re.escape(cell.name)}:[23]", cell.error["evalue"])
    assert two.run("%%remote\nprint(rank)").stdout == "[worker0] 0\n[worker1] 1\n"


def test_all_workers_of_the_cell_are_interrupted(two):
    cell = two.send(f"%%remote\n{SOON}time.sleep(600)")
    interrupt_when(two, cell, "started")
    assert cell.error["ename"] == "KeyboardInterrupt"
    said = cell.traceback  # of both together, or of each where they were not at the same place
    assert "worker0,1" in said or ("on worker0" in said and "on worker1" in said)


def test_it_is_said_at_which_line_each_worker_hung(two):
    code = "def wait():\n    time.sleep(600)\nif rank: wait()\nrpc.rpc_sync('worker1', time.sleep, args=(1,))"
    cell = interrupt_when(two, two.send(f"%%remote\n{SOON}{code}"), "started")
    assert cell.error["evalue"] == (
        f"worker0 stopped in rpc.rpc_sync(to='worker1'), {cell.name}:6; "
        f"worker1 stopped in time.sleep(600), {cell.name}:4"
    )
    assert f"KeyboardInterrupt: stopped in time.sleep(600), {cell.name}:4" in cell.traceback


def test_a_worker_that_formats_its_traceback_has_given_way(two):
    two.run(
        "%%remote 0\nimport time\nshown = get_ipython().InteractiveTB\nplain = shown.structured_traceback\n"
        "def slow(*args, **options):\n    time.sleep(3)\n    return plain(*args, **options)\n"
        "shown.structured_traceback = slow"
    )
    cell = interrupt_when(two, two.send(f"%%remote 0\n{SOON}time.sleep(600)"), "started")
    two.run("%%remote 0\nshown.structured_traceback = plain")
    assert cell.error["evalue"] == f"worker0 stopped in time.sleep(600), {cell.name}:3"
    assert "time.sleep(600)" in cell.traceback


def test_workers_that_the_cell_does_not_wait_for_go_on(two):
    two.run("%%remote 1 -a\nimport time\nfor i in range(30): time.sleep(0.05)\nsurvived = True")
    interrupt_when(two, two.send(f"%%remote 0\n{STARTED}time.sleep(600)"), "started")
    assert two.run("%remote 1 survived").result == "True"


def test_a_collective_is_interrupted_and_its_group_can_be_formed_anew(two):
    cell = two.send(f"%%remote 0\n{STARTED}t = torch.ones(1); dist.all_reduce(t)")
    two.until(lambda: "started" in cell.stdout)
    time.sleep(0.5)  # until it waits for the other: before that there is nothing to break off
    two.interrupt()
    two.finish(cell)
    assert cell.error is not None
    assert "%dist_restart -p" in cell.traceback
    assert f"dist.all_reduce(), {cell.name}:3" in cell.error["evalue"]
    assert "gloo" not in cell.traceback
    two.run("%dist_restart --process-group")
    cell = two.run("%%remote\nt = torch.ones(1); dist.all_reduce(t); print(t.item())")
    assert cell.stdout == "[worker0,1] 2.0\n"


def test_what_runs_for_a_call_is_interrupted_in_its_thread(two):
    two.run(
        "def spin(file):\n"
        "    import os, time\n"
        "    open(file, 'w').close()\n"
        "    try:\n"
        "        while True: time.sleep(0.01)\n"
        "    finally:\n"
        "        os.remove(file)\n"
        "path = os.environ['NBDIST_RUNTIME_DIR'] + '/spinning'"
    )
    cell = two.send("print('started', flush=True); rpc.rpc_sync('worker1', spin, args=(path,))")
    two.until(lambda: "started" in cell.stdout)
    two.until(lambda: __import__("os").path.exists(__import__("os").environ["NBDIST_RUNTIME_DIR"] + "/spinning"))
    two.interrupt()
    two.finish(cell)
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert two.run("os.path.exists(path)").result == "False"


def test_what_does_not_give_way_is_named_with_where_it_is(two):
    cell = two.send(f"%%remote 1\n{STARTED}sum(range(10**10))")
    two.until(lambda: "started" in cell.stdout)
    time.sleep(1)  # in the C call, which holds the GIL: nothing can say so
    two.interrupt()
    two.finish(cell)
    text = cell.traceback
    assert "worker1 did not stop within 2 s" in text
    assert "line 3 of its cell" in text
    assert "%dist_restart worker1" in text
    assert two.run("%%remote 0\nprint('here')").stdout == "here\n"
    two.run("%dist_restart worker1")
    assert two.run("%%remote 1\nprint('back')").stdout == "back\n"


def test_a_function_of_an_earlier_cell_that_does_not_give_way_is_named_with_that_cell(two):
    earlier = two.run("%%remote 1\ndef keep(): sum(range(10**10))")
    cell = two.send(f"%%remote 1\n{STARTED}keep()")
    two.until(lambda: "started" in cell.stdout)
    time.sleep(1)  # in the C call
    two.interrupt()
    two.finish(cell)
    assert f"(it is in keep, line 2 of {earlier.name}, called by line 3 of its cell)" in cell.traceback
    two.run("%dist_restart worker1")


def test_a_backward_pass_that_does_not_give_way_is_named_at_torchs_line(two):
    code = "y = torch.ones(1, requires_grad=True)\ny.register_hook(__import__('functools').partial(sum, range(10**10)))"
    cell = two.send(f"%%remote 1\n{STARTED}{code}\n(y * 2).backward()")
    two.until(lambda: "started" in cell.stdout)
    time.sleep(1)  # in the C function, below the frame of nbdist's engine
    two.interrupt()
    two.finish(cell)
    assert "worker1 did not stop within 2 s" in cell.traceback
    assert re.search(r"\(it is in _engine_run_backward, line \d+ of \S+/graph.py, called by line 5 of", cell.traceback)
    two.run("%dist_restart worker1")


def test_a_queued_cell_is_interrupted_when_its_turn_comes(two):
    two.run("%%remote 0 -a\nimport time; time.sleep(8); first = True")
    cell = interrupt_when(two, two.send("%%remote 0\nsecond = True"))
    assert "worker0 has not begun this cell" in cell.traceback
    assert two.run("%remote 0 (first, 'second' in globals())").result == "(True, False)"


def test_a_limit_of_time_interrupts(two):
    cell = two.run("%%remote -t 0.5\nimport time; time.sleep(600)", check=False)
    assert cell.error["ename"] == "CellTimeout"
    assert "worker0,1 did not end the cell within 0.5 s; worker0,1 stopped in " in cell.error["evalue"]
    assert two.run("%%remote\nprint(rank)").stdout == "[worker0] 0\n[worker1] 1\n"


def test_a_handle_can_be_cancelled(two):
    two.run("%%remote 0 -a\nimport time; time.sleep(600)")
    two.run("handle = _\nwhile not handle.parts['worker0'].began: time.sleep(0.01)\nhandle.cancel()")
    cell = two.run("handle.wait()", check=False)
    assert cell.error["ename"] == "KeyboardInterrupt"


@pytest.mark.parametrize("count", [20, pytest.param(50, marks=pytest.mark.soak)])
def test_interrupts_at_random_moments_leave_the_session_usable(two, count):
    moments = random.Random(7)
    bodies = [
        "for i in range(40): time.sleep(0.005)",
        "for i in range(2000): print(i)",
        "sum(i * i for i in range(3_000_000))",
        "pass",
    ]
    two.run("%%remote\nimport time")
    for number in range(count):
        target = moments.choice(["", " 0", " 1"])
        cell = two.send(f"%%remote{target}\n{bodies[number % len(bodies)]}\nnumber = {number}")
        time.sleep(moments.random() * 0.25)
        two.interrupt()
        # Beside the user's code an interrupt costs any ipykernel its reply: "KeyboardInterrupt caught in kernel".
        two.until(lambda cell=cell: cell.idle, 30, f"the end of {cell}")
        if cell.error is not None:
            assert cell.error["ename"] == "KeyboardInterrupt", cell.traceback
        assert two.run(f"%%remote\nprint({number})").stdout == f"[worker0,1] {number}\n"
