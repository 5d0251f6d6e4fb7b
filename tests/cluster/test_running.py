"""Cells, calls and values on a cluster, driven from a notebook kernel as a front end does."""

import os

import pytest

RUNTIME = os.environ["NBDIST_RUNTIME_DIR"]


# --- what a worker finds --------------------------------------------------------------------------


def test_a_worker_knows_its_place(two):
    cell = two.run("%%remote\nprint(rank, world_size, device, gpu_id, type(device).__name__)")
    assert cell.stdout == "[worker0] 0 2 cpu None device\n[worker1] 1 2 cpu None device\n"
    cell = two.run("%%remote 1\nprint(rpc.get_worker_info(), dist.get_rank(), dist.get_world_size(), torch.ones(1))")
    assert "worker1" in cell.stdout
    assert cell.stdout.endswith("1 2 tensor([1.])\n")
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR"
    assert two.run(f"%remote 1 [__import__('os').environ[n] for n in '{names}'.split()]").result == (
        "['1', '1', '2', '2', '127.0.0.1']"
    )
    assert two.run("%remote 1 int(__import__('os').environ['MASTER_PORT']) > 0").result == "True"


def test_a_worker_works_where_the_notebook_does(two):
    expression = "(__import__('os').getcwd(), __import__('sys').path[-1], __import__('os').environ.get('HOME'))"
    here = two.run(expression).result
    assert two.run(f"%remote 0 {expression}").result == here


def test_workers_draw_different_numbers(two):
    two.run("%%remote\nimport random, numpy\ndrawn = random.random(), float(numpy.random.rand()), torch.rand(1).item()")
    two.run("drawn = Cluster.current.pull('drawn')")
    assert two.run("[a != b for a, b in zip(*drawn)]").result == "[True, True, True]"


def test_a_program_that_brings_its_own_world_finds_it_formed(two):
    assert two.run("%%remote 0\nrpc.init_rpc('worker0', rank=0, world_size=2)").error is None
    cell = two.run("%%remote 0\nrpc.init_rpc('somebody', rank=0, world_size=2)", check=False)
    assert cell.error["ename"] == "UsageError"
    assert "this is worker0 of a cluster" in cell.error["evalue"]
    two.run("%%remote 0\nrpc.shutdown()")
    assert two.run("rpc.rpc_sync('worker0', max, args=(1, 2))").result == "2"
    two.run("rpc.init_rpc('notebook')\nrpc.shutdown()")
    assert two.run("rpc.rpc_sync('worker0', max, args=(1, 2))").result == "2"


def test_a_program_that_brings_its_own_world_gets_its_options_or_is_told_that_it_does_not(two):
    """`compat` does the same, where init_rpc in a worker used to say that RPC is initialized already."""
    for module in ("nbdist.rpc", "nbdist.compat.rpc"):
        two.run(
            f"%%remote 0\nimport {module} as its, time\nfrom nbdist.rpc import api\n"
            "was = api.current_agent().rpc_timeout"
        )
        two.run(
            "%%remote 0\nits.init_rpc('worker0', rank=0, world_size=2, rpc_backend_options="
            "its.TensorPipeRpcBackendOptions(init_method='env://', rpc_timeout=0.5, num_worker_threads=40))"
        )
        cell = two.run("%%remote 0\nits.rpc_sync('worker1', time.sleep, args=(5,))", check=False)
        assert cell.error["ename"] == "RpcTimeout"
        assert two.run("%remote 0 api.current_agent().pool.size").result == "40"
        for asked, told in (
            ("rank=1", "cannot get rank 1"),
            ("rank=0, world_size=9", "a world_size of 9 would be waited for in vain"),
            (
                "rpc_backend_options=its.TensorPipeRpcBackendOptions("
                "device_maps={'worker1': {'cpu': 'cpu'}}, rpc_timeout=7)",
                "cannot take on device_maps now",
            ),
        ):
            cell = two.run(f"%%remote 0\nits.init_rpc('worker0', {asked})", check=False)
            assert cell.error["ename"] == "UsageError"
            assert told in cell.error["evalue"]
        assert two.run("%remote 0 api.current_agent().rpc_timeout").result == "0.5"
        two.run("%%remote 0\napi.current_agent().rpc_timeout = was\napi.current_agent().pool.resize(16)")


