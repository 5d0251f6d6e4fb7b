"""What a running cell tells: the error or death of a worker at once, and where workers wait when nothing comes."""

import os
import re
import signal

import pytest
from helpers.notebook.frontend import Notebook

import nbdist
from nbdist.cluster.errors import WorkerError
from nbdist.cluster.kernels.notices import say_failed
from nbdist.cluster.stands import Position, Stands


@pytest.fixture(scope="module")
def shared():
    with Notebook() as notebook:
        notebook.run("import os, time\n%dist_init -n 3 -t 60")
        notebook.run("from nbdist.cluster.kernels import cells; cells._NOTICE_AFTER = 2")  # errors of a busy machine
        yield notebook


@pytest.fixture
def notebook(shared):
    """Three idle workers in a process group that works."""
    yield shared
    shared.end_all()


def stop(notebook, cell):
    os.kill(notebook.pid, signal.SIGINT)
    notebook.finish(cell)


# -- errors ---------------------------------------------------------------------------------------


def test_an_error_is_told_while_others_wait_for_the_worker(notebook):
    cell = notebook.send("%%remote\nif rank == 1: 1 / 0\ndist.all_reduce(torch.ones(1))")
    notebook.until(lambda: cell.stderr)
    assert cell.stderr == "[worker1] ZeroDivisionError: division by zero (worker0,2 still run; Stop ends them)\n"
    assert not cell.idle
    stop(notebook, cell)
    assert "ZeroDivisionError" in cell.traceback
    assert cell.stderr.count("ZeroDivisionError") == 1


def test_a_death_is_told_while_others_sleep(notebook):
    cell = notebook.send("%%remote\nimport os, time\nif rank == 2: os.kill(os.getpid(), 9)\ntime.sleep(600)")
    notebook.until(lambda: cell.stderr)
    assert re.fullmatch(
        r"\[worker2\] WorkerLost: worker2 .*SIGKILL.* \(worker0,1 still run; Stop ends them\)\n", cell.stderr
    )
    assert not cell.idle
    stop(notebook, cell)


def test_equal_errors_share_a_line_and_each_worker_is_told_of_once(notebook):
    cell = notebook.send(
        "%%remote\nimport time\nif rank != 1: raise KeyError('step')\ntime.sleep(8)\nraise ValueError('late')"
    )
    notebook.finish(cell)
    assert cell.stderr == "[worker0,2] KeyError: 'step' (worker1 still runs; Stop ends it)\n"


def test_nothing_is_told_of_errors_that_end_the_cell_or_are_caught(notebook):
    cell = notebook.run("%%remote\n1 / 0", check=False)
    assert cell.stderr == ""
    cell = notebook.run("%%remote\nimport time\ntry: 1 / 0\nexcept ZeroDivisionError: time.sleep(1)")
    assert cell.stderr == ""


def test_it_is_told_of_a_cell_in_the_background(notebook):
    cell = notebook.send("%%remote -a\nimport time\nif rank == 1: 1 / 0\ntime.sleep(600)")
    notebook.finish(cell)
    notebook.until(lambda: cell.stderr)
    assert (
        cell.stderr == "[worker1] ZeroDivisionError: division by zero (worker0,2 still run; its cancel() ends them)\n"
    )
    notebook.run("_.cancel()")


def test_fail_fast_interrupts_the_others(notebook):
    cell = notebook.run("%%remote --fail-fast\nimport time\nif rank == 1: 1 / 0\ntime.sleep(600)", check=False)
    assert cell.error["ename"] == "ZeroDivisionError"
    assert "KeyboardInterrupt" not in cell.traceback
    assert "[worker1]" in cell.traceback
    notebook.run("%%remote\n1 + 1")


def test_fail_fast_tells_of_the_error_if_others_do_not_stop(notebook):
    cell = notebook.send("%%remote --fail-fast\ndist.barrier()\nif rank == 1: 1 / 0\nsum(range(10**10))")
    told = "[worker1] ZeroDivisionError: division by zero (worker0,2 still run; Stop ends them)\n"
    notebook.until(lambda: told in cell.stderr)
    stop(notebook, cell)
    assert "worker0 did not stop within 2 s" in cell.traceback
    assert "ZeroDivisionError" in cell.traceback
    notebook.run("%dist_restart 0,2")


