"""Workers run the code that was edited: `%dist_reload`, the notebook's own `%autoreload`, and lines where not."""

import importlib
import re
import sys

import pytest
from helpers.notebook.frontend import Notebook

from nbdist.cluster.examination.reloading import reload_module

CODE = """
CALLS = []
class Loss:
    __slots__ = ("weight",)
    def __call__(self, x): return x * {factor}
class Scale:
    def __call__(self, x): return x * {factor}
def scaled(x): return x * {factor}
"""


class Project:
    """A folder with the module ``losses``, that a kernel and its workers can import."""

    def __init__(self, folder):
        self.folder = folder
        self._edits = 0

    def write(self, text, name="losses"):
        # Each text is longer than the one before: Python takes one of the same second and size for the same.
        self._edits += 1
        (self.folder / f"{name}.py").write_text(text + "#" * self._edits + "\n")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def two(project):
    project.write(CODE.format(factor=2))
    with Notebook(folders=[project.folder]) as notebook:
        notebook.run("%dist_init -n 2 --preload losses", timeout=120)
        notebook.run("import losses")
        yield notebook


SEEN = "rpc.rpc_sync('worker0', losses.scaled, (1,)), rpc.rpc_sync('worker1', losses.scaled, (1,))"


def test_functions_objects_and_calls_get_the_new_code(two, project):
    two.run("from losses import scaled as mine\nscale = losses.Scale()")
    two.run("%%remote\nimport losses\nfrom losses import scaled\nscale, loss = losses.Scale(), losses.Loss()")
    project.write(CODE.format(factor=30))
    assert two.run(SEEN).result == "(2, 2)"
    assert two.run("%dist_reload losses").stdout == "losses reloaded on notebook, worker0,1\n"
    assert two.run(SEEN).result == "(30, 30)"
    assert two.run("%remote 1 scaled(1), scale(1), loss(1), losses.CALLS").result == "(30, 30, 30, [])"
    assert two.run("mine(1), scale(1), rpc.rpc_sync('worker0', mine, (1,))").result == "(30, 30, 30)"
    assert two.run("from nbdist.wire.pickling.names import name_of\nname_of(mine)").result == "'losses:scaled'"


def test_objects_that_keep_the_old_class_are_counted(two, project):
    two.run("%%remote 1\nkept = [losses.Loss() for _ in range(3)]\ndel loss")
    project.write(CODE.format(factor=30).replace('("weight",)', '("weight", "bias")'))
    told = two.run("%dist_reload losses -r 1").stdout
    assert told == "losses reloaded on worker1; 3 instances of losses.Loss keep the old class\n"
    # What comes after the class in the module is new all the same.
    assert two.run("%remote 1 scaled.__code__ is losses.scaled.__code__").result == "True"
    assert two.run("%dist_reload losses").stdout.splitlines() == [
        "losses reloaded on notebook",
        "losses reloaded on worker0; 1 instance of losses.Loss keeps the old class",
        "losses reloaded on worker1; 3 instances of losses.Loss keep the old class",
    ]
    two.run("%%remote\nkept = loss = None")
    assert two.run("%dist_reload losses").stdout == "losses reloaded on notebook, worker0,1\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def scaled(x:\n", "line 1\n    def scaled(x:\n"),
        (
            "def scaled(x): return 0\n1 / 0\n",
            "line 2, in <module>\n    1 / 0\n    ~~^~~\nZeroDivisionError: division by",
        ),
    ],
)
def test_an_error_of_the_module_leaves_the_old_code(two, project, text, told):
    project.write(text)
    failed = two.run("%dist_reload losses", check=False)
    head = "UsageError: losses keeps its old code on notebook, worker0,1, as the new code raises\n"
    assert failed.traceback.startswith(f'{head}  File "{project.folder / "losses.py"}", {told}')
    assert two.run(SEEN).result == "(30, 30)"
    # The file is still newer than the code that runs.
    assert (
        "modules: losses has changed since its import on notebook, worker0,1: " in two.run("%dist_diff --code").stdout
    )
    project.write(CODE.format(factor=30))
    two.run("%dist_reload losses")


def test_a_module_that_nobody_has_imported(two):
    told = two.run("%dist_reload nowhere", check=False).traceback
    assert told.startswith("UsageError: none of notebook, worker0,1 has imported nowhere: `import nowhere` on a ")
    assert "has imported a'b: " in two.run('%dist_reload "a\'b"', check=False).traceback


