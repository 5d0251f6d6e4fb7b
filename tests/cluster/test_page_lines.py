"""Line numbers in tracebacks of remote cells count from the top of the page's cell, as its editor does."""

from __future__ import annotations

import pytest
from helpers.notebook.frontend import Notebook

from nbdist.cluster.jupyter.page_lines import Page, lines_before


@pytest.fixture(scope="module")
def notebook():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --backend none -t 60")
        yield notebook


def line_of(page, text="1 / 0"):
    """The line of a page's cell in which a text first stands, counted from 1."""
    return next(number for number, line in enumerate(page.split("\n"), 1) if text in line)


PAGES = [
    "%%remote 0\nx = 1\n1 / 0",
    "%%remote 0\n\n\nx = 1\n1 / 0\n",
    "\n\n%%remote 0\n1 / 0",
    "%%remote 0\ndef f():\n    return 1 / 0\n\nf()",
    "%%remote 0\nx = 1\nawait __import__('asyncio').sleep(0)\n1 / 0",
    "%%capture taken\n%%remote 0\n\nx = 1\n1 / 0",
    "%%remote 0\n%%capture taken\nx = 1\n1 / 0",
    "%%rank[0]\nx = 1\n1 / 0",
    "%%timeline\nx = 1\n1 / 0",
    "%%remote 0 --local\nx = 1\n1 / 0",
    "%%remote 0\n%cd -q .\n1 / 0",
]


@pytest.mark.parametrize("page", PAGES)
def test_a_traceback_counts_lines_as_the_editor_does(notebook, page):
    cell = notebook.run(page, check=False)
    line = line_of(page)
    assert cell.error["ename"] == "ZeroDivisionError"
    assert f"line {line}" in cell.traceback or "<cell line: 0>" in cell.traceback  # IPython 7 has only the arrow
    arrows = [text for text in cell.traceback.splitlines() if text.startswith("-") and "1 / 0" in text]
    assert arrows[-1].split()[1] == str(line)


def test_the_same_code_further_down_is_another_cell(notebook):
    notebook.run("%%remote 0\ndef g():\n    return 1 / 0")
    notebook.run("%%time\n%%remote 1\ndef g():\n    return 1 / 0")
    notebook.run("%%time\n%%remote 0\nh = 2\ndef g():\n    return 1 / 0")
    for target, line in (("0", 5), ("1", 4)):
        cell = notebook.run(f"%%remote {target}\ng()", check=False)
        assert f"> {line}     return 1 / 0" in cell.traceback
        assert "> 2 g()" in cell.traceback


def test_a_called_function_of_a_remote_cell(notebook):
    notebook.run("%%remote 1\n\ndef broken():\n    return 1 / 0")
    cell = notebook.run(
        "%%remote 0 --progress-after 0\nfrom nbdist import rpc\nrpc.rpc_sync('worker1', lambda: broken())", check=False
    )
    assert "line 4, in broken" in cell.traceback
    assert "return 1 / 0" in cell.traceback


def test_timed_code(notebook):
    cell = notebook.run("%%remote 0\n%%time\nx = 1\n1 / 0", check=False)
    assert "<timed exec>:4" in cell.traceback or "<timed exec> in <module>" in cell.traceback  # IPython 7


@pytest.mark.parametrize(
    "page", ["%%remote 0\nx = 1\ny = (", "%%remote 0\n\nx = 1\n  y = 2", "%%time\n%%remote 0\nx = 1\nf(1 2)"]
)
def test_a_syntax_error(notebook, page):
    cell = notebook.run(page, check=False)
    assert cell.error["ename"] in ("SyntaxError", "IndentationError")
    assert f"line {page.count(chr(10)) + 1}" in cell.traceback
    assert page.split("\n")[-1].strip() in cell.traceback


def test_a_syntax_error_that_only_the_worker_finds(notebook):
    cell = notebook.run("%%remote 0\n%%capture taken\nx = 1\nf(1 2)", check=False)
    assert "line 4" in cell.traceback


def test_where_a_worker_stands_is_said_in_lines_of_the_page(notebook):
    cell = notebook.send(
        "%%remote 0\nimport threading, time\nthreading.Timer(0.5, print, ['started']).start()\ntime.sleep(600)"
    )
    notebook.until(lambda: "started" in cell.stdout)
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.error["evalue"] == f"worker0 stopped in time.sleep(600), {cell.name}:4"


def test_code_of_a_program_is_counted_by_itself(notebook):
    notebook.run("from nbdist import Cluster")
    cell = notebook.run("code = 'x = 1\\n1 / 0'\nCluster.current.execute(code, '0')", check=False)
    assert "> 2 1 / 0" in cell.traceback


def test_which_code_ends_a_cell():
    assert lines_before("%%remote\nx\n", "x") == 1
    assert lines_before("%%remote x", "x") is None
    assert lines_before("x", "y") is None
    assert lines_before("x", "") is None
    assert Page("%%time\nx", 1).lines_above("\n \nx") is None
    assert Page("%%time\n\n \nx", 1).lines_above("\n \nx") == 4
    assert Page("x").lines_above("x") == 0
