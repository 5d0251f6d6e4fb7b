"""References as the values of cells: what reaches the page, from a real kernel."""

import pytest
from helpers.notebook.frontend import Notebook

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def watched():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --backend none")
        notebook.run("import torch, time, gc")
        yield notebook


@pytest.fixture(scope="module")
def unwatched():
    with Notebook(watched=False) as notebook:
        notebook.run("%dist_init -n 2 --backend none\nimport torch")
        yield notebook


def states(notebook, model, name):
    """The values that a trait of a widget was given."""
    own = [each["content"] for each in notebook.comms if each["content"]["comm_id"] == model]
    return [content["data"]["state"][name] for content in own if name in content.get("data", {}).get("state", {})]


def closed(notebook, model):
    """Whether a widget has been closed."""
    return any(each["msg_type"] == "comm_close" and each["content"]["comm_id"] == model for each in notebook.comms)


def test_where_somebody_watches_there_is_a_card(watched):
    cell = watched.run("rref = rpc.remote('worker1', torch.nn.Linear, args=(3, 2))\nrref")
    told = cell.value
    assert told["text/plain"] == "<RRef on worker1>"
    assert "worker1" in told["text/html"]
    model = told[WIDGET]["model_id"]
    watched.until(lambda: any("Linear" in each and "confirmed" in each for each in states(watched, model, "value")))


def test_a_reference_has_one_card(watched):
    watched.run("one = rpc.remote('worker1', torch.ones, args=(3,))")
    ids = {watched.run("one").value[WIDGET]["model_id"] for _ in range(3)}
    assert len(ids) == 1
    count = "len(__import__('ipywidgets').widgets.widget._instances)"
    before = int(watched.run(count).result)
    watched.run("rpc.remote('worker1', torch.ones, args=(3,))")
    assert int(watched.run(count).result) == before + 1  # layout and style are shared


def test_a_card_keeps_nothing_alive_and_is_closed_with_its_reference(watched):
    shown = watched.run("short = rpc.remote('worker1', torch.ones, args=(2,)); display(short)")
    model = shown.value[WIDGET]["model_id"]
    watched.run("del short; gc.collect()")
    watched.until(lambda: closed(watched, model))
    assert "released" in states(watched, model, "value")[-1]
    assert states(watched, model, "live") == [True, False]


def test_so_many_are_live(watched):
    watched.run("many = [rpc.remote('worker0', int, args=(n,)) for n in range(70)]")
    watched.run("for each in many: display(each)", timeout=120)
    assert watched.run("len(__import__('nbdist.views.widgets.card', fromlist=['_']).LIVE)").result == "64"
    watched.run("del many, each; gc.collect()")


def test_no_display_makes_a_call(watched):
    watched.run("quiet = rpc.remote('worker1', torch.ones, args=(2,)); quiet.to_here()")
    watched.run(
        "from nbdist import trace\nsent = []\n"
        "end = trace.subscribe(lambda event, told: sent.append(event) if event == 'call.sent' else None)"
    )
    watched.run("quiet")
    watched.run("[quiet, quiet]")
    watched.run("repr(quiet)")
    assert watched.run("end(); sent").result == "[]"


def test_lists_and_dicts_are_one_table(watched):
    watched.run("pair = [rpc.remote(name, torch.ones, args=(2,)) for name in ('worker0', 'worker1')]")
    told = watched.run("pair").value
    assert told["text/plain"] == "[<RRef on worker0>, <RRef on worker1>]"
    assert told["text/html"].count("<tr>") == 3
    assert WIDGET in told
    assert watched.run("{'a': pair[0]}").value["text/plain"] == "{'a': <RRef on worker0>}"
    assert watched.run("(pair[0],)").value["text/plain"] == "(<RRef on worker0>,)"
    assert watched.run("[1, 2]").result == "[1, 2]"
    assert watched.run("{}").result == "{}"
    assert "text/html" not in watched.run("[pair[0], 1]").value


SLOWLY = """
def slowly(x):
    import time
    time.sleep(2.0)
    if x < 0:
        raise ValueError(f"{x} is negative\\nin a second line")
    return torch.ones(x)
"""


def pictures(cell):
    """The texts and HTML that a cell's picture has had, the first one included."""
    every = [*cell.displays, *(content["data"] for content in cell.of("update_display_data"))]
    return [data for data in every if "text/html" in data]


def test_the_rows_of_a_table_come_up_to_date_and_so_does_the_picture(watched):
    watched.run(SLOWLY)
    cell = watched.run("several = [rpc.remote('worker1', slowly, args=(n,)) for n in (3, -2)]\nseveral")
    model = cell.value[WIDGET]["model_id"]
    assert cell.value["text/html"].count("on its way") == 2
    watched.until(lambda: any("confirmed" in each and "ValueError" in each for each in states(watched, model, "value")))
    told = states(watched, model, "value")[-1]
    assert "Tensor float32(3,)" in told
    assert "ValueError: -2 is negative<" in told
    assert "on its way" not in told
    watched.until(lambda: pictures(cell)[-1]["text/html"].count("on its way") == 0)
    last = pictures(cell)[-1]
    assert "ValueError: -2 is negative<" in last["text/html"]
    assert last["text/plain"] == "[<RRef on worker1>, <RRef on worker1, failed: ValueError: -2 is negative>]"
    watched.run("del several[0]; gc.collect()")  # nobody refers to the first one any more
    watched.until(lambda: closed(watched, model))
    watched.until(lambda: "released" in pictures(cell)[-1]["text/html"])
    assert "Tensor float32(3,)" in pictures(cell)[-1]["text/html"]


