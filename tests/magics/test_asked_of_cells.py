"""What a new user types and asks: order of output, misplaced magics, help, debugging, cells that are run again."""

from __future__ import annotations

import os

import pytest
from helpers.notebook.frontend import COLOUR, Notebook

from nbdist.errors import UsageError
from nbdist.magics.lines import parse_init
from nbdist.magics.overview import overview
from nbdist.magics.place import find_remote_code


@pytest.fixture(scope="module")
def notebook():
    with Notebook(load=False) as notebook:
        notebook.loaded = notebook.run("%load_ext nbdist")
        notebook.run("from nbdist.magics import place\nplace.ANSWER_TIMEOUT = 30")
        notebook.run("from nbdist.magics import session\nsession._RESULT_WAITS_FOR_OUTPUT = 30")
        notebook.run("%dist_init -n 2 --backend none -t 60")
        notebook.run("%%remote\nclass Thing:\n    '''What only workers have.'''\nthing = Thing()\n")
        yield notebook


def lines_in_place(cell):
    """The texts of a cell's display that is written anew, in turn."""
    kinds = ("display_data", "update_display_data")
    return [m["content"]["data"]["text/plain"] for m in cell.messages if m["msg_type"] in kinds]


def test_loading_shows_what_it_does(notebook):
    first, last = lines_in_place(notebook.loaded)
    assert first == "nbdist imports torch ..."
    assert "%dist_init -n 4 starts four workers" in last
    with Notebook(watched=False) as unwatched:
        assert [cell for cell in unwatched.cells.values() if cell.displays] == []


# -- what is shown, in which order ----------------------------------------------------------------


def test_what_a_called_function_prints_comes_before_the_result(notebook):
    notebook.run("import time\ndef say(n):\n    print('said', n)\n    return n")
    cell = notebook.run("[rpc.rpc_sync(f'worker{n}', say, args=(n,)) for n in (0, 1)]")
    shown = [m["msg_type"] for m in cell.messages if m["msg_type"] in ("stream", "execute_result")]
    assert cell.stdout.count("said") == 2
    assert shown[-1] == "execute_result"


def test_what_is_printed_before_a_call_and_in_it_is_shown_before_what_comes_later(notebook):
    """Without the 0.2 s after which ipykernel sends text by itself, which would hide that it is sent earlier."""
    say = "def say(n):\n    print('said', n)\n    return n"
    late = "import sys\nsys.stdout.flush_interval = {}"
    cell = "print('before')\nn = rpc.rpc_sync('worker{0}', say, args=({0},))\nimport time\ntime.sleep(1)\nprint(n)"
    for each in ("", "%%remote\n"):
        notebook.run(each + late.format(60))
    try:
        notebook.run(say)
        assert notebook.run(cell.format(0)).stdout.split("\n") == ["before", "[worker0] said 0", "0", ""]
        notebook.run(f"%%remote 0\n{say}")
        *first, last, _ = notebook.run("%%remote 0\n" + cell.format(1)).stdout.split("\n")
        assert sorted(first) == ["[worker1] said 1", "before"]  # of two workers, whose connections are not ordered
        assert last == "1"
    finally:
        for each in ("", "%%remote\n"):
            notebook.run(each + late.format(0.2))


# -- what was meant -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "magic"),
    [
        ("%dist_push scale", "%dist_push"),
        ("x = 1\nif x:\n    %dist_pull x", "%dist_pull"),
        ("%%remote 0\nx = 1", "%%remote"),
        ("%%time\n%dist_push scale", "%dist_push"),
    ],
)
def test_a_magic_of_the_notebook_in_a_remote_cell(notebook, code, magic):
    cell = notebook.run(f"%%remote\nprint('ran')\n{code}" if code[:2] != "%%" else f"%%remote\n{code}", check=False)
    assert cell.error["ename"] == "UsageError"
    assert f"write {magic} in a cell of its own" in cell.error["evalue"]
    assert cell.stdout == ""


def test_other_magics_in_a_remote_cell_run_there(notebook):
    assert "ran" in notebook.run("%%remote 0\n%time print('ran')").stdout
    assert "42" in notebook.run("%%remote 0\n%%bash\necho $((6 * 7)); [ 1 = 1 ] && echo '%dist_push'").stdout


def test_workers_counted_without_an_option():
    with pytest.raises(UsageError, match="`%dist_init -n 3` starts 3 workers"):
        parse_init("3")
    with pytest.raises(UsageError, match="takes options only, not 'gloo'; write"):
        parse_init("-n 2 gloo")


