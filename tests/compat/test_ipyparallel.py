"""ipyparallel's words: views, handles and magics over a real cluster, and in a real notebook."""

from __future__ import annotations

import ast
import asyncio
import io
import os
import re
import signal
import threading
import tokenize
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from helpers.notebook import frontend
from helpers.waiting import wait_until

import nbdist
from nbdist.cluster.executor import Task
from nbdist.compat import ipyparallel as ipp
from nbdist.compat.ipyparallel import results
from nbdist.compat.ipyparallel.views import DirectView, LoadBalancedView

FOLDER = Path(ipp.__file__).parent
LIST = Path(__file__).parents[2] / "docs" / "coming_from.md"
MOST_LINES = 420  # strings under attributes count, too

FUNCTIONS = """
import os, time

def hold_until(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    return os.getpid()

def note(number):
    seen.append(number)
    time.sleep(0.001)
    seen.append(number)

def run_for_ever(path):
    open(path, "w").close()
    while True:
        time.sleep(0.01)
"""


@pytest.fixture
def cluster(shared_cluster, own_variables):
    shared_cluster.execute(FUNCTIONS)
    return shared_cluster


@pytest.fixture
def view(cluster):
    return cluster.view()


@pytest.fixture
def balanced(cluster):
    return cluster.view(balanced=True)


def test_variables_go_there_and_come_back(view):
    view["x"] = 7
    assert view["x"] == [7, 7]
    view.push({"y": 1, "z": 2})
    assert view.pull(["y", "z"], block=True) == [[1, 2], [1, 2]]
    assert view.apply_sync(lambda: x) == [7, 7]  # noqa: F821


def test_a_view_of_one_worker_gives_values_and_no_lists(cluster):
    one = ipp.Client(cluster)[1]
    one["who"] = "me"
    assert one["who"] == "me"
    assert one.apply_sync(os.getpid) == cluster.workers[1].pid
    assert ipp.Client(cluster)[::2].targets == [0]


@pytest.mark.parametrize("values", [list(range(5)), torch.arange(5)])
def test_what_is_scattered_is_gathered_again(view, values):
    view.scatter("part", values)
    assert [len(part) for part in view["part"]] == [3, 2]
    gathered = view.gather("part").get()
    assert type(gathered) is type(values)
    assert list(gathered) == list(values)
    view.scatter("place", [10, 11], flatten=True)
    assert view["place"] == [10, 11]


def test_maps_keep_the_order(view, balanced):
    expected = [2 * number for number in range(7)]
    for each in (view, balanced):
        assert each.map_sync(lambda number: 2 * number, range(7)) == expected
        assert list(each.imap(lambda number: 2 * number, range(7))) == expected
        assert each.map(lambda a, b: a * b, [1, 2], [3, 4]).get() == [3, 8]
        assert each.map_sync(abs, []) == []
        assert list(each.executor.map(abs, [-1, 2])) == [1, 2]
    assert balanced.map_sync(abs, range(7), chunksize=3) == list(range(7))
    doubled = balanced.parallel(block=True)(lambda number: 2 * number)
    assert doubled.map(range(3)) == doubled(range(3)) == [0, 2, 4]


def test_a_balanced_task_goes_to_who_is_free(cluster, balanced, tmp_path):
    release = tmp_path / "release"
    slow = balanced.apply_async(ipp.Reference("hold_until"), str(release))
    quick = balanced.map_async(lambda _: os.getpid(), range(8))
    pids = set(quick.get(60))
    assert not slow.ready()
    release.touch()
    assert slow.get(60) not in pids
    assert len(pids) == 1


def test_a_worker_does_one_task_after_the_other_in_order(cluster):
    one = ipp.Client(cluster)[0]
    one["seen"] = []
    results = [one.apply_async(ipp.Reference("note"), number) for number in range(20)]
    assert ipp.Client(cluster).wait(results, 60)
    assert one["seen"] == [step for number in range(20) for step in (number, number)]


def test_a_task_waits_for_the_cells_before_it(view):
    view["later"] = 0
    view.execute("import time; time.sleep(0.5); later = 5", block=False)
    assert view.apply_sync(lambda: later) == [5, 5]  # noqa: F821