def test_the_process_group_can_be_left_and_formed_by_hand(two):
    # Once: torch itself cannot do it twice at one port for certain, as the first one's store may still be there.
    two.run("%%remote\ndist.destroy_process_group()\ndist.init_process_group('gloo')")
    assert two.run("%%remote\nt = torch.ones(1); dist.all_reduce(t); t.item()").stdout == "[worker0,1] 2.0\n"
    two.run("%dist_restart -p")
    assert two.run("%%remote\nt = torch.ones(1); dist.all_reduce(t); t.item()").stdout == "[worker0,1] 2.0\n"


# --- where output goes ----------------------------------------------------------------------------


def test_lines_say_whose_they_are_and_are_said_once(two):
    assert two.run("%%remote\nprint('same')\nprint('own', rank)").stdout == (
        "[worker0,1] same\n[worker0] own 0\n[worker1] own 1\n"
    )
    assert two.run("%%remote 1\nprint('alone')").stdout == "alone\n"


def test_output_comes_while_the_cell_runs(two):
    cell = two.send(
        "%%remote 1\nimport time\nprint('early', flush=True)\nwhile 'go' not in globals(): time.sleep(0.01)"
    )
    two.until(lambda: "early" in cell.stdout)
    assert cell.reply is None
    two.interrupt()
    two.finish(cell)


def test_output_comes_after_the_cell_has_ended(two):
    cell = two.run("%%remote 1 -a\nimport time\ntime.sleep(0.5)\nprint('late')\n40 + 2")
    assert "<Cell" in cell.result
    two.until(lambda: "late" in cell.stdout and cell.result == "42")
    assert two.run("handle = _\nhandle.wait()\nhandle.done").result == "True"
    two.run("import asyncio")
    assert two.run("await handle\n[o['output_type'] for o in handle.outputs['worker1']]").result == (
        "['stream', 'execute_result']"
    )


def test_an_error_of_a_cell_that_nobody_waits_for_is_shown_under_it(two):
    cell = two.run("%%remote 1 -a\nimport time; time.sleep(0.3); 1/0")
    two.until(lambda: cell.error is not None)
    assert cell.error["ename"] == "ZeroDivisionError"
    assert two.run("_.wait()", check=False).error["ename"] == "ZeroDivisionError"


def test_what_a_called_function_prints_shows_under_the_calling_cell(two):
    two.run("def speak(word):\n    print('said', word)\n    return word")
    cell = two.run("rpc.rpc_sync('worker1', speak, args=('hello',))")
    two.until(lambda: cell.stdout)
    assert cell.stdout == "[worker1] said hello\n"
    two.run("def pass_on(word):\n    return rpc.rpc_sync('worker0', speak, args=(word,))")
    cell = two.run("rpc.rpc_sync('worker1', pass_on, args=('further',))")
    two.until(lambda: cell.stdout)
    assert cell.stdout == "[worker0] said further\n"
    two.run("%dist_push speak")
    cell = two.run("%%remote 0\nanswer = rpc.rpc_sync('worker1', speak, args=('from a cell',))")
    two.until(lambda: cell.stdout)
    assert cell.stdout.endswith("said from a cell\n")


def test_where_nobody_watches_output_is_grouped_and_the_same_every_time(two):
    code = (
        "%%remote\nimport sys, time\n"
        "for i in range(3):\n    print(rank, i); print('e', file=sys.stderr); time.sleep(0.01 * (2 - rank))"
    )
    seen = {two.run(code, allow_stdin=False).stdout for _ in range(3)}
    assert seen == {"[worker0] 0 0\n[worker0] 0 1\n[worker0] 0 2\n[worker1] 1 0\n[worker1] 1 1\n[worker1] 1 2\n"}
    two.run("def speak(word):\n    print('said', word)")
    calls = "for w in ('worker1', 'worker0'): rpc.rpc_sync(w, speak, args=(w,))"
    seen = {two.run(calls, allow_stdin=False).stdout for _ in range(3)}
    assert seen == {"[worker0] said worker0\n[worker1] said worker1\n"}
    assert two.run("%%remote --group-outputs\nprint(rank)").stdout == "[worker0] 0\n[worker1] 1\n"