def test_a_reference_to_a_failed_call_says_so(watched):
    watched.run(SLOWLY)
    cell = watched.run("broken = rpc.remote('worker1', slowly, args=(-1,))\nbroken")
    model = cell.value[WIDGET]["model_id"]
    watched.until(lambda: closed(watched, model))
    told = states(watched, model, "value")[-1]
    assert "failed</span>" in told
    assert "ValueError: -1 is negative<" in told
    assert "confirmed" not in told
    watched.until(lambda: "failed" in pictures(cell)[-1]["text/plain"])
    assert pictures(cell)[-1]["text/plain"] == "<RRef on worker1, failed: ValueError: -1 is negative>"
    again = watched.run("broken").value
    assert WIDGET not in again
    assert again == watched.run("[broken][0]").value
    assert "<RRef to an error (ValueError: -1 is negative) on worker1, failed>" in (
        watched.run("print(repr(broken))").stdout
    )
    # By whose class its methods are not judged: what is raised is the call's own error.
    failed = watched.run("broken.remote().detach().to_here()", check=False)
    assert failed.error["ename"] == "ValueError"


def test_a_card_that_is_released_keeps_its_type(watched):
    cell = watched.run("kept = rpc.remote('worker1', torch.ones, args=(4,))\nkept.to_here()\nkept")
    model = cell.value[WIDGET]["model_id"]
    watched.run("kept.release()")
    watched.until(lambda: closed(watched, model))
    told = states(watched, model, "value")[-1]
    assert "released</span>" in told
    assert "Tensor float32(4,)" in told
    again = watched.run("kept").value
    assert "Tensor float32(4,)" in again["text/html"]
    assert again["text/plain"] == "<RRef on worker1, released>"
    assert "<RRef to Tensor float32(4,) on worker1, released>" in watched.run("print(repr(kept))").stdout


def test_lists_of_a_class_of_the_users_show_themselves(watched):
    watched.run("class Own(list):\n    def _ipython_display_(self):\n        print('as I like')")
    assert watched.run("Own([1])").stdout == "as I like\n"


def test_when_an_owner_is_lost_or_the_cluster_is_shut_down_cards_and_tables_say_so():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --backend none\nimport torch, os")
        notebook.run("one, two = (rpc.remote(name, torch.ones, args=(3,)) for name in ('worker0', 'worker1'))")
        notebook.run("one.to_here(); two.to_here()")
        lost, kept, both = (notebook.run(code) for code in ("one", "two", "[one, two]"))
        notebook.run("rpc.rpc_async('worker0', os._exit, args=(3,)).wait()", check=False)
        notebook.until(lambda: "lost with its worker" in pictures(lost)[-1]["text/html"])
        assert "WorkerLost: " in pictures(lost)[-1]["text/html"]
        assert "Tensor float32(3,)" in pictures(lost)[-1]["text/html"]
        notebook.run("%dist_shutdown")
        notebook.until(lambda: "its cluster has ended" in pictures(both)[-1]["text/html"])
        assert "lost with its worker" in pictures(both)[-1]["text/html"]
        for cell in (kept, both):
            assert "its cluster has ended" in pictures(cell)[-1]["text/html"]
            assert "Tensor float32(3,)" in pictures(cell)[-1]["text/html"]
            assert closed(notebook, cell.value[WIDGET]["model_id"])


def test_where_nobody_watches_it_is_the_same_each_time(unwatched):
    unwatched.run("import nbdist.views.displays as displays; displays._VALUE_SECONDS = 30")
    unwatched.run("def slowly(x):\n    import time; time.sleep(0.2)\n    return x")
    code = "x = rpc.remote('worker1', slowly, args=(torch.ones(2),))\nx"
    first, second = (unwatched.run(code).value for _ in range(2))
    assert first == second
    assert WIDGET not in first
    assert "Tensor float32(2,)" in first["text/html"]
    assert "confirmed" in first["text/html"]


def test_peek_and_release(watched):
    watched.run("rref = rpc.remote('worker1', torch.arange, args=(4.0,))")
    assert "mean 1.5" in watched.run("rref.peek()").result
    watched.run("rref.release()")
    failed = watched.run("rref.to_here()", check=False)
    assert failed.error["ename"] == "RRefError"
    assert "release()" in failed.error["evalue"]
    assert "released" in watched.run("repr(rref)").result