def test_a_reference_stands_for_a_value_of_the_worker(view):
    view["b"] = 3
    assert view.apply_sync(lambda value: value + 1, ipp.Reference("b * 2")) == [7, 7]
    view["double"] = lambda: 2 * b  # noqa: F821
    assert view.apply_sync(ipp.Reference("double")) == [6, 6]


def test_a_handle_knows_who_did_it_and_when(cluster, view, balanced):
    assert view.apply_async(os.getpid).get_dict() == {worker.rank: worker.pid for worker in cluster.workers}
    result = balanced.map_async(abs, range(20))
    assert result.wait(60)
    assert (result.progress, len(result), result.successful()) == (20, 20, True)
    assert set(result.engine_id) <= {0, 1}
    for submitted, started, completed in zip(result.submitted, result.started, result["completed"], strict=True):
        assert submitted <= started <= completed
    assert result.serial_time >= 0
    assert 0 < result.wall_time == result.elapsed


def test_a_handle_is_a_future_of_pythons(view):
    async def both():
        return await asyncio.wrap_future(view.apply(os.getpid))

    assert asyncio.run(both()) == view.apply_sync(os.getpid)


@pytest.mark.parametrize("name", ["get", "result", "exception", "wait", "wait_for", "get_dict", "wait_interactive"])
def test_a_negative_time_limit_is_none(name):
    task = Task()
    task.rank = 0
    handle = results.AsyncResult([task], single=True)
    timer = threading.Timer(0.2, task.settle, [42])
    timer.start()
    found = results.wait_for([handle], -1) if name == "wait_for" else getattr(handle, name)(timeout=-1)
    expected = {"wait": True, "wait_for": True, "get_dict": {0: 42}, "exception": None, "wait_interactive": None}
    assert found == expected.get(name, 42)
    assert handle.done()
    timer.join()


def test_an_error_has_the_workers_own_type(view, balanced):
    for each in (view, balanced):
        failed = each.apply_async(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failed.get(60)
        assert failed.ready()
        assert not failed.successful()
    with pytest.raises(nbdist.EncodeError):
        view.apply_sync(abs, (each for each in "ab"))


def test_interrupt_ends_a_task(cluster, tmp_path):
    begun = tmp_path / "begun"
    running = cluster.view(0).apply_async(ipp.Reference("run_for_ever"), str(begun))
    wait_until(lambda: begun.exists())
    cluster.interrupt()
    with pytest.raises(nbdist.RemoteError, match="KeyboardInterrupt"):
        running.get(60)


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        ("view", "queue_status", "use %dist_status"),
        ("view", "sync_imports", "an import inside of the function"),
        ("view", "frobnicate", "docs/coming_from.md"),
        ("result", "stdout", "appears in the notebook at once"),
        ("client", "become_dask", "the library's own client"),
        ("module", "CompositeError", "the task's own class of error"),
        ("starter", "start_engines_sync", "is fixed when they start"),
    ],
)
def test_every_other_name_raises_and_says_what_to_write(cluster, view, owner, name, instead):
    owners = {
        "view": view,
        "result": view.push({}),
        "client": ipp.Client(cluster),
        "module": ipp,
        "starter": ipp.Cluster(),
    }
    with pytest.raises(AttributeError, match=f"has no '{name}'.*{instead}"):
        getattr(owners[owner], name)


def test_a_worker_that_dies_fails_its_own_tasks_and_takes_no_others(cluster, balanced):
    one = cluster.view(0)
    os.kill(cluster.workers[0].pid, signal.SIGKILL)
    wait_until(lambda: not cluster.workers[0].alive)
    assert set(balanced.map_sync(lambda _: os.getpid(), range(20))) == {cluster.workers[1].pid}
    with pytest.raises(nbdist.WorkerLost):
        one.apply_sync(os.getpid)
    cluster.restart()
    assert one.apply_sync(os.getpid) == cluster.workers[0].pid