def test_it_is_told_in_a_script(capfd):
    with nbdist.Cluster(2, backend="none") as cluster:
        cell = cluster.execute("import time\nif rank: 1 / 0\ntime.sleep(6)", block=False)
        with pytest.raises(ZeroDivisionError):
            cell.wait(60)
    assert (
        "[worker1] ZeroDivisionError: division by zero (worker0 still runs; its cancel() ends it)\n"
        in capfd.readouterr().err
    )


def test_a_long_text_is_cut_and_a_longer_one_begins_with_its_first_line():
    said = say_failed([WorkerError("worker3", "ValueError", "a" * 500 + "\nb", ())], ["worker0"], "Stop ends")
    assert said == f"[worker3] ValueError: {'a' * 200}… (worker0 still runs; Stop ends it)\n"


# -- where workers wait ---------------------------------------------------------------------------


def test_one_line_says_where_each_worker_waits(notebook):
    cell = notebook.send("%%remote --progress-after 3\nif rank:\n    dist.recv(torch.ones(1), src=0)")
    notebook.until(lambda: cell.line)
    place = rf"dist\.recv\(src=0\), {re.escape(cell.name)}:3"
    missing = "; ".join(
        rf"worker0 has not come to send #1 to {who} \(recv at {re.escape(cell.name)}:3\), float32\[1\], default group"
        for who in ("worker1", "worker2")
    )
    told = rf"{missing}: worker1,2 wait in {place}, \d+ s; worker0 is through with this cell"
    notebook.until(lambda: re.fullmatch(told, cell.line))
    first = cell.line
    notebook.until(lambda: cell.line != first)  # in its place: `Cell.line` sees to that
    stop(notebook, cell)
    notebook.until(lambda: cell.line == "")


def test_a_cell_that_computes_has_no_line(notebook):
    cell = notebook.run(
        "%%remote --progress-after 0.5\nimport time\nend = time.time() + 4\nwhile time.time() < end: sum(range(1000))"
    )
    assert cell.line == ""


def test_all_that_run_wait(notebook):
    cell = notebook.send("%%remote --progress-after 2\nimport time\ntime.sleep(600)")
    notebook.until(lambda: cell.line)
    assert re.fullmatch(rf"worker0-2 wait in time\.sleep\(600\), {re.escape(cell.name)}:3, \d+ s", cell.line)
    stop(notebook, cell)


def test_zero_turns_it_off(notebook):
    cell = notebook.run("%%remote --progress-after 0\nimport time\ntime.sleep(4)")
    assert cell.line == ""


@pytest.mark.skipif("NBDIST_TEST_BLIND_PATH" in os.environ, reason="nobody sees that a process elsewhere is stopped")
def test_a_worker_that_a_signal_has_stopped_is_named(notebook):
    pid = int(notebook.run("__import__('nbdist').Cluster.current.find('worker1').pid").result)
    os.kill(pid, signal.SIGSTOP)
    try:
        cell = notebook.send("%%remote --progress-after 2\n1")
        told = r"worker1 is stopped by a signal, \d+ s; worker0,2 are through with this cell"
        notebook.until(lambda: re.fullmatch(told, cell.line))
    finally:
        os.kill(pid, signal.SIGCONT)
    notebook.finish(cell)
    assert cell.error is None


DEFAULTS = "CellOptions.__init__.__defaults__"  # the last two: `progress_after` and `above`


@pytest.fixture
def behind(notebook):
    """The name of a cell that worker0 runs. Lines come after 2 s, also those of magics that have no option for it."""
    notebook.run("import nbdist; from nbdist.cluster.kernels.cells import CellOptions")
    notebook.run(f"{DEFAULTS} = (*{DEFAULTS}[:-2], 2, 0); nbdist.Cluster.execute.__kwdefaults__['progress_after'] = 2")
    earlier = notebook.run("%%remote 0 -a\nimport time\ntime.sleep(600)")
    yield earlier.name
    notebook.run("nbdist.Cluster.current.interrupt()")
    notebook.run(
        f"{DEFAULTS} = (*{DEFAULTS}[:-2], 10, 0); nbdist.Cluster.execute.__kwdefaults__['progress_after'] = 10"
    )


@pytest.mark.parametrize(
    "line", ["%remote 0 rank", "%dist_pull rank", "%dist_diff rank", "%dist_push os", "%%remote\n1"]
)
def test_who_waits_for_a_busy_worker_is_told_so(notebook, behind, line):
    cell = notebook.send(line)
    told = rf"worker0 is still busy with time\.sleep\(600\), {re.escape(behind)}:3, \d+ s"
    notebook.until(lambda: re.match(told, cell.line))
    stop(notebook, cell)


