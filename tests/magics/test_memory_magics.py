"""`%dist_memory` and `%dist_free`, in a real notebook: how much is used, who holds what, and what goes."""

import re
from pathlib import Path

import pytest
from helpers.notebook.frontend import Notebook
from helpers.suite.python_path import TESTS
from helpers.waiting import wait_until


@pytest.fixture(scope="module")
def notebook():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --backend none\nimport torch, gc")
        yield notebook


def memory(notebook, magic="%dist_memory"):
    return notebook.run(magic).of("execute_result")[-1]["data"]


def rows(notebook, line="-v"):
    """The rows of what takes memory, and what is said below."""
    told = memory(notebook, f"%dist_memory {line}")["text/plain"].splitlines()
    return [" ".join(line.split()) for line in told[told.index("") + 2 :]]


def workers(notebook, line=""):
    """What is said of each worker's memory, by column."""
    table = memory(notebook, f"%dist_memory {line}")["text/html"].partition("</table>")[0]
    head, *lines = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("<tr")[1:]]
    return {line[0]: dict(zip(head, line, strict=True)) for line in lines}


def nbytes(told):
    """Bytes as they are written for people."""
    number, unit = told.split()[:2]
    return float(number) * 1000 ** ("B", "KB", "MB", "GB").index(unit)


def test_variables_containers_out_and_open_contexts(notebook):
    assert not [line for line in rows(notebook) if " reference " in line or " context " in line]
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
    lines = [line for line in rows(notebook) if " variable " not in line]
    new = " new" if "new" in lines[0] else ""
    for line, told in zip(
        lines,
        (
            rf"worker0 reference Tensor float32\(1000,\), made at In\[\d+\]:1 4.0 KB{new} notebook: Out\[{number}\]",
            rf"worker0 reference Tensor float32\(10,\), made at In\[\d+\]:2 40 B{new} "
            r"notebook: element 0 of list holder.inner\['deep'\] \(1 element\)",
            rf"worker1 reference Tensor float32\(250, 1000\), made at In\[\d+\]:1 1.0 MB{new} notebook: x",
        ),
        strict=False,
    ):
        assert re.fullmatch(told, line), line
    assert lines[3].startswith("worker1 context graph and gradients 2.0 KB")  # what exp() has saved
    assert "notebook: context " in lines[3]
    assert lines[4].startswith("notebook context graph and gradients 0 B")
    assert "1 of these, 4.0 KB, are held only by Out, _ and tracebacks: %dist_free drops them" in lines
    used = workers(notebook)
    assert (used["worker0"]["by reference"][:2], used["worker1"]["by reference"]) == ("4.", "1.0 MB")
    assert (used["worker0"]["contexts"], used["worker1"]["contexts"]) == ("0 B", "2.0 KB")
    notebook.run("context.__exit__(None, None, None); del holder, loss, leaf")


def test_after_a_pass_in_a_context_that_is_open(notebook):
    notebook.run(
        "context_id = dist_autograd.open()\n"
        "leaf = torch.ones(500, requires_grad=True)\n"
        "loss = rpc.rpc_sync('worker1', torch.exp, args=(leaf,)).sum()\n"
        "dist_autograd.backward(context_id, [loss])"
    )
    (line,) = [line for line in rows(notebook) if line.startswith("notebook context graph and gradients")]
    assert "2.0 KB" in line  # of the leaf's gradient
    notebook.run("context_id.close(); del leaf, loss")


def test_several_in_one_object_at_several_depths(notebook):
    notebook.run(
        "class Model: pass\n"
        "model = Model(); model.head = rpc.remote('worker0', torch.ones, args=(1,))\n"
        "model.layers = [rpc.remote('worker0', torch.ones, args=(2 + n,)) for n in range(80)]\n"
        "model.layers[-1].to_here();"
    )
    lines = [line for line in rows(notebook) if "model" in line and " reference " in line]
    assert len(lines) == 81
    (head,) = [line for line in lines if "float32(1,)" in line]
    assert head.endswith("notebook: attribute head of Model model")
    (last,) = [line for line in lines if "float32(81,)" in line]
    assert re.search(r", made at In\[\d+\]:3 .* notebook: element 79 of list model.layers \(80 elements\)$", last)
    folded = [line for line in rows(notebook, "") if "model" in line and " reference " in line]
    assert len(folded) in (8, 9)  # an earlier test may have left a larger one
    assert re.match(r"worker0 reference 7[34] more Tensors", folded[-1])
    assert "elements of list model.layers (80 elements), attribute head of Model model" in folded[-1]
    notebook.run("del model")


