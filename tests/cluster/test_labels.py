"""Frames of cells are called by the cell's number and the worker."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest
from ipykernel.compiler import get_file_name

from nbdist.cluster.jupyter import labels
from nbdist.code_lines import users_lines
from nbdist.code_places import CELLS

CELL = "/tmp/ipykernel_17/123.py"
OTHER = "<ipython-input-4-0a1b2c3d4e5f>"


class Compiler:
    """What labels need of IPython's."""

    def __init__(self) -> None:
        self._filename_map = {CELL: 3, OTHER: 12}
        self.cached = []

    def format_code_name(self, name):
        return ("Cell", f"In[{self._filename_map[name]}]") if name in self._filename_map else None

    def cache(self, transformed, number=0, raw_code=None):
        self.cached.append((transformed, number, raw_code))
        return CELL


class Shell:
    def __init__(self) -> None:
        self.compile = Compiler()


@pytest.fixture
def shell(monkeypatch):
    monkeypatch.setattr(labels, "_cells", labels._Cells())
    return Shell()


@pytest.fixture
def known(shell):
    labels.install(shell, None)
    return shell


# -- where a shell shows a traceback ------------------------------------------------------------


def test_a_workers_cells_are_called_by_its_name(shell):
    labels.install(shell, "worker1")
    assert shell.compile.format_code_name(CELL) == ("Cell", "In[3] on worker1")
    assert shell.compile.format_code_name("/usr/lib/module.py") is None


def test_the_notebooks_own_are_called_as_ever(shell):
    labels.install(shell, None)
    assert shell.compile.format_code_name(CELL) == ("Cell", "In[3]")


def test_the_number_of_the_cell_that_runs_is_known(shell):
    labels.install(shell, None)
    assert labels.cell_number() is None
    assert shell.compile.cache("x = 1", 5, raw_code="x = 1 ") == CELL
    assert labels.cell_number() == 5
    shell.compile.cache("helper without a number")
    assert labels.cell_number() == 5
    assert shell.compile.cached == [("x = 1", 5, "x = 1 "), ("helper without a number", 0, None)]


# -- where a traceback is text ------------------------------------------------------------------


def test_without_a_shell_text_stays_as_it_is(shell):
    text = f'  File "{CELL}", line 1, in f\n    1 / 0\n'
    assert labels.rename_frames(text, "worker1") == text


def test_frames_of_cells_are_renamed_and_others_are_not(known):
    text = (
        "Traceback (most recent call last):\n"
        f'  File "{CELL}", line 2, in outer\n'
        "    return inner(x)\n"
        "           ^^^^^^^^\n"
        '  File "/usr/lib/module.py", line 7, in inner\n'
        "    return x / 0\n"
        "           ~~^~~\n"
        f'  File "{OTHER}", line 1, in <lambda>\n'
        "    f = lambda: 1 / 0\n"
        "ZeroDivisionError: division by zero\n"
    )
    assert labels.rename_frames(text, "worker1") == (
        "Traceback (most recent call last):\n"
        "  Cell In[3] on worker1, line 2, in outer\n"
        "    return inner(x)\n"
        "           ^^^^^^^^\n"
        '  File "/usr/lib/module.py", line 7, in inner\n'
        "    return x / 0\n"
        "           ~~^~~\n"
        "  Cell In[12] on worker1, line 1, in <lambda>\n"
        "    f = lambda: 1 / 0\n"
        "ZeroDivisionError: division by zero\n"
    )


def test_renaming_twice_is_renaming_once(known):
    text = f'  File "{CELL}", line 2, in f\n    x\nNameError: x\n'
    once = labels.rename_frames(text, "worker1")
    assert labels.rename_frames(once, "worker2") == once


def test_a_line_that_the_worker_did_not_have_is_filled_in(known, monkeypatch):
    monkeypatch.setitem(linecache.cache, CELL, (20, None, ["def f():\n", "    return 1 / 0\n"], CELL))
    text = f'  File "{CELL}", line 2, in f\nZeroDivisionError: division by zero'
    assert labels.rename_frames(text, "worker0") == (
        "  Cell In[3] on worker0, line 2, in f\n    return 1 / 0\nZeroDivisionError: division by zero"
    )


def test_a_line_that_nobody_has_is_left_out(known):
    text = f'  File "{CELL}", line 99, in f\n  File "{CELL}", line 98, in g\nValueError: x'
    assert labels.rename_frames(text, "worker0") == (
        "  Cell In[3] on worker0, line 99, in f\n  Cell In[3] on worker0, line 98, in g\nValueError: x"
    )


def test_repeated_frames_and_syntax_errors_keep_their_lines(known):
    text = (
        f'  File "{CELL}", line 1, in f\n'
        "    f()\n"
        "  [Previous line repeated 996 more times]\n"
        f'  File "{OTHER}", line 1\n'
        "    1 +\n"
        "       ^\n"
        "SyntaxError: invalid syntax\n"
    )
    assert labels.rename_frames(text, "worker0") == (
        "  Cell In[3] on worker0, line 1, in f\n"
        "    f()\n"
        "  [Previous line repeated 996 more times]\n"
        "  Cell In[12] on worker0, line 1\n"
        "    1 +\n"
        "       ^\n"
        "SyntaxError: invalid syntax\n"
    )


def test_the_users_own_text_is_not_taken_for_a_frame(known):
    for text in ('see File "x", line 1\n', f'ValueError: File "{CELL}"\n', "", "\n"):
        assert labels.rename_frames(text, "worker0") == text


def test_indented_tracebacks_are_renamed_too(known):
    text = f'raised on worker1, in f:\n      File "{CELL}", line 1, in f\n        x\n    NameError: x'
    assert labels.rename_frames(text, "worker1") == (
        "raised on worker1, in f:\n      Cell In[3] on worker1, line 1, in f\n        x\n    NameError: x"
    )


def test_frames_that_a_worker_has_written_are_named_by_the_cells_that_it_was_sent(monkeypatch):
    code = "\ndef wait():\n    lock.acquire()\nwait()"
    sent, unknown = f"/tmp/ipykernel_17/{Path(get_file_name(code)).name}", "/tmp/ipykernel_17/456.py"
    for table in (CELLS, linecache.cache):  # as they were, after the test
        monkeypatch.setitem(table, sent, None)
        monkeypatch.delitem(table, sent)
    labels.note_sent(code, 7)
    text = (
        "Current thread 0x00007f00 (most recent call first):\n"
        f'  File "{labels.__file__}", line 1 in install\n'
        f'  File "{sent}", line 3 in wait\n  File "{sent}", line 4 in <module>\n'
        f'  File "{linecache.__file__}", line 9 in getline\n  File "{unknown}", line 2 in <module>\n'
    )
    frames = labels.read_frames(text)
    assert [each.function for each in frames] == ["wait", "<module>", "getline", "<module>"]
    assert frames[0].function_and_line == "wait, line 3 of In[7]"
    assert frames[2].function_and_line == f"getline, line 9 of {linecache.__file__}"
    assert list(map(str, users_lines(frames))) == ["In[7]:3 in wait: lock.acquire()", "In[7]:4: wait()", "cell:2"]
    assert [each.place for each in users_lines(frames)] == ["In[7]:3", "In[7]:4", "cell:2"]
    assert labels.rename_cell_frames(f'File "{sent}", line 3 in wait', "worker1") == (
        "Cell In[7] on worker1, line 3 in wait"
    )
