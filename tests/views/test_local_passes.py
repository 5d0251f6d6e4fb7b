"""torch's own ``backward()``, watched: on real workers with DDP and FSDP2, and in the notebook."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.waiting import wait_for_error, wait_until

import nbdist
from nbdist.autograd.graph import noting
from nbdist.autograd.graph.noting import noted
from nbdist.torch_private import torch_version
from nbdist.views.passes import report
from nbdist.views.passes.watching import Watcher

HAS_HOOKS = torch_version() >= (2, 14)
needs_hooks = pytest.mark.skipif(not HAS_HOOKS, reason="torch calls no hooks")

MODELS = """
import threading, time, torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(h)

def gradients(model):
    return [getattr(p.grad, "full_tensor", lambda: p.grad)() for p in model.parameters()]

plain, sharded = Net(), Net()
sharded.load_state_dict(plain.state_dict())
ddp = DistributedDataParallel(plain)
for layer in (sharded.first, sharded.last, sharded):
    fully_shard(layer)
torch.manual_seed(rank)
x = torch.randn(5, 8)
"""
STEP = """
model = {0}
model.zero_grad()
loss = {0}(x).pow(2).mean()
loss.backward()
"""


@pytest.fixture(scope="module")
def cluster():
    with nbdist.Cluster(3, backend="gloo") as cluster:
        cluster.execute(MODELS)
        yield cluster


def told(watcher):
    return "\n".join(report.as_text(watcher.backward))


@pytest.mark.parametrize("model", ["ddp", "sharded"])
def test_a_step_of_all_workers_is_one_pass(cluster, model):
    with Watcher() as watcher:
        cluster.execute(STEP.format(model))
    assert watcher.state == "over"
    found = watcher.backward
    assert found.plan.workers == ["worker0", "worker1", "worker2"]
    assert [share.done for share in found.shares()] == [share.nodes for share in found.shares()]
    lines = {node.line for node in found.nodes.values() if node.kind == "operation"}
    assert any(line.endswith("h = torch.relu(self.first(x))") for line in lines)
    assert any(line.endswith(f"loss = {model}(x).pow(2).mean()") for line in lines)


@pytest.mark.parametrize("model", ["ddp", "sharded"])
def test_stepping_changes_no_gradient(cluster, model):
    cluster.execute(STEP.format(model) + "expected = gradients(model)")
    watcher = Watcher(paused=True)
    cell = cluster.execute(STEP.format(model) + "seen = gradients(model)", block=False)
    with watcher:
        wait_until(lambda: watcher.backward is not None and len(watcher.backward.plan.workers) == 3, "all workers")
        steps = 0
        while watcher.under_way:
            ran = watcher.step()
            assert len({event.worker for event in ran}) == len(ran)  # one node on each worker
            steps += 1
        assert steps >= max(share.nodes for share in watcher.backward.shares())
        assert wait_for_error(cell) is None
    assert all(cluster.evaluate("all(map(torch.equal, expected, seen))"))


def test_a_worker_that_comes_late_joins_the_pass(cluster):
    with Watcher() as watcher:
        cluster.execute("if rank == 1: time.sleep(1)\n" + STEP.format("plain"))
    assert watcher.backward.plan.workers == ["worker0", "worker1", "worker2"]
    assert watcher.state == "over"


def test_a_loop_goes_on_with_all_its_passes_and_a_few_are_watched(cluster):
    with Watcher() as watcher:
        cluster.execute("for step in range(800):" + STEP.format("ddp").replace("\n", "\n    "))
    assert watcher.state == "over"
    found = watcher.backward
    assert found.plan.workers == ["worker0", "worker1", "worker2"]
    assert watcher.last.number > 3  # not one of the first: the lines are noted again for it
    assert any("torch.relu(self.first(x))" in (node.line or "") for node in found.nodes.values())
    assert len(watcher.others()) < 8


@pytest.mark.parametrize(
    ("cell", "node", "line"),
    [
        (
            "w = torch.ones(3, requires_grad=True)\ny = w.exp()\nz = y.sum()\nif rank == 1: y.add_(1)\nz.backward()",
            "Exp",
            "y = w.exp()",
        ),
        (
            "class Mine(torch.autograd.Function):\n"
            "    @staticmethod\n"
            "    def forward(ctx, x): return x * 1\n"
            "    @staticmethod\n"
            "    def backward(ctx, g):\n"
            "        if rank == 1: raise ValueError('mine')\n"
            "        return g\n"
            "w = torch.ones(3, requires_grad=True)\n"
            "y = Mine.apply(w)\n"
            "y.sum().backward()",
            "Mine",
            "y = Mine.apply(w)",
        ),
        (
            "class Short(torch.autograd.Function):\n"
            "    @staticmethod\n"
            "    def forward(ctx, x): return x * 1\n"
            "    @staticmethod\n"
            "    def backward(ctx, g): return g[:2] if rank == 1 else g\n"
            "w = torch.ones(3, requires_grad=True)\n"
            "y = Short.apply(w)\n"
            "y.sum().backward()",
            "Short",
            "y = Short.apply(w)",
        ),
    ],
    ids=["in-place", "raises", "wrong shape"],
)
def test_a_pass_that_fails_keeps_its_node(cluster, cell, node, line):
    with Watcher() as watcher:
        failed = cluster.execute(cell, block=False)
        assert wait_for_error(failed) is not None
        wait_until(lambda: watcher.state == "failed", "the failure")
    [said] = [text for text in told(watcher).splitlines() if "failed at" in text]
    assert f"the pass failed at {node}@worker1" in said
    assert line in said


def test_an_inner_backward_belongs_to_its_node(cluster):
    with Watcher() as watcher:
        cluster.execute(
            "from torch.utils.checkpoint import checkpoint\n"
            "w = torch.ones(3, requires_grad=True)\n"
            "checkpoint(torch.exp, w, use_reentrant=True).sum().backward()"
        )
    assert watcher.last.number == 1
    assert "CheckpointFunctionBackward" in {node.name for node in watcher.backward.nodes.values()}


def test_an_interrupt_ends_a_paused_pass(cluster):
    with Watcher(paused=True) as watcher:
        cell = cluster.execute("w = torch.ones(3, requires_grad=True)\nw.exp().sum().backward()", block=False)
        wait_until(lambda: watcher.under_way and watcher.step(), "a step")
        cluster.interrupt()
        assert "KeyboardInterrupt" in repr(wait_for_error(cell))
    cluster.execute("w.exp().sum().backward()")  # nothing halts it


def test_a_pass_whose_wait_an_interrupt_ends_says_so(cluster):
    with Watcher() as watcher:
        cell = cluster.execute("if rank == 0:" + STEP.format("ddp").replace("\n", "\n    "), block=False)
        wait_until(lambda: watcher.backward and any(share.done > 3 for share in watcher.backward.shares()))
        cell.cancel()
        assert "KeyboardInterrupt" in repr(wait_for_error(cell))
    assert "11 of 11 nodes, failed: KeyboardInterrupt (worker0)" in watcher.told()
    cluster.rebuild_process_group()
    cluster.execute(MODELS)


def test_a_pass_of_the_notebook(cluster):
    with Watcher() as watcher:
        w = torch.ones(3, requires_grad=True)
        (w * 2).exp().sum().backward()
    assert watcher.backward.plan.workers == ["notebook"]
    assert "(w * 2).exp().sum().backward()" in told(watcher)
    assert torch.allclose(w.grad, 2 * torch.exp(torch.full((3,), 2.0)))


def compute():
    torch.nn.Linear(3, 1)(torch.ones(2, 3)).sum().backward()  # this line


class Computing(threading.Thread):
    def run(self):
        compute()


def in_a_pool(then):
    with ThreadPoolExecutor() as pool:
        pool.submit(then).result()


def in_a_thread(then):
    thread = threading.Thread(target=then)
    thread.start()
    thread.join()


def in_a_thread_of_a_thread():
    in_a_thread(lambda: in_a_thread(compute))


@pytest.mark.parametrize(
    "begin",
    [lambda: in_a_thread(compute), lambda: in_a_pool(compute), in_a_thread_of_a_thread, lambda: Computing().start()],
    ids=["thread", "pool", "thread of a thread", "class"],
)
def test_lines_are_noted_in_threads_that_the_cell_starts(cluster, begin):
    with Watcher() as watcher:
        begin()
        wait_until(lambda: watcher.state == "over", "the pass")
    [node] = [node for node in watcher.backward.nodes.values() if node.name == "AddmmBackward0"]
    assert node.module == "Linear"
    assert node.line.endswith("# this line")


def test_a_thread_that_outlives_its_cell_notes_no_more(cluster):
    go_on, modes = threading.Event(), []

    def stay():
        compute()
        go_on.wait()
        y = torch.ones(3, requires_grad=True).exp()
        modes.append(y.grad_fn.metadata)

    thread = threading.Thread(target=stay)
    with Watcher() as watcher:
        thread.start()
        wait_until(lambda: watcher.state == "over", "the pass")
    assert not torch.nn.modules.module._global_forward_hooks
    go_on.set()
    thread.join()
    assert modes == [{}]


def test_a_thread_that_no_watched_cell_starts_notes_nothing(cluster):
    found = []
    in_a_thread(lambda: found.append(torch.ones(3, requires_grad=True).exp().grad_fn.metadata))
    assert found == [{}]


def test_what_is_computed_in_a_compiled_model_is_one_node(cluster):
    with Watcher() as watcher:
        model = torch.compile(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()), backend="aot_eager")
        model(torch.ones(2, 3)).sum().backward()
    assert "CompiledFunctionBackward" in {node.name for node in watcher.backward.nodes.values()}


def test_a_node_of_an_earlier_cell(cluster):
    layer = torch.nn.Linear(3, 1)
    y = layer(torch.ones(2, 3))
    with Watcher() as watcher:
        (y * 2).sum().backward()
    lines = {node.name: (node.module, node.line) for node in watcher.backward.nodes.values()}
    assert lines["AddmmBackward0"] == ("Linear", "made before this cell")
    assert lines["MulBackward0"][1].endswith("(y * 2).sum().backward()")


def begin_paused(cluster, code):
    """Begin a cell in a paused watch; return the watcher and the cell, when all workers have begun their pass."""
    watcher = Watcher(paused=True)
    cell = cluster.execute(code, block=False)
    wait_until(lambda: watcher.backward is not None and len(watcher.backward.plan.workers) == 3, "all workers")
    return watcher, cell


@needs_hooks
@pytest.mark.parametrize(
    ("model", "collectives"),
    [
        ("ddp", ["all_reduce float32[108] ({0}:5), default group, for the gradients of last.bias to first.weight"]),
        (
            "sharded",
            [
                "all_gather float32[18] ({0}:5), default group, for module last",
                "all_gather float32[27] ({0}:5), default group, for module first",
                "reduce_scatter float32[54] ({0}:5), default group, for module last",
                "reduce_scatter float32[81] ({0}:5), default group, for module first",
            ],
        ),
    ],
)
def test_a_paused_pass_stops_before_each_collective_on_all_workers(cluster, model, collectives):
    cluster.execute(STEP.format(model) + "expected = gradients(model)")
    watcher, cell = begin_paused(cluster, STEP.format(model) + "seen = gradients(model)")
    said, issued = set(), []
    with watcher:
        while ran := watcher.step():
            said |= set(watcher.told().split("; "))
            if together := {event.name for event in ran if event.what == "issued"}:
                assert {event.worker for event in ran} == {"worker0", "worker1", "worker2"}
                issued += together
        assert wait_for_error(cell) is None
    assert issued == [each.format(f"In[{cell.number}]") for each in collectives]
    assert {f"worker0-2 are held before {each}" for each in issued} & said
    assert all(cluster.evaluate("all(map(torch.allclose, expected, seen))"))  # DDP adds in another order at first


SUM = """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 1
    @staticmethod
    def backward(ctx, g):
        dist.all_reduce(g := g.clone())
        return g
