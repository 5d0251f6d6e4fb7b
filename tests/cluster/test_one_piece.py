"""`%dist_compare`: a model that the notebook holds in one piece, and the same on workers, whole or in shards."""

import re

import pytest

MODEL = """
import torch
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 1.0
        self.up, self.act, self.down = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)
        self.norm, self.drop = torch.nn.LayerNorm(8), torch.nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        self.calls += 1
        hidden = self.act(self.up(x) * self.scale)
        return self.norm(x + self.down(self.drop(hidden)))
def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block(), torch.nn.Linear(8, 3))
def step(model, x):
    with torch.inference_mode():
        return model(x).square().mean()
def given():
    return torch.linspace(-1, 1, 32).reshape(4, 8)
"""
LINE_OF_ACT = 1 + MODEL.split("\n").index("        hidden = self.act(self.up(x) * self.scale)")
IMPORTS = """%%remote
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (2,))
"""
WAYS = {
    "copy": "model = build()",
    "ddp": "model = torch.nn.parallel.DistributedDataParallel(build())",
    "fsdp2": "model = build()\nfor layer in model:\n    fully_shard(layer, mesh=mesh)\nfully_shard(model, mesh=mesh)",
    "tensor parallel": "model = build()\nfor block in model[:2]:\n"
    "    parallelize_module(block, mesh, {'up': ColwiseParallel(), 'down': RowwiseParallel()})",
}
EQUAL = "is equal in the notebook and on worker0,1 within rounding: parameters, buffers, 16 inputs and outputs"
INPUTS = "  nothing after it was compared: give the model the same input in the notebook and on workers"
LEFT = """
state = dict(
    hooks=sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()),
    modes=[each.training for each in model.modules()],
    draws=(torch.get_rng_state().sum().item(), __import__("random").getstate()[1][:3]),
    grads=[None if each.grad is None else (id(each.grad), each.grad.sum().item()) for each in model.parameters()],
    buffers=[each.item() for each in model.buffers()],
    kinds=[type(each).__name__ for each in model.parameters()],
)
"""


@pytest.fixture(scope="module")
def models(notebook):
    notebook.run(MODEL)
    notebook.name_of_model = notebook.run("%%remote\n" + MODEL[1:], timeout=120).name
    notebook.run(IMPORTS, timeout=120)
    return notebook


@pytest.fixture(params=WAYS)
def sharded(models, request):
    """The model on both sides, in evaluation, in one of the ways to hold it on workers."""
    models.run("model, x = build().eval(), given()")
    models.run(
        f"%%remote\n{WAYS[request.param]}\nx, inner = given(), getattr(model.eval(), 'module', model)", timeout=120
    )
    models.way = request.param
    return models


def compare(notebook, line="model(x)"):
    return notebook.run(f"%dist_compare {line}", timeout=120).stdout.removesuffix("\n")


def test_a_healthy_model_is_equal_and_stays_as_it_was(sharded):
    sharded.run("%%remote\nmodel(x).square().mean().backward()")  # FSDP2 leaves the root's parameters whole before it
    sharded.run("model(x).square().mean().backward()")
    for run in ("", "%%remote\n"):
        sharded.run(f"{run}before = None\n{LEFT}\nbefore = state")
    assert compare(sharded) == f"model(x) {EQUAL}"
    assert compare(sharded, "step(model, x)") == f"step(model, x) {EQUAL}"
    assert compare(sharded, "model(x).sum().backward()") == f"model(x).sum().backward() {EQUAL}"
    assert compare(sharded, "model(torch.randn(4, 8)) -r 0,1") == f"model(torch.randn(4, 8)) {EQUAL}"
    for run in ("", "%%remote\n"):
        sharded.run(f"{run}{LEFT}\nassert state == before, (state, before)")


def test_each_bit_counts(sharded):
    told = compare(sharded, "model(x) --exact")
    if sharded.way != "tensor parallel":  # which sums in another order
        assert told == f"model(x) {EQUAL.replace('within rounding', 'to the bit')}"
        sharded.run("%%remote 1\nwith torch.no_grad():\n    inner[2].bias[:] = inner[2].bias * (1 + 2e-7)")
        assert compare(sharded) == f"model(x) {EQUAL}"
        told = compare(sharded, "model(x) --exact")
        assert told.startswith("model(x) differs from the notebook's first in parameter model.2.bias\n  worker")
    assert "e-08 apart" in told