def test_an_error_that_the_user_has_kept(notebook):
    notebook.run(
        "def fail():\n    local = rpc.remote('worker0', torch.ones, args=(33,))\n    local.to_here()\n    1 / 0\n"
        "try:\n    fail()\nexcept ZeroDivisionError as error:\n"
        "    saved = error\n    saved.__cause__ = saved\n    raise",
        check=False,
    )
    (line,) = [line for line in rows(notebook) if "reference Tensor float32(33,)" in line]
    assert re.search(r"notebook: a traceback, .*in saved$", line)
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
    (line,) = [line for line in rows(notebook) if "Linear" in line]
    assert re.fullmatch(
        r"worker1 reference Linear 32 B( new)? worker0: kept; worker1: Out\[\d+\], weights; notebook: model", line
    )
    notebook.run("del model\n%remote 0 globals().update(kept=None)")
    (line,) = [line for line in rows(notebook) if "Linear" in line]
    assert re.fullmatch(r"worker1 variable Linear 32 B( new)? weights", line)  # which it is still


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
        "Dropped 3 references: 400 KB on worker0, 800 KB on worker1.",
        "Dropped 4 references: 404 KB on worker0, 800 KB on worker1.",  # what an earlier test left in Out
    )
    told = rows(notebook)
    assert not [line for line in told if "traceback" in line]
    lines = [line for line in told if " reference Tensor" in line]
    assert any("notebook: Out[" in line and ", y" in line for line in lines)
    assert len(lines) == 2  # x and y
    assert notebook.run("y.to_here().sum().item()").result == "100000.0"
    assert notebook.run("42 in Out.values()").result == "True", unrelated
    assert memory(notebook, "%dist_free")["text/plain"].startswith("Nothing was dropped")


def test_looking_leaves_nothing_behind(notebook):
    notebook.run("z = rpc.remote('worker1', torch.ones, args=(7,)); z.to_here().sum().item()")
    for _ in range(2):
        memory(notebook)
    notebook.run("del z")
    # The worker hears of it by a message.
    wait_until(lambda: [line for line in rows(notebook) if "(7,)" in line], equals=[])


def test_as_html(notebook):
    told = memory(notebook)["text/html"]
    assert told.count("<table>") == 2
    assert "held by" in told
    assert "not accounted for" in told


# -- the workers' own memory ----------------------------------------------------------------------


def test_variables_of_workers_and_of_the_notebook(notebook):
    notebook.run(
        "%%remote\nmodel = torch.nn.Linear(1000, 1000, bias=False)\noptimizer = torch.optim.Adam(model.parameters())\n"
        "model(torch.ones(1, 1000)).sum().backward(); optimizer.step()\n"
        "history = {'inputs': [torch.ones(250_000) for _ in range(3)]}; alias = history"
    )
    notebook.run("mine = torch.ones(500_000)")
    lines = rows(notebook, "")
    for expected in (
        # the weight and its gradient
        r"worker0,1 variable Linear 8.0 MB each( new)? model; mostly attribute weight of Linear model: Parameter",
        r"worker0,1 variable Adam 8.0 MB each( new)? optimizer; mostly .*",
        r"worker0,1 variable dict of 1 list 3.0 MB each( new)? history, alias; "
        r"mostly item 'inputs' of dict history \(1 item\): list of 3 Tensors float32",
        r"notebook variable Tensor float32\(500000,\) 2.0 MB( new)? mine",
    ):
        assert [line for line in lines if re.fullmatch(expected, line)], (expected, lines)
    used = workers(notebook)
    assert 18e6 < nbytes(used["worker0"]["variables"]) < 22e6
    assert nbytes(used["notebook"]["variables"]) >= 2e6
    assert re.fullmatch(r"\S+ MB \(\S+ MB at start\)", used["worker0"]["not accounted for"])
    assert not [line for line in rows(notebook, "worker1") if line.startswith(("worker0", "notebook"))]
    assert not [line for line in rows(notebook, "notebook, 0") if line.startswith("worker1")]
    failed = notebook.run("%dist_memory worker7", check=False)
    assert "there is no worker 'worker7'" in failed.error["evalue"]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the kernel does not say")
def test_the_parts_are_the_whole(notebook):
    notebook.run("%dist_push mine")  # through shared memory, for which nothing is counted twice
    for name, used in workers(notebook).items():
        parts = [told for column, told in used.items() if column not in ("worker", "memory", "since last look")]
        assert abs(sum(map(nbytes, parts)) - nbytes(used["memory"])) < 2e6, (name, used)  # as they are rounded