def add():
    w = torch.ones(3, requires_grad=True)
    Sum.apply(w).sum().backward()
    return w.grad.tolist()
"""


@needs_hooks
@pytest.mark.parametrize("end", ["interrupt", "run", "close"])
def test_a_halt_before_a_collective_ends(cluster, end):
    cluster.execute(SUM)
    watcher, cell = begin_paused(cluster, "added = add()")
    with watcher:
        wait_until(lambda: watcher.step() and "worker0-2 are held before all_reduce float32[3]" in watcher.told())
        if end == "interrupt":
            cluster.interrupt()
            assert "KeyboardInterrupt" in repr(wait_for_error(cell))
        elif end == "run":
            watcher.run()
    if end != "interrupt":
        assert wait_for_error(cell) is None
    assert cluster.evaluate("add()") == [[3.0] * 3] * 3  # nothing holds it


@pytest.mark.skipif(HAS_HOOKS, reason="torch calls hooks")
def test_an_older_torch_does_not_stop_before_collectives_and_the_view_says_so(cluster):
    cluster.execute(SUM)
    watcher, cell = begin_paused(cluster, "add()")
    with watcher:
        assert watcher.told().count(f"torch {torch.__version__} cannot stop it before collectives") == 1
        watcher.run()
        assert wait_for_error(cell) is None
    assert "cannot" not in watcher.told()


def test_who_waits_for_whom_is_told_and_no_limit_runs_out_while_a_pass_is_held(cluster):
    limits = "dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout.total_seconds()"
    cluster.execute("import datetime\ndist.init_process_group(timeout=datetime.timedelta(seconds=2))")
    watcher, cell = begin_paused(cluster, STEP.format("ddp"))
    with watcher:
        while watcher.step(worker="worker1"):
            pass
        assert (
            "; worker1 waits for worker0,2, which are held before MeanBackward0: worker0,2 have not come to all_reduce"
        ) in watcher.told()
        time.sleep(4)
        watcher.run()
        assert wait_for_error(cell) is None
    wait_until(lambda: cluster.evaluate(limits), equals=[2.0] * 3)


def test_several_passes_of_a_cell_are_in_its_picture(cluster):
    with Watcher() as watcher:
        w = torch.ones(3, requires_grad=True)
        w.exp().sum().backward()
        (w * 2).sum().backward()
    assert watcher.told().startswith("backward() #2 on notebook: 3 of 3 nodes, over")
    [(line, found)] = watcher.others()
    assert line == "backward() on notebook: 3 of 3 nodes, over"
    assert "ExpBackward0" in {node.name for node in found.nodes.values()}
    assert f"<summary>{line}</summary>" in report.as_html(watcher.backward, watcher.told(), watcher.others())


def test_only_the_last_passes_are_kept(cluster):
    with Watcher(paused=True) as watcher:
        thread = threading.Thread(
            target=lambda: [torch.ones(2, requires_grad=True).sum().backward() for _ in range(12)]
        )
        thread.start()
        while thread.is_alive():
            wait_until(lambda: not thread.is_alive() or watcher.under_way, "a pass or the end")
            watcher.under_way and watcher.step(3)
    assert len(watcher.others()) < 8


def test_another_call_of_the_engine_does_not_halt(cluster):
    w = torch.ones(3, requires_grad=True)
    y = w.exp()
    with Watcher(paused=True) as watcher:
        thread = threading.Thread(target=lambda: y.sum().backward(retain_graph=True))
        thread.start()
        wait_until(lambda: watcher.under_way and watcher.step(), "a step")
        torch.autograd.grad(y.sum(), w, retain_graph=True)
        watcher.run()
        thread.join()


def test_closing_lets_a_halted_pass_go_on(cluster):
    w = torch.ones(3, requires_grad=True)
    errors = []

    def compute():
        try:
            w.exp().sum().backward()
        except Exception as error:
            errors.append(error)

    watcher = Watcher(paused=True)
    thread = threading.Thread(target=compute)
    thread.start()
    wait_until(lambda: watcher.under_way and watcher.step(), "a step")
    watcher.close()
    thread.join()
    assert errors == []
    assert w.grad is not None


def test_an_error_between_two_nodes_blames_none(cluster):
    def hook(gradient):
        raise ValueError("of a hook")

    w = torch.ones(3, requires_grad=True)
    y = w * 2
    y.register_hook(hook)
    loss = y.exp().sum()
    with Watcher() as watcher, pytest.raises(ValueError, match="of a hook") as raised:
        loss.backward()
    assert not getattr(raised.value, "__notes__", [])
    assert watcher.state == "failed"
    assert "failed at" not in told(watcher)


def test_a_loss_without_a_graph_gets_torchs_error(cluster):
    with Watcher(), pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
        torch.ones(()).backward()


def test_noting_rests_and_wakes(cluster):
    """While another block notes in another thread, and under torch's default device, too."""
    model = torch.nn.Linear(3, 1)
    with noted():  # as of another cell
        for device in (None, "cpu"):
            torch.set_default_device(device)
            try:
                with Watcher() as watcher:
                    for _ in range(8):
                        model(torch.ones(2, 3)).sum().backward()
            finally:
                torch.set_default_device(None)
    lines = {node.name: node.line for node in watcher.backward.nodes.values()}
    assert lines["AddmmBackward0"].endswith("model(torch.ones(2, 3)).sum().backward()")