def test_a_second_cluster_is_refused_and_the_first_goes_on(notebook):
    for code in ("%dist_init -n 3", "import nbdist\nnbdist.Cluster(3).start()"):
        cell = notebook.run(code, check=False)
        assert cell.error["ename"] == "UsageError"
        assert "%dist_shutdown" in cell.error["evalue"]
    assert notebook.run("%%remote\nprint(rank)").stdout == "[worker0] 0\n[worker1] 1\n"


def test_a_name_of_the_users_own_stays_and_one_line_says_so():
    start = "%dist_init -n 1 --backend none -t 60"
    with Notebook() as notebook:
        notebook.run("rpc, dist = 3, [4]\nimport torch.distributed.autograd as dist_autograd")
        for out in (notebook.run(start).stdout, notebook.run(start).stdout):
            line = "Kept your own rpc, dist: `del rpc, dist` and %dist_init again give nbdist.rpc, torch.distributed.\n"
            assert out.endswith(line)
        assert notebook.run("rpc, dist, dist_autograd.__name__").result == "(3, [4], 'nbdist.autograd')"
        assert "Kept" not in notebook.run(f"del rpc, dist\n{start}").stdout
        assert notebook.run("rpc.rpc_sync('worker0', int), dist.__name__").result == "(0, 'torch.distributed')"


# -- help -----------------------------------------------------------------------------------------


def test_shift_tab_in_a_remote_cell_asks_the_worker(notebook):
    notebook.run("thing = 'of the notebook'")
    for code in ("%%remote 1\nx = thing", "%remote 1 thing"):
        told = notebook.inspect(code)
        assert told["found"]
        assert "What only workers have." in COLOUR.sub("", told["data"]["text/plain"])
    assert "of the notebook" in COLOUR.sub("", notebook.inspect("thing")["data"]["text/plain"])
    assert not notebook.inspect("%%remote 1\nno_such_name")["found"]


def test_shift_tab_does_not_wait_for_a_busy_worker(notebook, tmp_path):
    path = tmp_path / "opened when it shall end"
    os.mkfifo(path)
    begun = notebook.send(f"%%remote 1 -a\nprint('begun')\nopen({str(path)!r}).close()")
    notebook.until(lambda: "begun" in begun.stdout)
    assert "worker1 is busy" in notebook.inspect("%%remote 1\nthing")["data"]["text/plain"]
    with open(path, "w"):
        notebook.run("%sync")


def test_the_code_for_workers_in_a_cell():
    place = find_remote_code("%%remote 1 -a\nx = 1", 15)
    assert (place.line, place.code, place.cursor) == (" 1 -a", "x = 1", 1)
    place = find_remote_code("y = 2\n%remote 1 x.shape\nz", 20)
    assert (place.line, place.code, place.cursor) == ("1", "x.shape", 4)
    assert find_remote_code("%%remote 1\nx", 5) is None
    assert find_remote_code("x = 1", 2) is None


def test_all_magics_are_listed_by_question(notebook):
    told = notebook.run("%dist").stdout
    (page,) = notebook.run("%dist?").reply["content"]["payload"]
    assert "It hangs: where does each worker stand?" in page["data"]["text/plain"]
    names = notebook.run(
        "from nbdist.magics.dist_magics import DistMagics\n"
        "sorted({m for kind in get_ipython().magics_manager.registry['DistMagics'].magics.values() for m in kind})"
    ).result
    for name in eval(names):
        assert f"%{name} " in told or name == "dist", name
    assert "memory" in told
    assert "It is slow" in told


def test_a_magic_of_no_question_is_listed_last():
    told = overview({"%dist_new": "Do something new.\n\nMore.", "%dist_init": "Start workers."})
    assert told.endswith("And:\n  %dist_new   Do something new.")


# -- debugging ------------------------------------------------------------------------------------


def test_a_worker_is_debugged_where_its_cell_failed(notebook):
    cell = notebook.run("%%remote\ndef f(depth):\n    return 1 / depth\nf(1 - rank)", check=False)
    assert cell.traceback.splitlines()[-1] == "To look around where it failed: `%dist_debug worker1`"
    asked = []

    def answer(request):
        asked.append(request["prompt"])
        return ("p 'depth is', depth", "up", "p 'rank is', rank", "q")[len(asked) - 1]

    notebook.answers[:] = [answer] * 4
    cell = notebook.run("%%remote worker1\n%debug")
    assert all("ipdb>" in prompt for prompt in asked)
    assert "('depth is', 0)" in cell.stdout
    assert "('rank is', 1)" in cell.stdout


ASKED = {"pdb.set_trace()": "import pdb", "breakpoint()": "pass"}