def test_dist_diff(watched):
    watched.run("%%remote\nimport torch\nstate = {'w': torch.ones(2), 'rank': rank}")
    assert watched.run("%dist_diff state['w']").result == "state['w'] is equal on 2 workers"
    told = watched.run("%dist_diff state").result
    assert told == "state differs: 1 of 2 parts, from worker0's\n  state.rank on worker1: 1 instead of 0"
    assert watched.run("%dist_diff state -r 1").result == "state is equal on worker1 (2 parts)"
    assert watched.run("%dist_diff", check=False).error["ename"] == "UsageError"
    failed = watched.run("%dist_diff nothing", check=False)
    assert "nothing" in failed.error["evalue"]


def test_a_watched_cell_in_the_background(watched):
    watched.run("def twice(x):\n    return x * 2")
    cell = watched.run(
        "%%watch --paused -a\nx = torch.ones(2, requires_grad=True)\n"
        "with dist_autograd.context() as context_id:\n"
        "    dist_autograd.backward(context_id, [rpc.rpc_sync('worker1', twice, args=(x,)).sum()])\n"
        "    got = dist_autograd.get_gradients(context_id)[x].tolist()"
    )
    assert ".step(3)" in cell.result
    assert watched.run("handle = _\nlen(handle.step(2))").result == "2"
    assert "paused" in watched.run("print(handle)").stdout
    watched.run("handle.run(); handle.wait(30)")
    assert watched.run("got").result == "[2.0, 2.0]"
    assert "critical path" in watched.run("print(handle)").stdout


def test_a_watch_of_the_users_own_is_a_view(watched):
    cell = watched.run(
        "context_id = dist_autograd.open()\n"
        "loss = rpc.rpc_sync('worker1', twice, args=(torch.ones(2, requires_grad=True),)).sum()\n"
        "seen = dist_autograd.watch(context_id, paused=True)\n"
        "seen"
    )
    told = cell.value
    assert told["text/plain"].startswith("<Watch of context ")
    model = told[WIDGET]["model_id"]
    watched.run("handle = context_id.backward_async(loss); len(seen.step(2))")
    watched.until(lambda: any(": 2 of " in each["told"] for each in states(watched, model, "snapshot")))
    assert watched.run("seen").value[WIDGET]["model_id"] == model
    watched.run("seen.run(); handle.wait(); context_id.close()")
    watched.until(lambda: states(watched, model, "snapshot")[-1]["ended"])


def test_a_watched_cell_that_fails(watched):
    failed = watched.run("%%watch\n1 / 0", check=False)
    assert failed.error["ename"] == "ZeroDivisionError"
    assert watched.run("%%watch\n1 + 1").result == "2"


LOCAL = "torch.ones(2, requires_grad=True).sum().backward()"


@pytest.mark.parametrize(("cell", "where"), [(LOCAL, "notebook"), (f"%%remote\n{LOCAL}", "worker0,1")])
def test_a_local_pass_is_drawn(watched, unwatched, cell, where):
    told = watched.run(f"%%watch\n{cell}").value
    watched.until(lambda: states(watched, told[WIDGET]["model_id"], "snapshot")[-1]["ended"])
    assert f"backward() on {where}: " in states(watched, told[WIDGET]["model_id"], "snapshot")[-1]["told"]
    (*_, picture) = unwatched.run(f"%%watch\n{cell}").of("update_display_data")
    for kind in ("text/plain", "text/html"):
        assert f"backward() on {where}: " in picture["data"][kind]


def test_a_watched_cell_without_a_pass_says_what_the_view_shows(watched):
    told = watched.run("%%watch\ntorch.autograd.grad((w := torch.ones(2, requires_grad=True)).sum(), w);").value
    watched.until(lambda: states(watched, told[WIDGET]["model_id"], "snapshot")[-1]["ended"])
    assert "What autograd.grad computes is not" in states(watched, told[WIDGET]["model_id"], "snapshot")[-1]["told"]


def test_a_watched_cell_that_is_interrupted_while_it_is_paused(watched):
    known = len(watched.comms)
    cell = watched.send(
        "%%watch --paused\nx = torch.ones(2, requires_grad=True)\n"
        "with dist_autograd.context() as context_id:\n"
        "    dist_autograd.backward(context_id, [rpc.rpc_sync('worker1', twice, args=(x,)).sum()])"
    )
    watched.until(lambda: any(" nodes, paused" in str(each) for each in watched.comms[known:]))
    watched.interrupt()
    watched.finish(cell)
    assert cell.error["ename"] in ("KeyboardInterrupt", "Interrupted")
    assert watched.run("1 + 1").result == "2"


def test_the_handle_has_a_name_where_it_is_given_one(watched):
    watched.run("for _ in range(3): pass")  # of the user's own: no value of a cell is _ from then on
    cell = watched.run(
        "%%watch -a -o named\nx = torch.ones(2, requires_grad=True)\n"
        "with dist_autograd.context() as context_id:\n"
        "    dist_autograd.backward(context_id, [rpc.rpc_sync('worker1', twice, args=(x,)).sum()])"
    )
    assert cell.result is None
    watched.run("named.wait(30)")
    assert watched.run("named.state").result == "'over'"
    assert watched.run("%%watch -o 3x\n1", check=False).error["ename"] == "UsageError"