def test_what_two_blocks_note_does_not_look_as_if_somebody_had_asked_for_nodes(cluster, monkeypatch):
    monkeypatch.setattr(noting._process_hooks, "nodes_were_seen", False)
    x = torch.ones(3, requires_grad=True)
    with Watcher() as watcher:
        with noted():
            inner = x.exp()
        inner.sin().sum().backward()
        assert not noting._process_hooks.nodes_were_seen
        assert all(node.line for node in watcher.backward.nodes.values() if node.kind == "operation")
        assert inner.grad_fn is not None
        assert noting._process_hooks.nodes_were_seen


def notes(watcher):
    return {node.name: node.notes for node in watcher.backward.nodes.values() if node.notes}


HOOKS = """
import functools, torch
from torch.utils.checkpoint import checkpoint
def of_tensor(g): return g
def of_node(*_): pass
def before(*_): pass
def of_leaf(scale, g): return g
def after(p): pass
def of_module(*_): pass
def before_module(*_): pass
class Callable:
    def __call__(self, g): return g
"""


def at(text):
    """The place of a function of `HOOKS`, as it is shown."""
    [line] = [number for number, line in enumerate(HOOKS.splitlines(), 1) if text in line]
    return ("hook", f"calls a hook of yours, hooks.py:{line}")


