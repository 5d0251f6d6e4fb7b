"""`breakpoint()` on workers, driven by a front end that answers."""

import re
import time

import pytest
from helpers.notebook.frontend import Notebook


@pytest.fixture(scope="module")
def notebook():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 -t 60")
        yield notebook


@pytest.fixture(autouse=True)
def nothing_unanswered(notebook):
    yield
    notebook.answers.clear()
    notebook.end_all()


def answer(notebook, *lines):
    """Answer the next questions with these lines; return the list of the prompts that come."""
    prompts = []

    def give(line, request):
        prompts.append(request["prompt"])
        return line

    notebook.answers[:] = [lambda request, line=line: give(line, request) for line in lines]
    return prompts


def test_a_cell_stops_and_is_stepped(notebook):
    prompts = answer(notebook, "p 'x is', x", "n", "p 'y is', y", "c")
    cell = notebook.run("%%remote worker1\ndef f(x):\n    breakpoint()\n    y = x + 1\n    return y\nf(5)")
    assert prompts[0] == f"worker1 {cell.name}:3 (pdb) "
    assert [prompt.split(":")[1] for prompt in prompts] == ["3 (pdb) ", "3 (pdb) ", "4 (pdb) ", "4 (pdb) "]
    assert "('x is', 5)" in cell.stdout


def test_a_function_called_by_rpc_stops(notebook):
    prompts = answer(notebook, "p 'x is', x", "c")
    cell = notebook.run("def g(x):\n    breakpoint()\n    return x + 1\nrpc.rpc_sync('worker1', g, args=(5,))")
    assert len(prompts) == 2
    assert prompts[0] == f"worker1 {cell.name}:2 (pdb) "
    assert "('x is', 5)" in cell.stdout
    assert cell.result == "6"


def test_q_ends_the_call_with_an_error_that_says_so(notebook):
    answer(notebook, "q")
    cell = notebook.run("def g(x):\n    breakpoint()\nrpc.rpc_sync('worker1', g, args=(5,))", check=False)
    assert cell.error["ename"] == "DebuggerQuit"
    assert f"`q` in the debugger of worker1 ended g at {cell.name}:2" in cell.error["evalue"]
    answer(notebook, "n", "q")
    cell = notebook.run("%%remote worker1\nx = 1\nbreakpoint()\nx = 2\nprint('not here')", check=False)
    assert cell.error["ename"] == "DebuggerQuit"
    assert "not here" not in cell.stdout


def test_torchs_breakpoint_stops_one_rank_and_the_others_wait(notebook):
    prompts = answer(notebook, "p 'rank is', rank", "c")
    cell = notebook.run("%%remote\nfor step in range(2):\n    dist.breakpoint(rank=1, skip=1)\nprint('through', step)")
    assert prompts[0] == f"worker1 {cell.name}:3 (pdb) "
    assert "('rank is', 1)" in cell.stdout
    assert "[worker0,1] through 1" in cell.stdout


def test_jupyterlabs_debugger_debugs_one_worker(notebook):
    told = "JupyterLab's debugger debugs one worker, not 2: --lab worker0"
    assert told in notebook.run("%dist_debug --lab all", check=False).traceback
    assert "debugs worker1" in notebook.run("%dist_debug --lab 1").stdout
    assert notebook.run("%%remote 1\n\nimport sys\nsys._getframe().f_lineno").result == "4"
    assert "debugs the notebook again" in notebook.run("%dist_debug --lab off").stdout


def test_jupyterlabs_debugger_debugs_the_notebook_again_once_the_cluster_has_ended():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 1 --backend none")
        notebook.run("%dist_debug --lab 0")
        is_turned = "'do_debug_request' in vars(get_ipython().kernel)"
        assert notebook.run(is_turned).result == "True"
        notebook.run("%dist_shutdown")
        assert notebook.run(is_turned).result == "False"
        assert "debugs the notebook again" in notebook.run("%dist_debug --lab off").stdout