def test_what_is_a_variable_and_has_a_reference_counts_once(notebook):
    before = workers(notebook)["worker1"]
    notebook.run("%%remote 1 -o wide\nwide_there = torch.ones(3, 10**6)\nview = [wide_there[1]]\nwide_there")
    (line,) = [line for line in rows(notebook, "") if "(3, 1000000)" in line]
    assert line.startswith("worker1 reference Tensor float32(3, 1000000) 12.0 MB new worker1: Out[")
    assert line.endswith("], element 0 of list view (1 element), wide_there; notebook: wide")
    after = workers(notebook)["worker1"]
    assert 11e6 < nbytes(after["by reference"]) - nbytes(before["by reference"]) < 13e6
    assert nbytes(after["variables"]) - nbytes(before["variables"]) < 1e6
    notebook.run("%remote 1 globals().update(wide_there=0, view=0)\ndel wide")


def test_a_leak_is_growth_since_the_last_look(notebook):
    notebook.run("%%remote 0\nleak = []\nweight = torch.ones(1_000_000, requires_grad=True)")
    memory(notebook)
    notebook.run("%%remote 0\nfor _ in range(3): leak.append(weight.exp().sum())")  # each keeps its graph
    lines = memory(notebook)["text/plain"].splitlines()
    (line,) = [" ".join(line.split()) for line in lines if line.endswith(" leak")]
    assert re.fullmatch(
        r"worker0 variable list of 3 Tensors float32 with their graphs \(7 nodes\) 12.0 MB \+12.0 MB leak", line
    ), line
    (line,) = [" ".join(line.split()) for line in lines if line.endswith(" weight")]
    assert line == "worker0 variable Tensor float32(1000000,) 4.0 MB weight"
    assert lines[1].startswith("worker0")
    assert re.search(r"\+1\d\.\d MB", lines[1])
    notebook.run("%remote 0 leak.clear()")
    assert "-12.0 MB" in memory(notebook)["text/plain"]


def test_planted_leaks_are_told_to_the_element(notebook):
    notebook.run(
        "%%remote\nclass Trainer:\n    def __init__(self): self.cache = {}\n"
        "t = Trainer(); t.cache.update({n: torch.ones(50_000) for n in range(8)}, a=1, b=2, c=3, d=4)\n"
        "def attach(layer):\n    outputs = []\n    def hook(module, inputs, output): outputs.append(output)\n"
        "    layer.register_forward_hook(hook)\nleaky = torch.nn.Linear(100, 100)\nattach(leaky)\n"
        "for _ in range(5): leaky(torch.ones(1000, 100))\n"
        "activations = [torch.ones(10_000) for _ in range(30)]"
    )
    lines = [re.sub(r"In\[\d+\]", "In[n]", line.replace(" new ", " ")) for line in rows(notebook, "")]
    for expected in (
        "worker0,1 variable Trainer 1.6 MB each t; mostly attribute cache of Trainer t: "
        "dict of 12: 8 Tensor float32, 4 int",
        "worker0,1 variable Linear with graphs (12 nodes) 4.0 MB each leaky; mostly a closure of hook (In[n]:7), "
        "in leaky: list of 5 Tensors float32 with their graphs",
        "worker0,1 variable list of 30 Tensors float32 1.2 MB each activations",
    ):
        assert expected in lines, [line for line in lines if expected.split()[2] in line]
    notebook.run("%remote all globals().update(t=0, leaky=0, activations=0)")


def test_which_line_made_a_reference(notebook):
    """A line of the notebook, and of a worker that returns a reference which it does not keep."""
    notebook.run("# a line\ndef forget():\n    held.append(rpc.remote('worker1', torch.ones, args=(3001,)))\nheld = []")
    notebook.run("for n in range(5): forget()")
    (line,) = [line for line in rows(notebook, "") if "(3001,)" in line]
    made = r"worker1 reference 5 x Tensor float32\(3001,\), made at In\[\d+\]:3 60.0 KB.* notebook: "
    assert re.fullmatch(made + r"elements of list held \(5 elements\)", line), line
    notebook.run("%%remote 1\ndef make():\n    value = torch.ones(3002)\n    return rpc.RRef(value)")
    notebook.run(
        "def make():\n    value = torch.ones(3002)\n    return rpc.RRef(value)\nown = rpc.rpc_sync('worker1', make)"
    )
    notebook.run("%%remote 0\nimport nbdist.rpc as rpc\nfrom_0 = rpc.remote('worker1', torch.ones, args=(3003,))")
    told = rows(notebook)
    (line,) = [line for line in told if "(3002,)" in line]
    assert re.fullmatch(r"worker1 reference .*, made at In\[\d+\]:4 12.0 KB new notebook: own", line), line
    (line,) = [line for line in told if "(3003,)" in line]
    assert re.fullmatch(r"worker1 reference .*, made at In\[\d+\]:3 12.0 KB new worker0: from_0", line), line
    notebook.run("del held, own")
    notebook.run("%remote 0 globals().update(from_0=0)")