def test_a_notebook_of_ipyparallels_runs_with_one_changed_line():
    with frontend.Notebook(load=False) as notebook:
        notebook.run("%load_ext nbdist.compat.ipyparallel")
        notebook.run("import ipyparallel\nrc = ipyparallel.Cluster(n=2).start_and_connect_sync(activate=True)")
        notebook.run("%px a = 5")
        notebook.run("%px a + 1")
        assert notebook.run("rc[:]['a']").result == "[5, 5]"
        assert "even" in notebook.run("%%px --targets ::2\nprint('even')").stdout
        assert notebook.run("%%px --local\nhere = 1").error is None
        assert notebook.run("here").result == "1"
        notebook.run("%%px --noblock\nimport time; time.sleep(0.3); b = 1")
        notebook.run("%pxresult")
        assert notebook.run("rc[:]['b']").result == "[1, 1]"
        notebook.run("%pxconfig --targets 1")
        notebook.run("%px only = 1")
        assert "NameError" in notebook.run("rc[0]['only']", check=False).error["ename"]
        notebook.run("rc[0].activate(suffix='0')\n%px0 c = 3")
        assert notebook.run("rc[0]['c']").result == "3"
        shown = notebook.run("rc.load_balanced_view().map_async(abs, range(9)).wait_interactive()")
        drawn = shown.of("display_data") + shown.of("update_display_data")
        assert "9/9 tasks" in drawn[-1]["data"]["text/plain"]
        notebook.run("%autopx")
        notebook.run("d = 4")
        notebook.run("%autopx")
        assert notebook.run("rc[:]['d']").result == "[4, 4]"
        wrong = notebook.run("%%px --verbosely\n1", check=False).error
        assert wrong["ename"] == "UsageError"
        assert "write: %%px [-t TARGETS]" in wrong["evalue"]


# -- how much there is of it ----------------------------------------------------------------------


def lines_of_code(source):
    """Return how many lines of a module have code: not blank lines, comments and docstrings."""
    bodies = (node.body for node in ast.walk(ast.parse(source)) if isinstance(getattr(node, "body", None), list))
    texts = [line for body in bodies for line in body if isinstance(getattr(line, "value", None), ast.Constant)]
    docstrings = [text for text in texts if isinstance(text, ast.Expr) and isinstance(text.value.value, str)]
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [each for each in tokenize.generate_tokens(io.StringIO(source).readline) if each.type not in no_code]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - {line for text in docstrings for line in range(text.lineno, text.end_lineno + 1)})


def test_it_is_a_thin_shell():
    counted = {path.name: lines_of_code(path.read_text()) for path in FOLDER.glob("*.py")}
    assert "views.py" in counted
    assert sum(counted.values()) <= MOST_LINES, counted


def test_lines_of_code_are_counted():
    source = '''"""A module.

    Of two lines.
    """

import os  # one


# a comment
class A:
    """A class."""

    x = (
        1,
    )
    """An attribute."""

    def f(self):
        """A function: two."""
        return """a
        b"""
'''
    assert lines_of_code(source) == 8
    assert lines_of_code("") == 0


def listed(beginning):
    """Return the names that an entry of the list in `LIST` has: what is one name in backticks."""
    (entry,) = re.findall(rf"^- {beginning}.*?(?=^- |\n\n)", LIST.read_text(), re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([a-z]\w*)`", entry.partition(": ")[2]))


def public(thing):
    return {name for name in dir(thing) if not name.startswith("_")}


def test_the_list_of_names_is_closed(cluster, view, balanced):
    of_views = listed("of a view, ")
    assert "map_sync" in of_views
    assert public(balanced) == public(LoadBalancedView) | {"block", "cluster", "targets"} == of_views
    assert public(view) == public(DirectView) | {"block", "cluster", "targets"}
    assert public(view) == of_views | listed("of a view that is not load balanced")
    assert public(ipp.Client(cluster)) == listed("of a client")
    handle = view.apply_async(abs, 1)
    assert handle.get() == [1, 1]  # the facts change until then
    facts = {"engine_id", "submitted", "started", "completed", "received"}
    assert public(handle) - public(Future) | facts == listed("of a handle")
    assert facts == set(handle.metadata[0])
    assert all(getattr(handle, fact) == handle[fact] for fact in facts)


def test_the_starter_has_each_name_twice():
    twins = public(ipp.Cluster)
    assert {name.removesuffix("_sync") for name in twins} == listed(r"of `ipp\.Cluster")
    assert {f"{name}_sync" for name in twins if not name.endswith("_sync")} < twins
    for name in twins:
        assert getattr(ipp.Cluster, name).__doc__