def test_a_call_to_another_version_is_told_once(two, project):
    assert two.run(SEEN).stderr == ""
    project.write(CODE.format(factor=400))
    assert two.run(SEEN).stderr == ""  # no member runs the new file yet
    first = two.run(f"%dist_reload losses -r 1\n{SEEN}")
    assert first.result == "(30, 400)"
    assert two.run(SEEN).stderr == ""
    told = r"losses is another version on worker1 than here \(losses.py changed .* ago\): %dist_reload losses\n"
    assert re.fullmatch(told, first.stderr)
    two.run("%dist_reload losses")
    assert two.run(SEEN).result == "(400, 400)"
    assert two.run(SEEN).stderr == ""


def test_a_call_between_workers_to_another_version_is_told_once(two, project):
    def import_versions(name):
        for rank in (0, 1):
            project.write(f"def scaled(x): return x + {rank}", name=name)
            assert two.run(f"%%remote {rank}\nimport {name}").stderr == ""  # no call has named it

    told = "{0} is another version on worker1 than on worker0: %dist_reload {0}\n"
    import_versions("measures")
    call = "%%remote 0\nrpc.rpc_sync('worker1', measures.scaled, (1,))"
    first = two.run(call)
    assert (first.result, first.stderr) == ("2", told.format("measures"))
    assert two.run(call).stderr == ""
    assert two.run("%dist_reload measures").stdout == "measures reloaded on worker0,1\n"
    assert two.run(call).stderr == ""
    import_versions("weights")
    code = "def through(): return rpc.rpc_sync('worker1', __import__('weights').scaled, (1,))"
    through = two.run(f"{code}\nrpc.rpc_sync('worker0', through)")  # no cell runs on worker0
    assert (through.result, through.stderr) == ("2", told.format("weights"))


def test_autoreload_reloads_on_workers_too(two, project):
    two.run("%load_ext autoreload\n%autoreload 2")
    two.run("1")
    # Only the main thread may set a handler.
    project.write(CODE.format(factor=5000) + "import signal\nsignal.signal(signal.SIGUSR2, signal.SIG_IGN)\n")
    reloaded = two.run(SEEN)  # no cell has run on a worker
    assert (reloaded.result, reloaded.stderr) == ("(5000, 5000)", "")
    project.write(CODE.format(factor=60000))
    assert two.run("%%remote\nscaled(1), losses.scaled(1)").stdout == "[worker0,1] (60000, 60000)\n"
    assert two.run(SEEN).stderr == ""


def test_a_worker_that_runs_a_cell_reloads_after_it(two, project):
    two.run("%%remote 1 -a\nimport time\nheld = True\nwhile held: time.sleep(0.01)\nprint(losses.scaled(1))")
    project.write(CODE.format(factor=7))
    assert two.run(SEEN).result == "(7, 60000)"
    two.run("rpc.rpc_sync('worker1', exec, ('import __main__; __main__.held = False',))")
    two.run("%sync")
    assert two.run(SEEN).result == "(7, 7)"


def test_autoreload_says_what_failed_once_and_leaves_out_what_it_is_told_to(two, project):
    project.write("def scaled(x:\n")
    first = two.run(SEEN)
    assert first.result == "(7, 7)"
    told = "%autoreload: losses keeps its old code, as the new code raises SyntaxError: '(' was never closed"
    assert all(f"[worker{rank}] {told}\n" in first.stderr for rank in (0, 1))
    assert "%autoreload: " not in two.run(SEEN).stderr
    two.run("%aimport -losses")
    project.write(CODE.format(factor=8))
    assert two.run(SEEN).result == "(7, 7)"
    two.run("%aimport losses\n%autoreload 0")
    assert two.run(SEEN).result == "(7, 7)"
    two.run("%autoreload 1")
    assert two.run(SEEN).result == "(8, 8)"
    two.run("%autoreload 0")


def test_a_worker_that_starts_again_has_the_new_code_of_a_preloaded_module(two, project):
    project.write(CODE.format(factor=9))
    two.run("%dist_restart 1", timeout=120)
    assert two.run("%remote 1 __import__('losses').scaled(1)").result == "9"


def test_ctrl_c_while_a_module_runs_again_leaves_the_old_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stopped.py").write_text("X = 1\n")
    module = importlib.import_module("stopped")
    monkeypatch.setitem(sys.modules, "stopped", module)
    (tmp_path / "stopped.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        reload_module("stopped")
    assert module.X == 1