def test_a_worker_that_another_worker_has_called_stops(notebook):
    answer(notebook, "w", "up", "p 'outer', y", "c")
    notebook.run(
        "import pdb\ndef inner(x):\n    pdb.set_trace()\n    return x\ndef outer(x):\n    y = x\n    return inner(y)"
    )
    code = "def through(x):\n    return rpc.rpc_sync('worker1', outer, args=(x,), timeout=1.5)\n"
    notebook.answers.insert(0, lambda request: (time.sleep(2.5), "p 1")[1])
    cell = notebook.run(code + "rpc.rpc_sync('worker0', through, args=(7,), timeout=1.5)")
    assert cell.result == "7"
    assert "('outer', 7)" in cell.stdout
    assert "nbdist" not in cell.stdout


def test_a_hook_of_a_backward_pass_stops(notebook):
    prompts = answer(notebook, "p 'gradient', gradient.item()", "c")
    code = (
        "def hook(gradient):\n    breakpoint()\n"
        "def forward(x):\n    y = x * 3\n    y.register_hook(hook)\n    return y\n"
        "x = torch.ones((), requires_grad=True)\n"
        "with dist_autograd.context() as context:\n"
        "    dist_autograd.backward(context, [rpc.rpc_sync('worker1', forward, args=(x,))])\n"
        "    print(dist_autograd.get_gradients(context)[x])"
    )
    cell = notebook.run(code)
    assert prompts[0] == f"worker1 {cell.name}:2 (pdb) "
    assert "('gradient', 1.0)" in cell.stdout
    assert "tensor(3.)" in cell.stdout


def test_a_thread_of_a_cell_stops(notebook):
    prompts = answer(notebook, "p 'x is', x", "n", "n", "c")
    code = "import threading\ndef f(x):\n    breakpoint()\n    print('then')\nt = threading.Thread(target=f, args=(5,))"
    cell = notebook.run(f"%%remote worker1\n{code}\nt.start(); t.join()")
    assert "('x is', 5)" in cell.stdout
    assert "then\n" in cell.stdout
    assert len(prompts) == 4


def test_two_stops_queue(notebook):
    prompts = answer(notebook, "p 'rank', rank", "p 'rank', rank", "c", "p 'rank', rank", "c")
    notebook.run("%%remote\nbreakpoint()\npass")
    workers = [prompt.split()[0] for prompt in prompts]
    assert workers in ([*["worker0"] * 3, *["worker1"] * 2], [*["worker1"] * 3, *["worker0"] * 2])


def test_stop_ends_the_debugger_and_the_wait(notebook):
    notebook.answers[:] = [lambda request: notebook.interrupt() or "p 1"]
    cell = notebook.run("%%remote worker1\nbreakpoint()\nprint('not here')", check=False)
    assert cell.error["ename"] == "KeyboardInterrupt"
    notebook.answers[:] = [lambda request: notebook.interrupt() or "p 1"]
    cell = notebook.run("def g():\n    breakpoint()\n    print('not here')\nrpc.rpc_sync('worker1', g)", check=False)
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert "not here" not in cell.stdout
    assert notebook.run("rpc.rpc_sync('worker1', max, args=(1, 2))").result == "2"
    assert notebook.run("cluster.stops.place('worker1')").result == "''"


def test_where_nobody_can_answer_it_prints_and_goes_on(notebook):
    notebook.watched = False
    try:
        cell = notebook.run(
            "%%remote worker1\nx, w = 5, torch.ones(2)\ndef f(x, w):\n    breakpoint()\n    return x\nf(x, w)"
        )
        assert cell.stdout.count("\n") == 3
        assert f"nobody can answer here, so this did not stop at {cell.name}:4" in cell.stdout
        assert "  x = 5\n  w = Tensor float32(2,)\n" in cell.stdout
        cell = notebook.run("def g(x):\n    breakpoint()\n    return x\nrpc.rpc_sync('worker1', g, args=(5,))")
        assert f"so this did not stop at {cell.name}:2 in g: breakpoint()\n[worker1]   x = 5\n" in cell.stdout
        assert cell.result == "5"
    finally:
        notebook.watched = True