@pytest.fixture
def hooks(tmp_path):
    file = tmp_path / "hooks.py"
    file.write_text(HOOKS)
    names = {}
    exec(compile(HOOKS, str(file), "exec"), names)
    return names


def test_nodes_with_hooks_of_the_user_are_marked(cluster, hooks):
    w = torch.ones(3, requires_grad=True)
    w.register_hook(hooks["functools"].partial(hooks["of_leaf"], 2))
    w.register_post_accumulate_grad_hook(hooks["after"])
    with Watcher() as watcher:
        y = w.exp()
        y.register_hook(torch.no_grad()(hooks["of_tensor"]))
        y.register_hook(hooks["Callable"]())
        y.register_hook(hooks["before"]).remove()
        y = y.sin()
        y.grad_fn.register_hook(hooks["of_node"])
        y = y.cos()
        y.grad_fn.register_prehook(hooks["before"])
        loss = y.sum()
        del y
        loss.backward()
    assert notes(watcher) == {
        "Tensor": (at("of_leaf("), at("after(")),
        "ExpBackward0": (at("of_tensor("), at("__call__")),
        "SinBackward0": (at("of_node("),),
        "CosBackward0": (at("before("),),
    }
    drawn = report.as_html(watcher.backward, "")
    assert "calls a hook of yours" in drawn