def test_a_parameter_of_one_worker(sharded):
    sharded.run(
        "%%remote 1\nweight = inner[1].down.weight.detach()\nwith torch.no_grad():\n"
        "    getattr(weight, 'to_local', lambda: weight)()[0, 0] += 0.01"
    )
    first, *lines = compare(sharded).splitlines()
    assert first == "model(x) differs from the notebook's first in parameter model.1.down.weight"
    where = {"fsdp2": ["worker0,1: first at [4, 0]"], "tensor parallel": ["worker0,1: first at [0, 8]"]}
    for line, worker in zip(lines, where.get(sharded.way, ["worker1: first at [0, 0]", "worker0: equal"]), strict=True):
        assert line.startswith(f"  {worker}")
        assert "first" not in line or line.endswith("; 1 of 128 values, at most 0.01 apart")


def test_a_forward_of_one_worker(sharded):
    sharded.run("%%remote 1\ninner[1].scale = 1.01")
    first, told, other = compare(sharded).splitlines()
    assert first == "model(x) differs from the notebook's first in the output of model.1.act"
    line = f"{sharded.name_of_model}:{LINE_OF_ACT}"
    assert re.match(
        rf"  worker1: first at .*; \d+ of \d\d values, at most 0\.\d+ apart; called at {re.escape(line)}", told
    )
    before = {"fsdp2": "all_gather", "tensor parallel": "all_reduce float32[4, 8] (", "ddp": "broadcast float32[2] ("}
    assert ("; the collective before it: " + before.get(sharded.way, "none") in told) == (sharded.way in before)
    down = ", in the output of model.1.down: first" if sharded.way == "tensor parallel" else ": equal"
    assert other.startswith(f"  worker0{down}")
    sharded.run("%%remote 1\ninner[1].scale = 1.0000001")
    assert compare(sharded) == f"model(x) {EQUAL}"


def test_a_worker_in_float16(sharded):
    sharded.run("%%remote 1\ninner.half()\nx = x.half()")
    assert compare(sharded).splitlines() == [
        "model(x) differs from the notebook's first in buffer model.0.calls",
        "  worker1: float16() instead of float32()",
        "  worker0: equal",
    ]


def test_a_half_of_the_batch_on_each_worker_is_said_before_a_collective_fails(sharded):
    sharded.run("%%remote\nx = x[2 * rank : 2 * rank + 2]")
    first, told, last = compare(sharded).splitlines()
    assert first == "model(x) differs from the notebook's first in the input of model"
    assert told.partition(";")[0] == "  worker0,1: [0] float32(2, 8) instead of float32(4, 8)"
    assert last == INPUTS
    sharded.run("%%remote\nx = given() + 0.001 * rank")
    first, told, same, last = compare(sharded, "step(model, x)").splitlines()
    assert first == "step(model, x) differs from the notebook's first in the input of model"
    assert re.fullmatch(
        r"  worker1: \[0\] first at \[0, 0\]: -0.999\d* instead of -1; 32 of 32 values, at most 0.001 apart; called .*",
        told,
    )
    assert (same, last) == ("  worker0: equal", INPUTS)
    assert sharded.run("%remote all rank").result == "[0, 1]"


def test_dropout(sharded):
    sharded.run("%%remote\nmodel.train()")
    assert "; it is in training mode on the worker only" in compare(sharded)
    sharded.run("model.train()")
    told = compare(sharded)
    if sharded.way == "tensor parallel":  # each worker drops numbers of its slice
        assert told.startswith("model(x) differs from the notebook's first in the output of model.0.drop\n")
        assert "; it is in training mode with dropout: call the model's eval() in the notebook and on work" in told
    else:  # all draw from one seed
        assert told == f"model(x) {EQUAL}"


def test_a_part_of_a_model(models):
    models.run("model, x = build().eval(), given()")
    models.run("%%remote\nmodel, x = build().eval(), given()")
    assert compare(models, "model[0](x)") == f"model[0](x) {EQUAL.replace('16', '7')}"
    models.run("%%remote 1\nx[3, 7] = 2")
    first, told, _, last = compare(models, "model[0](x)").splitlines()
    assert first == "model[0](x) differs from the notebook's first in the input of model.0"
    assert told == "  worker1: [0] first at [3, 7]: 2 instead of 1; 1 of 32 values, at most 1 apart"
    assert last == INPUTS