def test_a_stop_in_the_background_with_nobody_waiting_prints_and_goes_on(notebook):
    cell = notebook.run("%%remote worker1 -a\nimport time\ntime.sleep(1)\nbreakpoint()\nprint('over')")
    notebook.until(lambda: "over" in cell.stdout)
    assert f"did not stop at {cell.name}:4" in cell.stdout


def test_a_question_that_comes_after_the_end_of_its_stop_is_not_put(notebook):
    code = "cluster.stops.left('worker1', 10**9)\nasked = cluster.stops.ask('worker1', 10**9, 'In[1]:1', '(pdb) ')"
    notebook.run(code)
    assert notebook.run("asked.done(), cluster.stops.place('worker1')").result == "(True, '')"


def test_a_question_waits_while_the_notebook_computes(notebook):
    prompts = answer(notebook, "p 'x is', x", "c")
    code = (
        "import time\ndef g(x):\n    breakpoint()\n    return x\n"
        "future = rpc.rpc_async('worker1', g, args=(5,))\n"
        "while not cluster.stops.place('worker1'):\n    time.sleep(0.01)\n"
        "import threading\nfrom nbdist.views.workers.panel import Panel\nfound = []\n"
        "thread = threading.Thread(target=lambda: found.append(repr(Panel(cluster))))\nthread.start()\n"
        "while not found:\n    time.sleep(0.01)\n"  # the main thread must not wait for a lock here
        "print(found[0])"
    )
    cell = notebook.run(code)
    assert not prompts
    assert f"stands in the debugger at {cell.name}:3" in cell.stdout
    assert "wait for each other" not in cell.stdout
    assert notebook.run("future.wait()").result == "5"  # the next cell that waits takes the question
    assert len(prompts) == 2
    prompts = answer(notebook, "p 'x is', x", "c")
    notebook.run(code)
    assert "('x is', 5)" in notebook.run("%dist_debug worker1").stdout
    assert notebook.run("future.wait()").result == "5"


def test_a_time_limit_does_not_run_out_meanwhile(notebook):
    prompts = answer(notebook, "p 1", "c")
    notebook.answers.insert(0, lambda request: (time.sleep(2.5), "p 1")[1])
    notebook.run("%%remote worker1 -t 2\nbreakpoint()\npass")
    assert len(prompts) == 2
    prompts = answer(notebook, "p 1", "c")
    notebook.answers.insert(0, lambda request: (time.sleep(2.5), "p 1")[1])
    code = "cell = cluster.execute('breakpoint()\\nprint(\"through\")', 'worker1', block=False, timeout=2)\ncell.wait()"
    assert "through" in notebook.run(code).stdout
    assert len(prompts) == 2
    code = "late = cluster.execute('import time; time.sleep(60)', 'worker1', block=False, timeout=0.5)\nlate.wait()"
    assert notebook.run(code, check=False).error["ename"] == "KeyboardInterrupt"


def test_a_step_of_ddp_goes_on_after_a_stop_longer_than_the_groups_limit(notebook):
    try:
        notebook.run(
            "%%remote\nfrom datetime import timedelta\ndist.destroy_process_group()\n"
            "dist.init_process_group('gloo', timeout=timedelta(seconds=3))\n"
            "from torch.nn.parallel import DistributedDataParallel\n"
            "model = DistributedDataParallel(torch.nn.Linear(2, 1))"
        )
        prompts = answer(notebook, "c")
        notebook.answers.insert(0, lambda request: (time.sleep(6), "p rank")[1])
        code = "import time\nif rank == 0:\n    time.sleep(1)\nelse:\n    breakpoint()\n"
        notebook.run(f"%%remote\n{code}model(torch.ones(1, 2)).sum().backward()")
        assert prompts[0].startswith("worker1 ")
    finally:
        notebook.run("%dist_restart all")


