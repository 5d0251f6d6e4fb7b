"""What a new user trips over in cells: names of the notebook, `exit`, old output in an error."""

import pytest
from helpers.notebook.frontend import Notebook


@pytest.fixture(scope="module")
def notebook():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --backend none -t 60")
        yield notebook


def test_the_notebook_has_what_workers_have(notebook):
    assert notebook.run("torch.ones(1).item(), dist.is_available(), rpc.__name__").result == "(1.0, True, 'nbdist.rpc')"


def test_a_name_that_only_the_notebook_has(notebook):
    notebook.run("scale = 3")
    cell = notebook.run("%%remote\nprint(scale)", check=False)
    assert cell.error["ename"] == "NameError"
    assert (
        cell.traceback.count("`scale` is a variable of the notebook: `%dist_push scale` sends it to the workers") == 1
    )
    notebook.run("%dist_push scale")
    assert notebook.run("%%remote\nprint(scale)").stdout == "[worker0,1] 3\n"
    cell = notebook.run("%%remote\nprint(nowhere)", check=False)
    assert "is a variable of the notebook" not in cell.traceback


def test_a_name_that_only_other_workers_have(notebook):
    notebook.run("%%remote 0\nwidth = 3")
    cell = notebook.run("%%remote\nprint(width)", check=False)
    told = "`width` is defined on worker0, but not on worker1: run the cell that defines it there, too"
    assert cell.traceback.count(told) == 1


@pytest.mark.parametrize("code", ["exit()", "quit()", "exit", "exit(3)"])
def test_exit_says_what_ends_a_worker(notebook, code):
    cell = notebook.run(f"%%remote\n{code}", check=False)
    assert cell.error["ename"] == "UsageError"
    assert "%dist_restart" in cell.traceback
    assert notebook.run("%%remote\nprint(rank)").stdout == "[worker0] 0\n[worker1] 1\n"


def test_a_death_quotes_only_what_the_running_cell_wrote(notebook):
    notebook.run("%%remote 1\nimport os, sys, time\nprint('long ago', file=sys.stderr)")
    cell = notebook.run(
        "%%remote 1\nfor percent in range(0, 101, 10): print(f'\\r{percent} %', end='', file=sys.stderr, flush=True)\n"
        "time.sleep(3); os._exit(5)",
        check=False,
    )
    said = cell.error["evalue"]
    assert "long ago" not in said
    assert said.count("%\n") == 1
    assert "100 %" in said
    notebook.run("%dist_restart")


def test_what_cannot_be_sent_is_named_in_one_short_error(notebook):
    notebook.run("import threading\nlk = threading.Lock()\nbox = {'a': [lk]}")
    cell = notebook.run("rpc.rpc_sync('worker1', lambda: lk)", check=False)
    assert "`lk`, used by `<lambda>` of cell " in cell.error["evalue"]
    assert "is a lock, which cannot be sent" in cell.error["evalue"]
    assert cell.traceback.count("Traceback") == 1
    assert "nbdist" not in cell.traceback.replace("nbdist.errors", "")
    for code in ("%dist_push box", "rpc.rpc_sync('worker1', len, args=(box,))"):
        cell = notebook.run(code, check=False)
        assert "['a'][0]` is a lock, which cannot be sent" in cell.error["evalue"]
        assert cell.traceback.count("Traceback") <= 1
    assert notebook.run("import sys\ntype(sys.last_value.__cause__).__name__").result == "'TypeError'"