# --- errors ---------------------------------------------------------------------------------------


def test_an_error_fails_the_cell_with_its_own_name(two):
    cell = two.run("%%remote\nif rank == 1:\n    raise ValueError('bad value')", check=False)
    assert (cell.error["ename"], cell.error["evalue"]) == ("ValueError", "bad value")
    assert "[worker1]" in cell.traceback
    number = cell.of("execute_input")[0]["execution_count"]
    assert f"In[{number}] on worker1" in cell.traceback
    assert "nbdist" not in cell.traceback
    assert cell.reply["content"]["status"] == "error"


def test_a_warning_names_the_cell(two):
    cell = two.run("%%remote 1\nimport warnings\nwarnings.warn('careful')")
    assert f"{cell.name}:3: UserWarning: careful" in cell.stderr
    assert "warnings.warn('careful')" in cell.stderr


def test_an_error_of_a_loaders_process_names_the_cell_and_is_shown_once(two):
    cell = two.run(
        "%%remote\n"
        "class Images(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, number): raise ValueError('no image')\n"
        "list(torch.utils.data.DataLoader(Images(), num_workers=1))",
        check=False,
    )
    assert cell.error["ename"] == "ValueError"
    assert cell.traceback.count(f"  Cell {cell.name} on worker0,1, line 4, in __getitem__") == 1


def test_errors_of_several_kinds_come_together(two):
    cell = two.run("%%remote\nraise (ValueError if rank else KeyError)('x')", check=False)
    assert cell.error["ename"] == "CellError"
    assert cell.error["evalue"] == "worker0: KeyError: 'x'; worker1: ValueError: x"
    assert "[worker0]" in cell.traceback
    assert "[worker1]" in cell.traceback


def test_an_error_of_a_call_says_where_it_arose(two):
    definition = two.run("def multiply(a, b):\n    return a.matmul(b)")
    number = definition.of("execute_input")[0]["execution_count"]
    cell = two.run("rpc.rpc_sync('worker1', multiply, args=(torch.ones(2, 3), torch.ones(2, 3)))", check=False)
    assert cell.error["ename"] == "RuntimeError"
    assert f"In[{number}] on worker1, line 2, in multiply" in cell.traceback
    assert "a.matmul(b)" in cell.traceback
    assert "rpc/calls/caller.py" not in cell.traceback


def test_a_syntax_error_is_found_before_anything_is_sent(two):
    two.run("%%remote\ncount = 0")
    cell = two.run("%%remote\ncount += 1\ndef f(:\n    pass", check=False)
    assert cell.error["ename"] == "SyntaxError"
    assert "def f(:" in cell.traceback
    assert "commands.py" not in cell.traceback
    assert two.run("%remote all count").result == "[0, 0]"


@pytest.mark.parametrize(
    ("line", "name", "text"),
    [
        ("%%remote 7\n1", "UnknownWorker", "no worker with rank 7"),
        ("%%remote nobody\n1", "UnknownWorker", "there is no worker 'nobody'"),
        ("%%remote --what\n1", "UsageError", "write: %%remote"),
        ("%%rank\n1", "UsageError", "%%rank[0,1]"),
        ("%remote 0", "UsageError", "TARGET expression"),
        ("%dist_init -n 3", "UsageError", "another cluster runs"),
        ("%dist_init --backend mpi", "UsageError", "gloo"),
        ("%dist_push nothing_of_that_name", "UsageError", "no variable"),
        ("%dist_pull nothing_of_that_name", "NameError", "nothing_of_that_name"),
    ],
)
def test_a_bad_line_is_a_short_error(two, line, name, text):
    cell = two.run(line, check=False)
    assert cell.error is not None, cell
    assert cell.error["ename"] == name
    assert text in cell.error["evalue"]
    assert "commands.py" not in cell.traceback


