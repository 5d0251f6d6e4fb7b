"""`%dist_memory` and `%dist_free`, in a real notebook: who holds what, and what goes."""

import re
import time

import pytest
from frontend import Notebook


@pytest.fixture(scope="module")
def notebook():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --backend none\nimport torch, gc")
        yield notebook


def memory(notebook, magic="%dist_memory"):
    return notebook.run(magic).of("execute_result")[-1]["data"]


def rows(notebook):
    return memory(notebook)["text/plain"].splitlines()


def test_variables_containers_out_and_open_contexts(notebook):
    assert rows(notebook) == ["Nothing lives on any worker by reference."]
    notebook.run("x = rpc.remote('worker1', torch.ones, args=(250, 1000))\nx.to_here().sum()")
    notebook.run(
        "class Holder: pass\n"
        "holder = Holder(); holder.inner = {'deep': [rpc.remote('worker0', torch.ones, args=(10,))]}"
    )
    notebook.run("rpc.remote('worker0', torch.ones, args=(1000,))")
    number = notebook.run("n = max(Out); n").result
    notebook.run(
        "context = dist_autograd.context(); context_id = context.__enter__()\n"
        "leaf = torch.ones(500, requires_grad=True)\n"
        "loss = rpc.rpc_sync('worker1', torch.exp, args=(leaf,)).sum()"
    )
    told = rows(notebook)
    assert told[0] == "worker0: 4.0 KB, worker1: 1.0 MB"
    lines = [" ".join(line.split()) for line in told[2:]]
    assert lines[0] == f"worker0 Tensor float32(1000,) 4.0 KB notebook: Out[{number}]"
    assert lines[1] == "worker0 Tensor float32(10,) 40 B notebook: in holder"
    assert lines[2] == "worker1 Tensor float32(250, 1000) 1.0 MB notebook: x"
    assert lines[3].startswith("worker1 graph and gradients 2.0 KB notebook: context ")  # what exp() has saved
    assert lines[4].startswith("notebook graph and gradients 0 B notebook: context ")
    assert lines[5] == "1 of these, 4.0 KB, only Out, _ and tracebacks hold: %dist_free lets go of them"
    notebook.run("context.__exit__(None, None, None); del holder, loss")


def test_after_a_pass_in_a_context_that_is_open(notebook):
    notebook.run(
        "context_id = dist_autograd.open()\n"
        "leaf = torch.ones(500, requires_grad=True)\n"
        "loss = rpc.rpc_sync('worker1', torch.exp, args=(leaf,)).sum()\n"
        "dist_autograd.backward(context_id, [loss])"
    )
    (line,) = [line for line in rows(notebook) if line.startswith("notebook") and "graph and gradients" in line]
    assert "2.0 KB" in line  # of the leaf's gradient
    notebook.run("context_id.close(); del leaf, loss")


def test_several_in_one_object_at_several_depths(notebook):
    notebook.run(
        "class Model: pass\n"
        "model = Model(); model.head = rpc.remote('worker0', torch.ones, args=(1,))\n"
        "model.layers = [rpc.remote('worker0', torch.ones, args=(2 + n,)) for n in range(80)]\n"
        "model.layers[-1].to_here();"
    )
    lines = [" ".join(line.split()) for line in rows(notebook) if "in model" in line]
    assert len(lines) == 81
    assert all(line.endswith("notebook: in model") for line in lines)
    notebook.run("del model")


def test_an_error_that_the_user_has_kept(notebook):
    notebook.run(
        "def fail():\n    local = rpc.remote('worker0', torch.ones, args=(33,))\n    local.to_here()\n    1 / 0\n"
        "try:\n    fail()\nexcept ZeroDivisionError as error:\n"
        "    saved = error\n    saved.__cause__ = saved\n    raise",
        check=False,
    )
    (line,) = [" ".join(line.split()) for line in rows(notebook) if "(33,)" in line]
    assert line.endswith("notebook: a traceback, in saved")
    assert "(33,)" not in memory(notebook, "%dist_free")["text/plain"]
    notebook.run("at = saved.__traceback__\nwhile at.tb_next:\n    at = at.tb_next")
    assert notebook.run("at.tb_frame.f_locals['local'].owner_name()").result == "'worker0'"
    notebook.run("del saved, at")
    assert "(33,)" in memory(notebook, "%dist_free")["text/plain"]
    assert not [line for line in rows(notebook) if "(33,)" in line]


def test_what_others_hold_and_what_the_owner_has_besides(notebook):
    notebook.run("%%remote 0\nkept = None\ndef keep(rref):\n    global kept\n    kept = rref")
    notebook.run("%%remote 1 -o model\nweights = torch.nn.Linear(3, 2)\nweights")
    notebook.run("def keep(rref):\n    global kept\n    kept = rref\nrpc.rpc_sync('worker0', keep, args=(model,))")
    (line,) = [" ".join(line.split()) for line in rows(notebook) if "Linear" in line]
    assert re.fullmatch(r"worker1 Linear 32 B worker0: kept; worker1: Out\[\d+\], weights; notebook: model", line)
    notebook.run("del model\n%remote 0 globals().update(kept=None)")
    assert not [line for line in rows(notebook) if "Linear" in line]


def test_free_lets_go_of_what_only_the_shell_remembers(notebook):
    notebook.run("y = rpc.remote('worker1', torch.ones, args=(100, 1000))\ny")  # in Out as well, and a variable's
    notebook.run("[rpc.remote('worker1', torch.ones, args=(100, 1000)) for _ in range(2)]")
    unrelated = notebook.run("41 + 1").result
    failed = notebook.run(
        "def fail():\n    local = rpc.remote('worker0', torch.ones, args=(100, 1000))\n"
        "    local.to_here()\n    1 / 0\nfail()",
        check=False,
    )
    assert failed.error["ename"] == "ZeroDivisionError"
    told = "\n".join(rows(notebook))
    assert "notebook: a traceback" in told
    assert "notebook: Out[" in told
    freed = memory(notebook, "%dist_free")["text/plain"].splitlines()
    assert freed[0] in (
        "Let go of 3 references: 400 KB on worker0, 800 KB on worker1.",
        "Let go of 4 references: 404 KB on worker0, 800 KB on worker1.",  # what an earlier test left in Out
    )
    told = rows(notebook)
    assert not [line for line in told if "traceback" in line]
    lines = [" ".join(line.split()) for line in told if "Tensor" in line]
    assert any("notebook: Out[" in line and ", y" in line for line in lines)
    assert len(lines) == 2  # x and y
    assert notebook.run("y.to_here().sum().item()").result == "100000.0"
    assert notebook.run("42 in Out.values()").result == "True", unrelated
    assert memory(notebook, "%dist_free")["text/plain"].startswith("Out, _ and tracebacks hold nothing")


def test_looking_leaves_nothing_behind(notebook):
    notebook.run("z = rpc.remote('worker1', torch.ones, args=(7,)); z.to_here().sum().item()")
    for _ in range(2):
        memory(notebook)
    notebook.run("del z")
    deadline = time.monotonic() + 30  # the worker hears of it by a message
    while left := [line for line in rows(notebook) if "(7,)" in line]:
        assert time.monotonic() < deadline, left


def test_as_html(notebook):
    told = memory(notebook)["text/html"]
    assert "<table>" in told
    assert "held by" in told