def test_a_stop_says_which_waits_give_up(notebook):
    notebook.run(
        "%%remote\nfrom datetime import timedelta\ntp = dist.new_group(group_desc='tp', timeout=timedelta(seconds=60))"
    )
    answer(notebook, "c")
    code = "import time\nif rank == 1:\n    time.sleep(1)\n    breakpoint()\ndist.all_reduce(torch.ones(1), group=tp)"
    assert re.search(r"group 'tp' gives up in 5\d s", notebook.run(f"%%remote\n{code}").stdout)


def test_the_last_error_is_opened_afterwards(notebook):
    notebook.run("%%remote worker1\ndef divide(x):\n    return 1 / x\ndivide(0)", check=False)
    prompts = answer(notebook, "p 'x is', x", "q")
    cell = notebook.run("%dist_debug worker1")
    assert "('x is', 0)" in cell.stdout
    assert prompts[0].startswith("worker1 In[")
    notebook.run("def halve(z):\n    return 1 / z")
    notebook.run("rpc.rpc_sync('worker1', halve, args=(0,))", check=False)
    answer(notebook, "p 'z is', z", "q")
    assert "('z is', 0)" in notebook.run("%debug").stdout
    notebook.run("%%remote\n1 / rank", check=False)
    answer(notebook, "p 'rank', rank", "q")
    assert "('rank', 0)" in notebook.run("%debug").stdout


def test_debug_asks_which_worker_if_several_have_failed(notebook):
    notebook.run("%%remote\nraise ValueError(f'bad {rank}')", check=False)
    prompts = answer(notebook, "", "p 'rank', rank", "q")
    cell = notebook.run("%debug")
    assert prompts[0] == "which worker? (Enter for worker0) "
    assert cell.stdout.startswith("worker0: ValueError: bad 0\nworker1: ValueError: bad 1\n")
    assert "('rank', 0)" in cell.stdout
    answer(notebook, "1", "p 'rank', rank", "q")
    assert "('rank', 1)" in notebook.run("%debug").stdout
    answer(notebook, "worker7")
    assert notebook.run("%debug", check=False).error["evalue"].startswith("there is no 'worker7' to debug: run this")
    notebook.run("%%remote\nraise ValueError('alike')", check=False)
    answer(notebook, "worker1", "p 'rank', rank", "q")
    cell = notebook.run("%debug")
    assert cell.stdout.startswith("worker0,1: ValueError: alike\n")
    assert "('rank', 1)" in cell.stdout
    notebook.watched = False
    try:
        told = "nobody can answer here, so no debugger opens on one of these:\nworker0,1: ValueError: alike\n"
        assert notebook.run("%debug").stdout == told
    finally:
        notebook.watched = True


def test_the_last_error_is_in_the_memory_and_can_be_freed(notebook):
    notebook.run("def fill(n):\n    large = torch.ones(n)\n    raise KeyError")
    notebook.run("rpc.rpc_sync('worker1', fill, args=(1_000_000,))", check=False)
    assert "a traceback" in notebook.run("%dist_memory worker1").result
    notebook.run("%dist_free")
    cell = notebook.run("%dist_debug worker1", check=False)
    assert "no debugger stands on worker1, and no error is kept there" in cell.error["evalue"]


def test_debug_after_an_error_of_the_notebook_itself_is_pythons(notebook):
    notebook.run("%%remote worker1\n1 / 0", check=False)
    notebook.run("here = 3\n1 / 0", check=False)
    prompts = answer(notebook, "q")
    notebook.run("%debug")
    assert prompts == ["ipdb> "]