def test_nobody_to_restart_is_said_and_no_error(two):
    assert two.run("%dist_restart").stdout == (
        "No worker has died. Name workers to restart, or `all`; `-p` forms only the process group anew.\n"
    )


# --- targets, values ------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["1", "-1", "[1]", "worker1", "1:", "1-1"])
def test_a_target_names_one_worker(two, target):
    assert two.run(f"%%remote {target}\nprint(rank)").stdout == "1\n"


@pytest.mark.parametrize(
    "line", ["%%remote", "%%remote all", "%%remote 0,1", "%%rank[0,1]", "%%rank [0-1]", "%%distributed"]
)
def test_a_target_names_all(two, line):
    assert two.run(f"{line}\nprint('x')").stdout == "[worker0,1] x\n"


def test_values_come_and_go(two):
    two.run("data = {'t': torch.arange(3), 'f': lambda x: x + 1}\nother = 5")
    two.run("%dist_push data other -r 1")
    assert two.run("%remote 1 (data['f'](1), data['t'].sum().item(), other)").result == "(2, 3, 5)"
    two.run("%%remote\nmine = torch.full((2,), float(rank))")
    assert two.run("%dist_pull mine\nmine").result == "[tensor([0., 0.]), tensor([1., 1.])]"
    assert two.run("%dist_pull mine -r 1\nmine").result == "tensor([1., 1.])"
    assert two.run("%remote 0 mine.shape").result == "torch.Size([2])"
    assert "2 workers are in step" in two.run("%sync").stdout


def test_values_come_after_the_cells_sent_before(two):
    two.run("%%remote -a\nimport time; time.sleep(0.5); slow = 'done'")
    assert two.run("%remote all slow").result == "['done', 'done']"
    two.run("%%remote 0 -a\nimport time; time.sleep(0.5); pushed = 'by the cell'")
    two.run("pushed = 'later'\n%dist_push pushed")
    assert two.run("%remote 0 pushed").result == "'later'"


@pytest.mark.parametrize("inside", [False, True], ids=["outside of a context", "inside of one"])
def test_parameters_come_and_go_as_they_are_and_are_not_recorded(two, inside):
    two.run("%%remote --local\nimport warnings; warnings.filterwarnings('error', '.* that requires grad')")
    two.run("weight = torch.nn.Parameter(torch.ones(2))")
    two.run("%%remote\nown = torch.nn.Parameter(torch.ones(2))")
    if inside:
        two.run("context_id = dist_autograd.open()")
    two.run("%dist_push weight")
    two.run("%dist_pull own")
    two.run("same = %remote 1 own")
    are_leaves = "all(type(p) is torch.nn.Parameter and p.is_leaf and p.requires_grad for p in {})"
    assert two.run(are_leaves.format("[*own, same]")).result == "True"
    assert two.run("%remote all " + are_leaves.format("[weight]")).result == "[True, True]"
    if inside:
        assert two.run("dist_autograd.trace().edges").result == "[]"
        two.run("context_id.close()")


def test_a_cell_leaves_references_to_its_value(two):
    two.run("%%remote 1 -o one\ntorch.ones(3) * rank")
    assert two.run("one.owner_name(), one.to_here().tolist()").result == "('worker1', [1.0, 1.0, 1.0])"
    two.run("%%remote -o each\ntorch.ones(1) * rank")
    assert two.run("[r.to_here().item() for r in each]").result == "[0.0, 1.0]"
    assert two.run("each[1].rpc_sync().add(1)").result == "tensor([2.])"


def test_a_cell_can_run_here_as_well(two):
    cell = two.run("%%remote --local\nboth = globals().get('rank', 'here')\nprint(both)")
    assert sorted(cell.stdout.splitlines()) == ["[worker0] 0", "[worker1] 1", "here"]