def test_nothing_of_it_is_in_a_log():
    with Notebook(watched=False) as notebook:  # as nbval runs it
        notebook.run("%dist_init -n 2 --backend none -t 60")
        cell = notebook.run("%%remote --progress-after 1\nimport time\nif rank: 1 / 0\ntime.sleep(2)", check=False)
        assert cell.stderr == ""
        assert cell.line == ""


def place(instruction, processor, call="f()", line="In[3]:1"):
    return Position((instruction, 0), processor, call, line)


def test_who_moves_on_or_computes_does_not_wait():
    stands = Stands(after=100.0)
    for now in (0.0, 2.0, 4.0):
        stands.saw("still", place(1, 0.0), now)
        stands.saw("moves", place(now, 0.0), now)
        stands.saw("busy", place(3, now), now)
    assert stands.say(["still", "moves", "busy"], {}, {}, 4.0) == ""
    assert stands.say(["still"], {}, {}, 4.0) == "still waits in f(), In[3]:1, 4 s"
    assert stands.say(["still", "moves", "busy"], {"gone": True, "over": False}, {}, 4.0) == (
        "still waits in f(), In[3]:1, 4 s; moves,busy compute at In[3]:1; gone has failed; "
        "over is through with this cell"
    )
    stands.heard_nothing("still", 6.0)
    assert stands.say(["still"], {}, {}, 6.0) == ""
    assert stands.say(["still", "behind"], {}, {"behind": "is held"}, 6.0) == "behind is held; still computes"


def test_who_waits_for_long_is_told_with_the_line_of_who_computes():
    stands = Stands(after=10.0)
    for now in (0.0, 4.0, 8.0):
        stands.saw("worker0", place(1, 0.0, "dist.all_reduce()", "In[7]:7"), now)
        stands.saw("worker1", place(2, now, line="In[7]:5"), now)
    assert stands.say(["worker0", "worker1"], {}, {}, 9.0) == ""
    assert stands.say(["worker0", "worker1"], {}, {}, 12.0) == (
        "worker0 waits in dist.all_reduce(), In[7]:7, 12 s; worker1 computes at In[7]:5"
    )


def test_who_does_not_answer_for_long_is_told_and_keeps_the_gil_if_its_host_says_so():
    stands = Stands(after=10.0)
    stands.heard_nothing("worker0", 1.0)
    assert stands.unplaced(2.0) == []
    stands.heard_nothing("worker0", 8.0)
    assert stands.unplaced(8.0) == ["worker0"]
    assert stands.say(["worker0"], {}, {}, 10.9) == ""
    assert stands.say(["worker0"], {}, {}, 12.0) == "worker0 does not answer, 11 s"
    stands.told("worker0", "train.py:4")
    assert stands.unplaced(12.0) == [], "its host asks by a signal, and only once"
    assert stands.say(["worker0"], {}, {}, 12.0) == (
        "worker0 has not released the GIL for 11 s (its cell is at train.py:4)"
    )
    stands.told("worker0", "")
    assert stands.say(["worker0"], {}, {}, 12.0) == "worker0 has not released the GIL for 11 s"
    stands.saw("worker0", place(1, 1.0), 13.0)
    assert stands.say(["worker0"], {}, {}, 13.0) == ""


def test_a_wait_for_a_worker_that_computes_is_told(notebook):
    code = "import math\nif rank == 1:\n    while True: math.sqrt(2.0)\ndist.all_reduce(torch.ones(1))"
    cell = notebook.send(f"%%remote --progress-after 1\n{code}")
    notebook.until(lambda: "computes" in cell.line)
    assert re.fullmatch(
        r"worker1 has not come to all_reduce #\d+ \(In\[\d+\]:5\), float32\[1\], default group: "
        r"worker0,2 wait in dist\.all_reduce\(\), In\[\d+\]:5, \d+ s; worker1 computes at In\[\d+\]:4",
        cell.line,
    ), cell.line
    stop(notebook, cell)


def test_a_worker_that_keeps_the_gil_is_told_with_its_line(notebook):
    code = "if rank == 1:\n    sum(range(8 * 10**8))  # some seconds, in C"
    cell = notebook.send(f"%%remote --progress-after 1\n{code}")
    notebook.until(lambda: "its cell is at" in cell.line)
    assert re.fullmatch(
        r"worker1 has not released the GIL for \d+ s \(its cell is at In\[\d+\]:3\); "
        "worker0,2 are through with this cell",
        cell.line,
    ), cell.line
    notebook.finish(cell)
    assert cell.line == ""
