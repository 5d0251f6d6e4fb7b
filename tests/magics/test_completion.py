"""What Tab and Shift-Tab show: options, workers, and in remote cells the names on the target."""

from __future__ import annotations

import os

import pytest
from helpers.notebook.frontend import COLOUR, Notebook

CELL_OPTIONS = ["-a", "--noblock", "-o", "--out", "-t", "--timeout", "--group-outputs", "--fail-fast"]
CELL_OPTIONS += ["--progress-after", "--local"]
INIT_OPTIONS = ["-n", "--num-processes", "-g", "--gpu-ids", "--backend", "--driver", "--seed", "-t", "--timeout"]
INIT_OPTIONS += ["--launcher", "--isolate-gpus", "--preload", "--gpu-memory", "--device-map", "--host", "--ports"]
INIT_OPTIONS += ["--invitation", "--address", "--gpus-per-worker", "--placement", "--sync-code"]


@pytest.fixture(scope="module")
def notebook():
    with Notebook() as notebook:
        notebook.run("import os\nmine_here = 0")
        # What a kernel may take on a machine that has other things to do is not what is tested here.
        notebook.run("from nbdist.magics import place\nplace.ANSWER_TIMEOUT = 30")
        notebook.run("%dist_init -n 2 --backend none")
        notebook.run("%%remote 0\nmine_on_0 = 0")
        notebook.run(
            "%%remote 1\nimport json\nmine_on_1 = 1\n_hidden = 1\n\n"
            "class Thing:\n    field = 1\n    def method(self):\n        pass\n\nthing = Thing()"
        )
        yield notebook
        notebook.run("%dist_shutdown")


def completions(notebook: Notebook, code: str, cursor: int | None = None) -> list[str]:
    """What the text before the cursor becomes with each of the completions, from its last line on."""
    cursor = len(code) if cursor is None else cursor
    reply = notebook.complete(code, cursor)
    assert reply["cursor_end"] == cursor
    begun = code[: reply["cursor_start"]].rpartition("\n")[2]
    return sorted(begun + match for match in reply["matches"])


# -- names on the target ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("%%remote 0", ["mine_on_0"]),
        ("%%remote worker1", ["mine_on_1"]),
        ("%%remote -1 -a --timeout 3", ["mine_on_1"]),
        ("\n%%remote [1]", ["mine_on_1"]),
        ("%%rank[1]", ["mine_on_1"]),
        ("%%rank [1,0]", ["mine_on_1"]),  # of several, the first is asked
        ("%%remote", ["mine_on_0"]),
        ("%%distributed", ["mine_on_0"]),
    ],
)
def test_names_are_those_of_the_target_and_not_those_of_the_notebook(notebook, line, names):
    assert completions(notebook, f"{line}\nmine_") == names
    assert completions(notebook, f"{line}\nmine_he") == []


def test_the_target_s_kernel_completes_as_it_would_its_own_cell(notebook):
    assert completions(notebook, "%%remote 1\nthing.") == ["thing.field", "thing.method"]
    assert completions(notebook, "%%remote 1\nfor i in [1]:\n    x = thing.fi") == ["    x = thing.field"]
    assert completions(notebook, "%%remote 1\njson.dum") == ["json.dump", "json.dumps"]
    assert "%timeit" in completions(notebook, "%%remote 1\n%time")
    assert "import json" in completions(notebook, "%%remote 1\nimport js")


def test_in_the_middle_of_a_cell(notebook):
    code = "%%remote 1\nfirst = thing.me + mine_\nmine_"
    assert completions(notebook, code, code.index(" +")) == ["first = thing.method"]
    assert completions(notebook, code, code.index("\nmine_")) == ["first = thing.me + mine_on_1"]
    assert completions(notebook, code, code.index("\nfirst")) == []


def test_a_single_value_s_expression(notebook):
    assert completions(notebook, "%remote 1 mine_") == ["%remote 1 mine_on_1"]
    assert completions(notebook, "x = 1\n%remote [0] mine_") == ["%remote [0] mine_on_0"]


def test_a_busy_worker_s_names_are_those_of_its_last_reply(notebook, tmp_path):
    path = tmp_path / "opened when it shall end"
    os.mkfifo(path)
    notebook.run(f"path = {str(path)!r}\n%dist_push path")
    begun = notebook.send("%%remote 1 -a -o later\nmine_later = 1\nprint('begun')\nopen(path).close()")
    notebook.until(lambda: "begun" in begun.stdout)
    # Its kernel cannot answer before it is told to go on; so these answers are not the kernel's.
    assert completions(notebook, "%%remote 1\nmine_") == ["mine_on_1"]
    assert completions(notebook, "%%remote 1\nthi") == ["thing"]
    assert completions(notebook, "%%remote 1\n_hid") == []
    assert completions(notebook, "%%remote 1\nthing.") == []  # of which nobody knows anything here
    assert completions(notebook, "%%remote 1\nos.getcw") == []  # which is there, but the notebook's
    assert completions(notebook, "%%remote 0\nmine_") == ["mine_on_0"]  # who is idle is asked
    with open(path, "w"):
        notebook.run("%sync")
    assert completions(notebook, "%%remote 1\nmine_") == ["mine_later", "mine_on_1"]


def test_a_target_that_does_not_exist_is_no_failure(notebook):
    for line in ("%%remote 7", "%%remote --no-such-option", "%%remote 'open"):
        assert completions(notebook, f"{line}\nthing.fi") == []


# -- options and workers ------------------------------------------------------------------------