def test_an_error_of_a_cell_that_runs_here_as_well_is_shown_once(two):
    cell = two.run("%%remote 1 --local\nif 'rank' in globals(): 1 / 0", check=False)
    assert [error["ename"] for error in cell.of("error")] == ["ZeroDivisionError"]


@pytest.mark.parametrize("wait", ["background.wait()", "await background"])
def test_an_error_of_a_background_cell_that_is_waited_for_is_shown_once(two, wait):
    code = "import time; time.sleep(1); 1 / 0"
    cell = two.run(f"background = Cluster.current.execute({code!r}, 0, block=False)\n{wait}", check=False)
    assert [error["ename"] for error in cell.of("error")] == ["ZeroDivisionError"]


def test_stop_ends_both_parts_of_a_cell_that_runs_here_as_well(two):
    soon = "import threading, time; threading.Timer(0.5, print, ['started']).start()"  # when the cell is in its sleep
    cell = two.send(f"%%remote 0 --local\n{soon}\ntime.sleep(600)")
    two.until(lambda: cell.stdout.count("started") == 2, what="the start of both parts")
    two.interrupt()
    two.finish(cell, timeout=30)
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert "worker0 stopped in time.sleep(600)" in cell.error["evalue"]
    assert two.run("%remote 0 rank", timeout=30).result == "0"


def test_plain_cells_run_everywhere_when_asked(two):
    two.run("%dist_mode -e")
    assert two.run("print(rank)").stdout == "[worker0] 0\n[worker1] 1\n"
    assert "on all workers" in two.run("%dist_mode").stdout
    for magic, shown in {
        "%%remote 0 --local": ["0", "here"],
        "%%time": ["here"],
        "%%timeline": ["here"],
        "%%watch": ["here"],
    }.items():
        cell = two.run(f"{magic}\nprint(globals().get('rank', 'here'))")
        lines = [line for line in cell.stdout.splitlines() if line in ("0", "here") or line[:1] == "["]
        assert sorted(lines) == shown, magic
    assert two.run("print(rank)\n\n").stdout == "[worker0] 0\n[worker1] 1\n"
    two.run("%dist_mode -d")
    assert two.run("print('rank' in globals())").stdout == "False\n"


def test_status_says_what_each_does(two):
    two.run("%%remote 1 -a\nimport time; time.sleep(600)")
    two.run("handle = _\nwhile not handle.parts['worker1'].began: time.sleep(0.01)")
    text = two.run("%dist_status").result
    idle, busy = text.splitlines()[1:]
    assert "worker0" in idle
    assert "idle" in idle
    assert "worker1" in busy
    assert "busy" in busy
    assert "time.sleep(600)" in busy
    assert "MB" in busy
    two.run("handle.cancel()")


def test_init_once_more_keeps_the_cluster(two):
    two.run("%%remote\nkept = True")
    assert "worker0, worker1" in two.run("%dist_init -n 2").stdout
    assert two.run("%remote all kept").result == "[True, True]"


# --- a model --------------------------------------------------------------------------------------


def test_a_model_trained_by_ddp_has_the_loss_of_one_process(two):
    model = (
        "import torch\n"
        "def build():\n"
        "    torch.manual_seed(1)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()\n"
        "inputs = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)\n"
        "targets = inputs.sum(1, keepdim=True)\n"
    )
    two.run(model)
    two.run(
        "model = build(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(5):\n"
        "    optimizer.zero_grad(); loss = ((model(inputs) - targets) ** 2).mean(); loss.backward(); optimizer.step()\n"
        "alone = ((model(inputs) - targets) ** 2).mean().item()"
    )
    two.run(f"%%distributed\n{model}")
    two.run(
        "%%distributed\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(build()); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "mine = slice(rank, None, world_size)\n"
        "for _ in range(5):\n"
        "    optimizer.zero_grad(); loss = ((model(inputs[mine]) - targets[mine]) ** 2).mean()\n"
        "    loss.backward(); optimizer.step()\n"
        "together = ((model(inputs) - targets) ** 2).mean().item()"
    )
    assert two.run("[abs(x - alone) < 1e-12 for x in Cluster.current.pull('together')]").result == "[True, True]"