def test_hooks_of_a_module_are_marked_where_they_run(cluster, hooks):
    layer = torch.nn.Linear(3, 3)
    layer.register_full_backward_hook(hooks["of_module"])
    layer.register_full_backward_pre_hook(hooks["before_module"])
    x = torch.ones(2, 3, requires_grad=True)
    with Watcher() as watcher:
        layer(x).sum().backward()
    found = [node.notes for node in watcher.backward.nodes.values() if node.notes]
    assert sorted(found) == sorted([(at("before_module("),), (at("of_module("),)])
    with Watcher() as watcher, pytest.warns(UserWarning, match="no inputs require gradients"):  # both at the outputs
        layer(torch.ones(2, 3)).sum().backward()
    [(before, after)] = [node.notes for node in watcher.backward.nodes.values() if node.notes]
    assert {before, after} == {at("of_module("), at("before_module(")}


def test_what_a_checkpoint_computes_again_is_marked(cluster, hooks):
    w = torch.ones(3, requires_grad=True)
    again = (("again", "needs values that a checkpoint computes again"),)
    with Watcher() as watcher:
        y = hooks["checkpoint"](lambda x: x.exp().sin(), w, use_reentrant=False)
        y.cos().sum().backward()
    assert notes(watcher) == {"ExpBackward0": again, "SinBackward0": again}


def test_a_hook_that_unpacks_saved_tensors_is_marked(cluster, hooks):
    w = torch.ones(3, requires_grad=True)
    with Watcher() as watcher:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, hooks["of_tensor"]):
            y = w.exp()
        with torch.autograd.graph.save_on_cpu():  # torch's own, not the user's
            y.sin().sum().backward()
    assert notes(watcher) == {"ExpBackward0": (at("of_tensor("),)}


def test_torchs_own_hooks_are_not_marked(cluster):
    for model in ("ddp", "sharded"):
        with Watcher() as watcher:
            cluster.execute(STEP.format(model))
        assert notes(watcher) == {}


OWNED = """
model.zero_grad()
ddp.zero_grad()
optimizer = torch.optim.SGD({0}, lr=0.1)
loss = {1}(x).pow(2).mean()
loss.backward()
optimizer.step()
"""


def unowned(watcher):
    return [line.strip() for line in told(watcher).splitlines() if "no optimizer" in line]