def test_a_reference_in_the_variable_of_its_owner(notebook):
    notebook.run("%%remote 1\nlosses = [(torch.ones(9, requires_grad=True) * 2).sum() for _ in range(4)]")
    notebook.run("def third():\n    import sys\n    return sys.modules['__main__'].losses[2]")
    notebook.run("there = rpc.remote('worker1', third); there.confirmed_by_owner()")
    (line,) = [line for line in rows(notebook) if "notebook: there" in line]
    assert re.fullmatch(
        r"worker1 reference Tensor float32\(\) with its graph \(3 nodes\), made at In\[\d+\]:1 \d+ B new "
        r"worker1: element 2 of list losses \(4 elements\); notebook: there",
        line,
    ), line
    notebook.run("del there")


def test_small_values_of_workers_that_differ(notebook):
    notebook.run("%%remote\nimport os\nof_rank = {'rank': int(os.environ['RANK'])}; of_all = {'size': 2}")
    folded = [line for line in rows(notebook, "") if " variable " in line]
    apart = [line.split()[0] for line in folded if "of_rank" in line]
    assert sorted(apart) == ["worker0", "worker1"]
    assert [line.split()[0] for line in folded if "of_all" in line] == ["worker0,1"]
    notebook.run("%remote all globals().update(of_rank=0, of_all=0)")


def test_while_a_worker_is_busy(notebook):
    cell = notebook.run("%%remote 0 -a\nwhile not globals().get('stop'): pass").of("execute_result")
    assert cell
    notebook.run("running = _")
    used = workers(notebook)
    assert set(used) == {"worker0", "worker1", "notebook"}
    assert nbytes(used["worker0"]["variables"]) > 1e6
    notebook.run("def end():\n    import sys\n    sys.modules['__main__'].stop = True\nrpc.rpc_sync('worker0', end)")
    notebook.run("running.wait()")


def test_nothing_of_the_users_is_called(notebook):
    make = (
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nfrom helpers.abuse import hostile_objects as hostile\n"
        "odd = hostile.every(torch.ones(250_000))\n"
    )
    notebook.run(f"%%remote\n{make}first, *_ = odd\nclasses = [type(each) for each in odd]\nhostile.called.clear()")
    notebook.run("def first_of():\n    import sys\n    return sys.modules['__main__'].first")
    notebook.run("odd_there = rpc.remote('worker1', first_of); odd_there.confirmed_by_owner()")
    notebook.run(f"{make}hostile.called.clear();")
    for line in ("", "-v", "worker1"):
        told = memory(notebook, f"%dist_memory {line}")["text/plain"]
    assert "HostilePlain" in told
    notebook.run("%dist_free")
    for target in (0, 1):
        assert notebook.run(f"%remote {target} hostile.called").result == "[]"
    assert notebook.run("hostile.called").result == "[]"
    notebook.run("del odd, odd_there")
    notebook.run("%remote globals().update(odd=0, first=0, classes=0)", check=False)


def test_very_many_objects(notebook):
    notebook.run("many = [{'step': number, 'loss': [float(number)]} for number in range(100_000)]")
    (line,) = [line for line in rows(notebook, "") if line.endswith(" many")]
    assert re.fullmatch(
        r"notebook variable list of 100,000, the first 1,000: 1,000 dict at least \d+\.\d MB( new)? many", line
    )
    assert "at least: there were more objects than a look visits, or they changed meanwhile" in rows(notebook, "")
    notebook.run("del many")


def test_what_the_last_error_holds(notebook):
    notebook.run("def fail():\n    local = torch.ones(1_000_000)\n    1 / 0\nfail()", check=False)
    (line,) = [line for line in rows(notebook) if line.endswith("a traceback") and " variable " in line]
    assert line.startswith("notebook variable values of the frames 4.0 MB")
    notebook.run("1 + 1;")


def test_a_restarted_worker_starts_anew(notebook):
    memory(notebook)
    notebook.run("%dist_restart 1")
    used = workers(notebook)
    assert used["worker1"]["since last look"] == "started anew"
    assert used["worker0"]["since last look"] != "started anew"
    assert used["worker1"]["variables"] == "0 B"
    assert workers(notebook)["worker1"]["since last look"] != "started anew"
