"""Older kernels: those of Colab and Kaggle, and the oldest ipykernel 7. Notebook and workers run on them."""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from helpers.notebook import older_packages
from helpers.notebook.frontend import Notebook
from helpers.suite.python_path import python_path

LOSING = "ipykernel-7.3"
ENVIRONMENTS = [LOSING, "colab", pytest.param("kaggle", marks=pytest.mark.soak)]
"""Kaggle's kernel is Colab's; its ipywidgets are newer."""
AWAY = tempfile.gettempdir()
"""IPython 7 puts the working directory first on the path, and ipykernel 7 takes it from there: neither is ours."""


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def folder(name):
    with tempfile.TemporaryDirectory(prefix="nbdist-tests-") as folder:
        older_packages.install(name, Path(folder))
        yield folder


@pytest.fixture(scope="module")
def old(folder):
    with Notebook(env=python_path(folder), cwd=AWAY) as notebook:
        notebook.run("%dist_init -n 2 -t 60")
        yield notebook
        assert "0 processes left" in notebook.run("%dist_shutdown").stdout


def test_they_are_what_runs(old, name):
    listed = dict(pin.split("==") for pin in older_packages.pins(name))
    for package in ("ipykernel", "IPython", "ipywidgets", "numpy"):
        if wanted := listed.get(package.lower()):
            assert old.run(f"__import__({package!r}).__version__").result == repr(wanted)
            assert old.run(f"%remote all __import__({package!r}).__version__").result == repr([wanted, wanted])


def test_cells_calls_and_errors(old):
    assert old.run("%%remote\nprint('x'); print(rank)").stdout == "[worker0,1] x\n[worker0] 0\n[worker1] 1\n"
    cell = old.run("%%remote 1\n1/0", check=False)
    number = cell.of("execute_input")[0]["execution_count"]
    assert f"Cell In[{number}] on worker1" in cell.traceback
    old.run("def divide(by):\n    return 1 / by")
    cell = old.run("rpc.rpc_sync('worker1', divide, args=(0,))", check=False)
    assert "raised on worker1" in cell.traceback  # a note of the error
    assert "return 1 / by" in cell.traceback
    old.run("def speak(word):\n    print('said', word)\n    return word")
    cell = old.run("rpc.rpc_sync('worker1', speak, args=('hello',))")
    old.until(lambda: cell.stdout)
    assert cell.stdout == "[worker1] said hello\n"
    assert old.run("%%remote\nt = torch.ones(1); dist.all_reduce(t); t.item()").stdout == "[worker0,1] 2.0\n"
    assert old.run("%remote 1 rank").result == "1"


def test_no_request_is_lost_that_comes_while_another_is_answered(old, name):
    moments = random.Random(1)
    for _ in range(1500 if name == LOSING else 100):  # one in some hundred is, where it answers past its stream
        message = old.client.execute("pass", silent=True)
        time.sleep(moments.random() * 0.006)
        waiting = {message, old.client.kernel_info()}
        while waiting:
            waiting.discard(old.client.get_shell_msg(timeout=20)["parent_header"]["msg_id"])


def test_output_after_the_cell_input_and_completion(old):
    cell = old.run("%%remote 1 -a\nimport time\ntime.sleep(0.3)\nprint('late')")
    old.until(lambda: "late" in cell.stdout)
    old.run("_.wait()")
    old.answers.append(lambda content: "bob" if content["prompt"] == "name? " else "")
    assert old.run("%%remote 1\ninput('name? ')").result == "'bob'"
    assert "rank" in old.complete("%%remote 1\nran")["matches"]


def test_interrupts(old):
    for target, names in (("", ("worker0", "1")), (" 0", ("worker0",))):
        cell = old.send(f"%%remote{target}\nimport time; print(f'started {{rank}}', flush=True); time.sleep(600)")
        old.until(lambda cell=cell, names=names: cell.stdout.count("started") == len(names))
        old.interrupt()
        old.finish(cell)
        assert cell.error["ename"] == "KeyboardInterrupt"
        assert all(name in cell.traceback for name in names)
        old.run("pass")  # sent again where ipykernel 6 drops it: the next cell is not
    assert old.run("%%remote\nprint(1)").stdout == "[worker0,1] 1\n"


def test_an_interrupt_of_a_magic_shows_the_users_line_alone(old):
    old.run("%%remote 0 -a\nimport time; time.sleep(600)")
    cell = old.send("print('begun', flush=True)\n%dist_restart -p")
    old.until(lambda: cell.stdout)
    time.sleep(0.5)  # of the wait itself nothing tells
    old.interrupt()
    old.finish(cell)
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert "'dist_restart'" in cell.traceback
    assert len(cell.traceback.splitlines()) < 15, cell.traceback
    old.run("from nbdist import Cluster; Cluster.current.interrupt()")