def test_mixed_precision_rounds_as_its_coarsest_dtype(models):
    models.run("model, x = build().eval(), given()")
    models.run(
        "%%remote\nfrom torch.distributed.fsdp import MixedPrecisionPolicy\nmodel, x = build().eval(), given()\n"
        "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)\n"
        "fully_shard(model, mesh=mesh, mp_policy=policy);"
    )
    assert compare(models) == f"model(x) {EQUAL}"
    models.run("%%remote 1\nmodel[1].scale = 1.5")
    assert compare(models).startswith(
        "model(x) differs from the notebook's first in the output of model.1.act\n  worker1:"
    )


def test_compiled_models_are_compared_module_by_module(models):
    models.run("model, x = build().eval(), given()\nmodel(x);")
    models.run("%%remote\nmodel, x = torch.compile(build().eval(), backend='eager'), given()\nmodel(x);", timeout=120)
    assert compare(models) == f"model(x) {EQUAL}"


def test_what_the_notebook_has_no_room_for_is_said(models):
    models.run("model, x = build().eval(), given()\nfrom nbdist.cluster.inspection import one_piece")
    models.run("%%remote\nmodel, x = build().eval(), given()")
    models.run("room, one_piece.ROOM = one_piece.ROOM, 1024")
    told = (
        "16 inputs and outputs",
        "5 inputs and outputs; 11 later ones, for which the notebook had no room, were not compared",
    )
    assert compare(models) == f"model(x) {EQUAL.replace(*told)}"
    models.run("one_piece.ROOM = room")


def test_one_worker_and_an_interrupt(models):
    models.run("import time\nmodel, x = build().eval(), given()\ndef slow(model, x):\n    return model(x)")
    models.run(
        "%%remote\nimport time\nmodel, x = build().eval(), given()\ndef slow(model, x):\n    print('at it')\n"
        "    y = model(x)\n    time.sleep(600)"
    )
    assert compare(models, "model(x) -r 1") == f"model(x) {EQUAL.replace('worker0,1', 'worker1')}"
    for run in ("", "%%remote\n"):
        models.run(f"{run}{LEFT}\nbefore = state")
    cell = models.send("%dist_compare slow(model, x) -r 0")
    models.until(lambda: cell.stdout.count("at it") == 2)  # once for the input, once for the outputs
    models.interrupt()
    models.finish(cell)
    assert cell.error["ename"] == "KeyboardInterrupt"
    for run in ("", "%%remote\n"):
        models.run(f"{run}{LEFT}\nassert state == before, (state, before)")


def test_what_only_one_side_has(models):
    models.run("model, x = build().eval(), given()")
    models.run("%%remote\nmodel, x = build().eval(), given()\nif rank:\n    model[2].bias = None")
    first, told, _ = compare(models).splitlines()
    assert (first[-22:], told) == ("parameter model.2.bias", "  worker1: the worker has none")
    models.run("%%remote\nmodel = build().eval()\nif rank:\n    model.append(torch.nn.Identity())")
    first, told, _ = compare(models).splitlines()
    assert (first[-21:], told[:32]) == ("the output of model.3", "  worker1: the notebook has none")
    models.run("model = build().eval().append(torch.nn.Identity())")
    first, told, _ = compare(models).splitlines()
    assert (first[-21:], told[:30]) == ("the output of model.3", "  worker0: the worker has none")


def test_errors_are_the_users_and_leave_nothing_behind(models):
    models.run("model, x = build().eval(), given()")
    models.run("%%remote\nmodel, x = build().eval(), given()")
    for run in ("", "%%remote\n"):
        models.run(f"{run}{LEFT}\nbefore = state")
    error = models.run("%dist_compare model(x[:, :3])", check=False).error
    assert (error["ename"], error["evalue"][:27]) == ("RuntimeError", "mat1 and mat2 shapes cannot")
    models.run("%%remote 1\ndel x")
    error = models.run("%dist_compare model(x)", check=False).error
    assert (error["ename"], error["evalue"]) == ("NameError", "name 'x' is not defined")
    models.run("%%remote 1\nx = given()\nmodel[1].act.register_forward_hook(lambda *_: 1 / 0)")
    assert models.run("%dist_compare model(x)", check=False).error["ename"] == "ZeroDivisionError"
    models.run("%%remote 1\nmodel[1].act._forward_hooks.clear()")
    for run in ("", "%%remote\n"):
        models.run(f"{run}{LEFT}\nassert state == before, (state, before)")
    error = models.run("%dist_compare torch.sin(x)", check=False).error
    assert error["evalue"] == "torch.sin(x) names no model of the notebook; write its variable, as in step(model, x)"
    assert "x.shape" not in models.run("%dist_compare", check=False).error["evalue"]