def test_a_debugger_of_the_users_in_a_called_function_is_an_error_that_says_what_to_write(notebook):
    notebook.run("import pdb\ndef f(x):\n    pdb.Pdb(nosigint=True).set_trace()\n    return x")
    cell = notebook.run("rpc.rpc_sync('worker1', f, args=(1,))\nprint('not here')", check=False)
    assert cell.error["ename"] == "UsageError"
    assert "pdb has ended f on worker1: a `Pdb` of your own cannot ask" in cell.error["evalue"]
    assert "Write breakpoint() in its place" in cell.error["evalue"]
    assert "not here" not in cell.stdout


@pytest.mark.parametrize("asks", ASKED)
@pytest.mark.parametrize("call", ["f(5)", "t = threading.Thread(target=f, args=(5,)); t.start(); t.join()"])
def test_the_debugger_asks_in_a_cell_of_a_worker(notebook, asks, call):
    answers = iter(["p 'x is', x", "c"])
    notebook.answers[:] = [lambda request: next(answers)] * 2
    code = f"import threading\n{ASKED[asks]}\ndef f(x):\n    {asks}\n    print('x was', x)\n{call}"
    cell = notebook.run(f"%%remote worker1\n{code}")
    assert "('x is', 5)" in cell.stdout
    assert "x was 5" in cell.stdout


@pytest.mark.parametrize(
    "call", ["rpc_sync('worker1', 3)", "rpc_async('worker1', max, args=3)", "remote('worker1', 3)"]
)
def test_wrong_arguments_are_shown_without_our_frames(notebook, call):
    cell = notebook.run(f"rpc.{call}", check=False)
    assert cell.error["ename"] == "TypeError"
    assert "nbdist" not in cell.traceback


def test_the_cluster_has_a_name_while_it_runs():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 1 --backend none -t 60")
        assert notebook.run("cluster").result.startswith("<Cluster running: worker0")
        assert "NameError" in notebook.run("%%remote\ncluster", check=False).traceback
        notebook.run("%dist_shutdown")
        assert notebook.run("cluster", check=False).error["ename"] == "NameError"
        notebook.run("cluster = 'the user has one'\n%dist_init -n 1 --backend none -t 60")
        assert notebook.run("cluster").result == "'the user has one'"
        notebook.run("%dist_shutdown")
        assert notebook.run("cluster").result == "'the user has one'"


def test_errors_that_cannot_be_debugged_do_not_offer_it(notebook):
    for code in ("exit()", "raise KeyboardInterrupt"):
        assert "%debug" not in notebook.run(f"%%remote\n{code}", check=False).traceback


# -- a cell that is run again ---------------------------------------------------------------------


def test_a_cell_that_is_run_again_while_its_old_run_goes_on(notebook, tmp_path):
    path = tmp_path / "opened when it shall end"
    os.mkfifo(path)

    def send(code):
        """Execute as a page does, which names the cell."""
        message = notebook.client.session.msg(
            "execute_request",
            {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": True},
        )
        message["metadata"] = {"cellId": "the same"}
        notebook.client.shell_channel.send(message)
        found = notebook.cells[message["header"]["msg_id"]] = type(begun)(message["header"]["msg_id"])
        return found

    begun = notebook.run("pass")
    code = f"%%remote 1 -a\nprint('begun')\nopen({str(path)!r}).close()\nprint('over')"
    old = send(code)
    notebook.until(lambda: "begun\n" in old.stdout)  # all of it: what comes later shows at the new run
    assert old.stderr == ""
    new = send(code.replace("open", "str").replace(".close()", ""))
    notebook.until(lambda: new.idle and new.stderr)
    assert new.stderr == (
        "An earlier run of this cell still runs on worker1; its output appears here, and its cancel() ends it. "
        "This run begins on worker1 after it.\n"
    )
    elsewhere = send("%%remote 0 -a\nprint('elsewhere')")
    notebook.until(lambda: "elsewhere\n" in elsewhere.stdout)
    assert "This run begins" not in elsewhere.stderr
    assert new.stdout == ""
    with open(path, "w"):
        notebook.until(lambda: elsewhere.stdout.count("over") == 2)
    assert elsewhere.stdout == "elsewhere\nover\nbegun\nover\n"  # of the first run, then of the second
    assert old.stdout == "begun\n"
    notebook.run("%sync")
    again = send("%%remote 1 -a\nprint('alone')")
    notebook.until(lambda: "alone" in again.stdout)
    assert again.stderr == ""


def test_no_process_group_is_said_to_form_where_there_is_none(notebook):
    notebook.run("%%remote 1 -a\nimport time; time.sleep(600)")  # no group waits for it
    said = notebook.run("%dist_restart -p").stdout
    assert said == "The cluster has no process group: it was started with --backend none.\n"
    assert notebook.run("%dist_restart all").stdout == "Restarted worker0, worker1.\n"