@pytest.mark.parametrize("on", [(0, 1, 2), (1,)])
def test_parameters_in_no_optimizer_are_told(cluster, on):
    chosen = f"plain.first.parameters() if rank in {on} else plain.parameters()"
    with Watcher() as watcher:
        cluster.execute("model = plain\n" + OWNED.format(chosen, "ddp"))
    who = "worker0-2" if len(on) == 3 else "worker1"
    assert unowned(watcher) == [
        f"{who}: 2 parameters got a gradient and belong to no optimizer: module.last.bias, module.last.weight"
    ]
    marked = {(key[0], node.label) for key, node in watcher.backward.nodes.items() if node.notes}
    assert {worker for worker, _ in marked} == {f"worker{rank}" for rank in on}


def step_by_hand(model, loss):
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def two_optimizers(model, loss):
    """One of them is made after the pass, and let go of before the cell ends."""
    loss.backward()
    torch.optim.SGD(model[1].parameters(), lr=0.1).step()
    OPTIMIZERS.append(torch.optim.Adam(model[0].parameters()))


def one_for_each(model, loss):
    """Each steps, and is gone, in a hook of its parameter."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: torch.optim.SGD([each], lr=0.1).step())
    loss.backward()


def copies_in_float32(model, loss):
    """The optimizer has copies of the parameters in half precision, and the others themselves."""
    model[0].to(torch.bfloat16)
    OPTIMIZERS.append(torch.optim.SGD(model[1].parameters(), lr=0.1))
    model[1](model[0](torch.ones(2, 3, dtype=torch.bfloat16)).float()).sum().backward()


def with_a_group_that_comes_later(model, loss):
    OPTIMIZERS.append(torch.optim.SGD(model[0].parameters(), lr=0.1))
    loss.backward()
    OPTIMIZERS[0].step()
    OPTIMIZERS[0].add_param_group({"params": model[1].parameters()})


OPTIMIZERS = []


@pytest.mark.parametrize(
    "train", [step_by_hand, two_optimizers, one_for_each, copies_in_float32, with_a_group_that_comes_later]
)
def test_of_no_healthy_program_it_is_said_that_no_optimizer_has_parameters(cluster, train):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    with Watcher() as watcher:
        train(model, model(torch.ones(2, 3)).sum())
    assert watcher.state == "over"
    assert unowned(watcher) == []
    del OPTIMIZERS[:]


MIXED = """
mixed = Net()
fully_shard(mixed.first, reshard_after_forward=False)
mixed.first.set_reshard_after_backward(False)  # so the model keeps the gathered parameters, which no optimizer has
"""


@pytest.mark.parametrize("model", ["sharded", "mixed"])
def test_of_fsdp2_nothing_is_said_of_optimizers(cluster, model):
    cluster.execute(MIXED + f"optimizer = torch.optim.SGD({model}.parameters(), lr=0.1)")
    with Watcher() as watcher:
        cluster.execute(STEP.format(model))
    assert unowned(watcher) == []


def test_an_optimizer_in_parts_has_all_its_parameters(cluster):
    with Watcher() as watcher:
        cluster.execute(
            "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
            "optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)\n"
            + STEP.format("ddp")
            + "optimizer.step()"
        )
    assert unowned(watcher) == []


def test_an_optimizer_of_an_earlier_cell_counts(cluster):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with Watcher() as watcher:
        model(torch.ones(2, 3)).sum().backward()
    assert unowned(watcher) == ["notebook: 2 parameters got a gradient and belong to no optimizer: 1.bias, 1.weight"]
    optimizer.add_param_group({"params": model[1].parameters()})
    with Watcher() as watcher:
        model(torch.ones(2, 3)).sum().backward()
    assert unowned(watcher) == []


def test_the_death_of_a_worker_ends_its_share(cluster):
    watcher = Watcher(paused=True)
    with watcher:
        cell = cluster.execute(
            "import os\nw = torch.ones(3, requires_grad=True)\nw.exp().sum().backward()", block=False
        )
        wait_until(lambda: watcher.backward is not None and len(watcher.backward.plan.workers) == 3, "all workers")
        os.kill(next(worker.pid for worker in cluster.workers if worker.name == "worker2"), signal.SIGKILL)
        wait_until(lambda: any(worker.lost for worker in cluster.workers), "the news of its death")
        watcher.run()
        wait_for_error(cell)
        wait_until(lambda: watcher.state in ("failed", "over"), "the end")
    assert "worker2" in watcher.told()