def test_widgets_both_ways(old):
    pytest.importorskip("ipywidgets")
    cell = old.run(
        "%%remote 0\nimport ipywidgets\nslider = ipywidgets.IntSlider()\nseen = []\n"
        "slider.observe(lambda change: seen.append(change['new']), 'value')\nslider"
    )
    opened = [
        content for content in cell.of("comm_open") if content["data"]["state"].get("_model_name") == "IntSliderModel"
    ]
    data = {"method": "update", "state": {"value": 7}, "buffer_paths": []}
    message = old.client.session.msg("comm_msg", {"comm_id": opened[0]["comm_id"], "data": data})
    old.client.shell_channel.send(message)
    assert old.run("%remote 0 (slider.value, seen)").result == "(7, [7])"


def test_a_death_and_a_return(old):
    cell = old.run("%%remote 1\nimport os; os._exit(3)", check=False)
    assert "worker1 exited with code 3" in cell.error["evalue"]
    old.run("%dist_restart -p")
    assert old.run("%%remote\nt = torch.ones(1); dist.all_reduce(t); t.item()").stdout == "[worker0,1] 2.0\n"


def test_threads_keep_their_cells(old):
    """Output of calls that run at the same time on one worker goes to the cells that made them."""
    old.run(
        "import time\ndef speak(word):\n    for number in range(3):\n        print(word, number)\n"
        "        time.sleep(0.1)\n    return word"
    )
    cells = [old.run(f"{word} = rpc.rpc_async('worker0', speak, args=({word!r},))") for word in ("one", "two")]
    old.run("one.wait(), two.wait()")
    for word, cell in zip(("one", "two"), cells, strict=True):
        old.until(lambda cell=cell: "2" in cell.stdout)
        assert cell.stdout == "".join(f"[worker0] {word} {number}\n" for number in range(3))


def test_cards_and_pictures(old):
    cell = old.run("rref = rpc.remote('worker1', torch.ones, args=(3,))\nrref.to_here()\nrref")
    assert "application/vnd.jupyter.widget-view+json" in cell.displays[0]
    assert any("RRef on worker1" in data.get("text/plain", "") for data in cell.displays)
    assert "worker1" in old.run("%dist_status").value["text/plain"]


COLAB = """
import sys, types
MIME = "application/vnd.jupyter.widget-view+json"

def hook(message):
    if MIME in message["content"].get("data", {}):
        message["content"].setdefault("metadata", {}).setdefault(MIME, {})["colab"] = "the manager of widgets"
    return message

google, colab, output = (types.ModuleType(name) for name in ("google", "google.colab", "google.colab.output"))
output._widgets = types.SimpleNamespace(_installed_url=None)

def enable_custom_widget_manager():
    if output._widgets._installed_url is None:
        get_ipython().display_pub.register_hook(hook)
    output._widgets._installed_url = "somewhere"

output.enable_custom_widget_manager = enable_custom_widget_manager
sys.modules |= {module.__name__: module for module in (google, colab, output)}
output.enable_custom_widget_manager()
"""
"""What Colab does so that its page can draw widgets of other packages, as far as the kernel sees it."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak) if name == LOSING else name for name in ENVIRONMENTS],
    indirect=True,
)
def test_what_colab_adds_to_widgets_survives(folder):
    widget = "application/vnd.jupyter.widget-view+json"
    with Notebook(env=python_path(folder), cwd=AWAY) as notebook:
        notebook.run(COLAB)
        notebook.run("%dist_init -n 2 --backend none -t 60")
        shown = "from IPython.display import display\nimport ipywidgets\ndisplay(ipywidgets.IntSlider())"
        for code in ("%dist_panel", "rpc.remote('worker1', torch.ones, args=(3,))", f"%%remote 1\n{shown}", shown):
            contents = notebook.run(code).of("display_data")
            [content] = [content for content in contents if widget in content["data"]]
            assert content["metadata"][widget]["colab"], code
            pictures = [content for content in contents if "text/html" in content["data"]]
            assert not any(content["metadata"] for content in pictures)
            assert bool(pictures) == ("display(" not in code), "a view has a picture, for pages without the widget"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_all_the_rest_runs_on_it_too(name, folder):
    """Those of its tests that compare what is shown to the letter are made for today's IPython, and left out."""
    environment = {**os.environ, "NBDIST_TEST_KERNEL_PATH": str(folder)}
    tests = os.path.dirname(__file__)
    command = [sys.executable, "-m", "pytest", tests, os.path.join(os.path.dirname(tests), "magics")]
    if name != LOSING:
        command += [f"--ignore={tests}/test_parity.py"]
    assert subprocess.run(command, env=environment, timeout=3500).returncode == 0