def test_the_line_of_a_remote_cell_has_options_and_workers(notebook):
    assert completions(notebook, "%%remote ") == sorted(
        f"%%remote {word}" for word in (*CELL_OPTIONS, "worker0", "worker1", "all")
    )
    assert completions(notebook, "%%remote 0 --no") == ["%%remote 0 --noblock"]
    assert completions(notebook, "%%remote worker0,wor") == ["%%remote worker0,worker0", "%%remote worker0,worker1"]
    assert completions(notebook, "%%rank[wor") == ["%%rank[worker0", "%%rank[worker1"]
    assert completions(notebook, "%%distributed ") == sorted(f"%%distributed {word}" for word in CELL_OPTIONS)
    code = "%%remote wor\nthing"
    assert completions(notebook, code, len("%%remote wor")) == ["%%remote worker0", "%%remote worker1"]


def test_the_line_of_dist_init_has_its_options(notebook):
    assert completions(notebook, "%dist_init -") == sorted(f"%dist_init {word}" for word in INIT_OPTIONS)
    assert completions(notebook, "x = 1\n%dist_init -n 4 --se") == ["%dist_init -n 4 --seed"]
    assert completions(notebook, "%dist_init --backend g") == ["%dist_init --backend gloo"]
    assert completions(notebook, "%dist_init --launcher=") == [
        f"%dist_init --launcher={n}" for n in ("join", "local", "ray")
    ]
    assert completions(notebook, "%dist_init --placement p") == ["%dist_init --placement pack"]


def test_the_package_s_own_names_are_those_for_users(notebook):
    notebook.run("import nbdist")
    found = completions(notebook, "nbdist.")
    assert {"nbdist.Cluster", "nbdist.rpc", "nbdist.swarm", "nbdist.WorkerLost"} <= set(found)
    assert not {"nbdist.LAYERS", "nbdist.amounts", "nbdist.holds"} & set(found)


def test_options_of_other_magics(notebook):
    assert completions(notebook, "%remote -") == ["%remote --timeout", "%remote -t"]
    assert completions(notebook, "%%watch --p") == ["%%watch --paused"]
    assert completions(notebook, "x = 1\n%dist_restart -") == ["%dist_restart --process-group", "%dist_restart -p"]
    assert completions(notebook, "%dist_mode --e") == ["%dist_mode --enable"]


def test_workers_in_the_text_of_a_call(notebook):
    for begin in ('rpc_sync("', "x = rpc.rpc_async(to='", 'rpc.remote(\n    "'):
        last = begin.rpartition("\n")[2]
        assert completions(notebook, f"{begin}wor") == [f"{last}worker0", f"{last}worker1"]
        assert completions(notebook, f"%%remote 1\n{begin}note") == [f"{last}notebook"]
    assert "worker0" not in str(completions(notebook, 'print("wor'))


def test_lines_that_name_workers_or_variables(notebook):
    assert completions(notebook, "%dist_restart wor") == ["%dist_restart worker0", "%dist_restart worker1"]
    assert completions(notebook, "%remote wor") == ["%remote worker0", "%remote worker1"]
    assert completions(notebook, "%dist_push mine_") == ["%dist_push mine_here"]
    assert "%dist_pull mine_on_1" in completions(notebook, "%dist_pull mine_")
    assert "%dist_diff mine_on_1" in completions(notebook, "%dist_diff mine_")
    assert "%dist_compare mine_on_1" in completions(notebook, "%dist_compare mine_")
    assert completions(notebook, "%dist_compare model(x) --e") == ["%dist_compare model(x) --exact"]
    for magic in ("%dist_diff", "%dist_log", "%dist_memory"):
        assert completions(notebook, f"{magic} worke") == [f"{magic} worker0", f"{magic} worker1"]


def test_the_magics_themselves(notebook):
    assert completions(notebook, "%%rem") == ["%%remote"]
    assert {"%dist_init", "%dist_pull", "%dist_push", "%dist_restart", "%dist_shutdown", "%dist_status"} <= set(
        completions(notebook, "%dist_")
    )


def test_completion_of_local_cells_is_what_it_was(notebook):
    assert completions(notebook, "mine_") == ["mine_here"]
    assert completions(notebook, "%%time\nmine_") == ["mine_here"]
    assert completions(notebook, "os.getcw") == ["os.getcwd", "os.getcwdb"]
    assert completions(notebook, "x = 'a'\nx.isid") == ["x.isidentifier"]


# -- help ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("magic", ["%dist_init", "%%remote", "%remote", "%dist_push", "%%rank"])
def test_magics_say_how_they_are_written(notebook, magic):
    found = notebook.inspect(magic)
    assert found["found"]
    assert magic in COLOUR.sub("", found["data"]["text/plain"])


def test_a_question_mark_shows_the_same(notebook):
    (page,) = notebook.run("%dist_init?").reply["content"]["payload"]
    assert "--isolate-gpus" in page["data"]["text/plain"]


# -- without a cluster, and without nbdist ------------------------------------------------------


def test_without_a_cluster_and_unloaded():
    with Notebook() as notebook:
        notebook.run("mine_here = 0")
        assert completions(notebook, "%%remote ") == sorted(f"%%remote {word}" for word in (*CELL_OPTIONS, "all"))
        assert completions(notebook, "%%remote 0\nmine_") == ["mine_here"]
        assert completions(notebook, "%dist_init --see") == ["%dist_init --seed"]
        notebook.run("%unload_ext nbdist")
        assert completions(notebook, "%dist_init --see") == []
        assert completions(notebook, "mine_") == ["mine_here"]