def test_a_stop_that_is_stepped_keeps_its_turn_and_the_magic_waits_for_its_end(notebook):
    code = (
        "import time\ndef g(x):\n    breakpoint()\n    x += 1\n    x += 1\n    return x\n"
        "future = rpc.rpc_async('worker1', g, args=(5,))\n"
        "while not cluster.stops.place('worker1'):\n    time.sleep(0.01)\n"
    )
    notebook.run(code)
    prompts = answer(notebook, "n", "n", "n", "p 'x is', x", "c")
    assert "('x is', 7)" in notebook.run("%dist_debug worker1").stdout
    assert len(prompts) == 5
    assert notebook.run("future.wait()").result == "7"
    prompts = answer(notebook, *["n"] * 3, "c", *["n"] * 3, "c")
    notebook.run("%%remote\ndef f(x):\n    breakpoint()\n    x += 1\n    x += 1\n    return x\nf(rank)")
    assert len({prompt.split()[0] for prompt in prompts[:4]}) == 1


def test_a_debugger_within_a_command_of_another(notebook):
    prompts = answer(notebook, "f(1)", "p 'inner', x", "c", "p 'outer', x", "c")
    notebook.run("%%remote worker1\ndef f(x):\n    breakpoint()\n    return x\nprint(f(0))")
    assert len(prompts) == 5
    assert notebook.run("cluster.stops.place('worker1')").result == "''"


def test_the_lines_of_a_function_of_the_notebook_are_shown(notebook):
    answer(notebook, "l", "q")
    cell = notebook.run(
        "def h(x):\n    breakpoint()\n    return 7 * x\nrpc.rpc_sync('worker1', h, args=(1,))", check=False
    )
    assert "-> breakpoint()" in cell.stdout
    assert "return 7 * x" in cell.stdout
    assert "%dist_debug" not in cell.traceback
    notebook.run("import asyncio\ndef k(x):\n    breakpoint()\n    return x")
    answer(notebook, "c")
    assert notebook.run("await rpc.rpc_async('worker1', k, args=(3,))").result == "3"


def test_the_line_below_the_cell_says_who_stands_where(notebook):
    notebook.answers[:] = [lambda request: (time.sleep(3), "c")[1]]
    cell = notebook.run("%%remote --progress-after 1\nif rank == 1:\n    breakpoint()\ndist.barrier()")
    lines = [
        content["data"].get("text/plain", "") for content in cell.of("display_data") + cell.of("update_display_data")
    ]
    assert any(f"worker1 stands in the debugger at {cell.name}:3" in line for line in lines)


def test_a_stage_of_a_pipeline_stops(notebook):
    prompts = answer(notebook, "p 'shape', tuple(x.shape)", "c", "c")
    code = (
        "class Stage(torch.nn.Linear):\n    def forward(self, x):\n"
        "        breakpoint()\n        return super().forward(x)\n"
        "from functools import partial\nfrom nbdist import nn\n"
        "pipe = nn.Pipeline([partial(Stage, 2, 2), partial(Stage, 2, 2)], ['worker0', 'worker1'], micro_batches=1)\n"
        "x = torch.ones(4, 2)\nwith dist_autograd.context():\n"
        "    pipe.train_step(x, x, torch.nn.functional.mse_loss)"
    )
    cell = notebook.run(code)
    assert [prompt.split()[0] for prompt in prompts] == ["worker0", "worker0", "worker1"]
    assert "('shape', (4, 2))" in cell.stdout


def test_the_message_that_a_stop_is_over_does_not_end_the_next_stop_of_the_thread(notebook):
    code = (
        "stops = cluster.stops\n"
        "asked = stops.ask('worker9', 2, 'In[1]:1', '(pdb) ')\n"
        "stops.left('worker9', 1)\nprint('stands', stops.place('worker9'))\n"
        "stops.left('worker9', 2)\nprint('left', stops.place('worker9'))"
    )
    assert notebook.run(code).stdout == "stands In[1]:1\nleft \n"
