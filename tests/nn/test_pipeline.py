"""A pipeline's outputs, losses and gradients are those of one process, to the last bit, whatever the schedule."""

import collections
import copy
import gc
import itertools
import threading
import weakref

import pytest
import torch
from helpers.models.pipeline_models import inboxes, parts_of
from helpers.waiting import wait_until

from nbdist import autograd as dist_autograd
from nbdist.errors import EncodeError, NotInitialized, UsageError, WorkerLost
from nbdist.nn import Pipeline, Reference, cut
from nbdist.nn.inbox import Abandoned
from nbdist.nn.schedules import Op
from nbdist.optim import DistributedOptimizer, clip_grad_norm_
from nbdist.testing import World

WIDTH = 6


@pytest.fixture(scope="module")
def five():
    with World(5) as world:
        yield world


@pytest.fixture
def world(five):
    """Four workers, and the one that drives them, which is the test's thread."""
    with five[4].activate():
        yield five
    wait_until(lambda: not any(agent.recorder.contexts.all() for agent in five), "the end of all contexts")


def stages(count, width=WIDTH, dtype=torch.float32):
    """Each different, with what makes trouble: draws at random, keeps statistics, works in place, is used twice."""
    torch.manual_seed(count)

    def one(index):
        shared = torch.nn.Linear(width, width)
        layers = [torch.nn.ReLU(inplace=True)] if index else []
        layers += [shared, torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3), torch.nn.Softshrink(0.01)]
        if index % 2:
            layers.append(torch.nn.Linear(width, width, bias=False))
        return torch.nn.Sequential(*layers).to(dtype)

    return [one(index) for index in range(count)]


def gradients_of(pipe, context_id):
    """By name of the state, wherever they are."""
    found = {}
    for part in parts_of(pipe):
        with part.agent.activate():
            gradients = dist_autograd.get_gradients(context_id)
        for stage in part.stages.values():
            found |= {stage.prefix + name: gradients.get(each) for name, each in stage.module.named_parameters()}
    return found


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None or found[name] is None:
            assert value is found[name], name
        else:
            assert torch.equal(found[name], value), (name, found[name] - value)


def reference_of(modules, **options):
    reference = Reference(copy.deepcopy(modules), **options)
    model = torch.nn.Sequential(*(stage.module for stage in reference.stages))
    return reference, model


CASES = [
    ("gpipe", 1, 1),
    ("gpipe", 2, 2),
    ("gpipe", 4, 4),
    ("gpipe", 2, 4),
    ("1f1b", 1, 1),
    ("1f1b", 2, 2),
    ("1f1b", 3, 3),
    ("1f1b", 4, 4),
    ("interleaved", 1, 3),
    ("interleaved", 2, 4),
    ("interleaved", 2, 6),
]


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize(("schedule", "workers", "count"), CASES)
def test_a_step_of_training_is_that_of_one_process(world, schedule, workers, count, checkpoint):
    modules = stages(count)
    for micro_batches, rows in ((1, 8), (2, 8), (4, 10), (8, 19)):
        options = {"micro_batches": micro_batches, "seed": 7, "checkpoint": checkpoint}
        reference, model = reference_of(modules, **options)
        pipe = Pipeline(modules, [f"worker{i}" for i in range(workers)], schedule=schedule, **options)
        x, y = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
        for _ in range(2):  # another step draws other numbers
            model.zero_grad()
            expected = reference.train_step(x, y, torch.nn.functional.mse_loss)
            with dist_autograd.context() as context_id:
                loss = pipe.train_step(x, y, torch.nn.functional.mse_loss)
                assert torch.equal(loss, expected)
                same(gradients_of(pipe, context_id), {name: p.grad for name, p in model.named_parameters()})
        same(pipe.state_dict()["model"], model.state_dict())  # the statistics of BatchNorm, too


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize(("workers", "count"), [(1, 1), (2, 2), (3, 3), (4, 4), (1, 3), (2, 4)])
def test_forward_is_recorded_and_its_gradients_are_those_of_one_process(world, workers, count, checkpoint):
    modules = stages(count)
    for micro_batches, rows in ((1, 8), (3, 8), (8, 19)):
        options = {"micro_batches": micro_batches, "seed": 3, "checkpoint": checkpoint}
        reference, model = reference_of(modules, **options)
        pipe = Pipeline(modules, [f"worker{i}" for i in range(workers)], **options)
        x = torch.randn(rows, WIDTH, requires_grad=True)
        expected = reference(x)
        expected.square().mean().backward()
        with dist_autograd.context() as context_id:
            out = pipe(x)
            assert torch.equal(out, expected)
            dist_autograd.backward(context_id, [out.square().mean()])
            same(gradients_of(pipe, context_id), {name: p.grad for name, p in model.named_parameters()})
            assert torch.equal(dist_autograd.get_gradients(context_id)[x], x.grad)
        same(pipe.state_dict()["model"], model.state_dict())


def test_a_batch_of_fewer_rows_has_fewer_micro_batches(world):
    modules = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)]
    reference, model = reference_of(modules, micro_batches=8)
    pipe = Pipeline(modules, ["worker0", "worker1"], micro_batches=8)
    x, y = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    expected = reference.train_step(x, y, mean_loss)
    with dist_autograd.context() as context_id:
        assert torch.equal(pipe.train_step(x, y, mean_loss), expected)
        same(gradients_of(pipe, context_id), {name: p.grad for name, p in model.named_parameters()})
    assert [len(row) for row in pipe.timeline().rows] == [6, 6]


def test_without_a_context_forward_keeps_no_graph(world):
    modules = stages(2)
    pipe = Pipeline(modules, ["worker0", "worker1"]).eval()
    _, model = reference_of(modules)
    model.eval()
    x = torch.randn(5, WIDTH)
    out = pipe(x)
    assert not out.requires_grad
    assert torch.allclose(out, model(x))
    assert not pipe.training
    assert pipe.train().training


def test_steps_in_a_context_add_up_and_optimizers_clip_and_step(world):
    modules = stages(3, dtype=torch.float64)
    reference, model = reference_of(modules, seed=1)
    pipe = Pipeline(modules, ["worker0", "worker1", "worker2"], seed=1)
    ours = DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x, y = torch.randn(2, 8, WIDTH, dtype=torch.float64), torch.randn(2, 8, WIDTH, dtype=torch.float64)
        with dist_autograd.context() as context_id:
            for part in range(2):
                pipe.train_step(x[part], y[part], torch.nn.functional.mse_loss)
                reference.train_step(x[part], y[part], torch.nn.functional.mse_loss)
            norm = clip_grad_norm_(context_id, pipe.parameter_rrefs(), 0.1)
            assert torch.allclose(norm, torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            ours.step(context_id)
        theirs.step()
        theirs.zero_grad()
    for name, value in pipe.state_dict()["model"].items():
        assert torch.allclose(value, model.state_dict()[name], rtol=0, atol=1e-14)


class Pair(torch.nn.Module):
    """Two tensors and a number go from stage to stage; only one of them has a gradient."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x, mask=None, scale=1.0):
        mask = (x > 0).float() if mask is None else mask
        return self.linear(x) * scale, mask, scale + 1


class Choose(torch.nn.Module):
    def forward(self, x, mask, scale):
        return {"out": x * mask, "scale": torch.full((len(x),), scale)}


def pair_loss(output, target, weight):
    return ((output["out"] - target).square().mean(1) * weight * output["scale"]).sum()


def test_stages_pass_tuples_and_losses_take_several_targets(world):
    torch.manual_seed(0)
    modules = [Pair(), Pair(), Choose()]
    options = {"micro_batches": 3, "reduction": "sum"}
    reference, model = reference_of(modules, **options)
    pipe = Pipeline(modules, ["worker1", "worker2", "worker3"], **options)
    x, targets = torch.randn(7, WIDTH), (torch.randn(7, WIDTH), torch.rand(7))
    expected = reference.train_step(x, targets, pair_loss)
    with dist_autograd.context() as context_id:
        assert torch.equal(pipe.train_step(x, targets, pair_loss), expected)
        same(gradients_of(pipe, context_id), {name: p.grad for name, p in model.named_parameters()})
        assert pipe(x)["scale"].tolist() == [3.0] * 7


def test_what_is_frozen_gets_no_gradient(world):
    modules = stages(3)
    modules[0].requires_grad_(False)
    modules[2].requires_grad_(False)
    reference, model = reference_of(modules)
    pipe = Pipeline(modules, ["worker0", "worker1", "worker2"])
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    expected = reference.train_step(x, y, torch.nn.functional.mse_loss)
    with dist_autograd.context() as context_id:
        assert torch.equal(pipe.train_step(x, y, torch.nn.functional.mse_loss), expected)
        same(gradients_of(pipe, context_id), {name: p.grad for name, p in model.named_parameters()})


def test_stages_may_be_made_where_they_live_and_be_the_driver_s(world):
    pipe = Pipeline([make_stage, make_stage], [4, "worker2"])
    assert repr(pipe) == "Pipeline(2 stages on worker4, worker2; 4 micro-batches, 1f1b)"
    assert pipe.eval()(torch.ones(3, WIDTH)).shape == (3, WIDTH)
    assert sorted(pipe.state_dict()["model"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert [rref.owner().name for rref in pipe.parameter_rrefs()] == ["worker4"] * 2 + ["worker2"] * 2


def make_stage():
    return torch.nn.Linear(WIDTH, WIDTH)


def test_a_cut_model_keeps_its_names_and_its_state_comes_back(world):
    model = torch.nn.Sequential(*stages(3))
    pipe = Pipeline(model, ["worker0", "worker1"], at=["2"])
    state = pipe.state_dict()["model"]
    same(state, model.state_dict())
    other = Pipeline([make_stage, make_stage], ["worker0", "worker1"])
    with pytest.raises(UsageError, match=r"not the state of these stages: 4 names are missing \(0.bias, 0.weight"):
        other.load_model(state)
    again = Pipeline(torch.nn.Sequential(*stages(3)), ["worker3", "worker0"], stages=2)
    again.load_model({name: torch.zeros_like(value) for name, value in state.items()})
    assert not any(value.any() for value in again.state_dict()["model"].values())


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Pipeline(stages(2), []), "needs a worker"),
        (lambda: Pipeline([], ["worker0"]), "at least one stage"),
        (lambda: Pipeline(torch.nn.Linear(2, 2), ["worker0"]), r"a Sequential, or of a list of stages, not of Linear"),
        (lambda: Pipeline([3], ["worker0"]), "stage 0 should be a module"),
        (lambda: Pipeline([dict], ["worker0"]), "stage 0 should be a module"),
        (lambda: Pipeline(stages(3), ["worker0", "worker1"]), "3 stages do not go evenly onto 2 workers"),
        (lambda: Pipeline(stages(2), ["worker0", "worker0"]), "is named once"),
        (lambda: Pipeline(stages(4), ["worker0", "worker1"], schedule="1f1b"), 'use "interleaved"'),
        (lambda: Pipeline(stages(2), ["worker0", "worker1"], schedule="zb"), "there is no 'zb'"),
        (lambda: Pipeline(stages(1), ["worker0"], micro_batches=0), "at least one micro-batch"),
        (lambda: Reference(stages(1), micro_batches=0), "at least one micro-batch"),
        (lambda: Pipeline(stages(1), ["worker0"], reduction="foo"), 'reduction is "mean" or "sum".*not \'foo\''),
        (lambda: Reference(stages(1), reduction="foo"), 'reduction is "mean" or "sum".*not \'foo\''),
        (lambda: Reference(stages(1), reduction=None), "not None"),
        (lambda: Reference([]), "at least one stage"),
        (lambda: Pipeline(stages(1), ["worker9"]), "worker9"),
        (lambda: Pipeline(stages(1), ["worker0/cuda:0/1"]), "not a place"),
    ],
)
def test_what_is_no_pipeline_is_refused(world, make, told):
    with pytest.raises((UsageError, RuntimeError), match=told):
        make()


@pytest.mark.parametrize(
    ("inputs", "targets", "told"),
    [
        (torch.ones(0, WIDTH), torch.ones(0, WIDTH), "the batch is empty"),
        (torch.tensor(1.0), torch.ones(1), "without dimensions"),
        (3, torch.ones(1), "needs a tensor"),
        ((torch.ones(3, 1), torch.ones(4, 1)), torch.ones(3), r"have the shapes \(3, 1\), \(4, 1\)"),
        (torch.ones(3, WIDTH), torch.ones(4, WIDTH), "3 rows of inputs, and 4 of targets"),
        (torch.ones(3, WIDTH, requires_grad=True), torch.ones(3, WIDTH), "no gradient"),
    ],
)
def test_what_is_no_batch_is_refused(world, inputs, targets, told):
    pipe = Pipeline(stages(2), ["worker0", "worker1"])
    with dist_autograd.context(), pytest.raises(UsageError, match=told):
        pipe.train_step(inputs, targets, torch.nn.functional.mse_loss)


@pytest.mark.parametrize(
    ("targets", "told"),
    [(torch.ones(4, WIDTH), "3 rows of inputs, and 4 of targets"), ((), "have no tensor"), (1.0, "have no tensor")],
)
def test_a_reference_refuses_targets_that_do_not_fit_its_inputs(targets, told):
    with pytest.raises(UsageError, match=told):
        Reference(stages(1)).train_step(torch.ones(3, WIDTH), targets, torch.nn.functional.mse_loss)


def test_training_needs_a_context(world):
    pipe = Pipeline(stages(1), ["worker0"])
    with pytest.raises(UsageError, match=r"dist_autograd\.context"):
        pipe.train_step(torch.ones(2, WIDTH), torch.ones(2, WIDTH), torch.nn.functional.mse_loss)


class Fragile(torch.nn.Module):
    """Fails where it is given what it does not like, forward or backward."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if x.min() < -90:
            raise ValueError("too small")
        out = self.linear(x)
        if x.max() > 90:
            out.register_hook(fail)
        return out


def fail(gradient):
    raise ArithmeticError("no gradient")


def mean_loss(output, target):
    return (output - target).square().mean()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize(
    ("value", "error", "what"),
    [
        (-100.0, ValueError, "forward of micro-batch 3, given float32[2, 6]"),
        (100.0, ArithmeticError, "backward of micro-batch 3"),
    ],
    ids=["forward", "backward"],
)
def test_a_stage_that_fails_is_named_and_the_next_step_works(world, schedule, where, value, error, what):
    modules = [torch.nn.Identity(), torch.nn.Identity(), torch.nn.Identity()]
    modules[where] = Fragile()
    modules[(where + 1) % 3] = torch.nn.Linear(WIDTH, WIDTH)
    if where == 2:
        modules[0], modules[1] = torch.nn.Identity(), modules[0]
        modules[1] = torch.nn.Identity()
    pipe = Pipeline(modules, ["worker0", "worker1", "worker2"], schedule=schedule)
    x, y = torch.zeros(8, WIDTH), torch.zeros(8, WIDTH)
    bad = x.clone()
    bad[6] = value
    if where == 1:  # what comes there is not what was given
        modules = [torch.nn.Identity(), Fragile(), torch.nn.Linear(WIDTH, WIDTH)]
        pipe = Pipeline(modules, ["worker0", "worker1", "worker2"], schedule=schedule)
    with dist_autograd.context() as context_id:
        with pytest.raises(error) as caught:
            pipe.train_step(bad, y, mean_loss)
        told = "\n".join(caught.value.__notes__)
        assert what in told
        assert f"stage {where}" in told
        assert f"raised on worker{where}, in run_step:" in told
        assert not any(value is not None for value in gradients_of(pipe, context_id).values())
        loss = pipe.train_step(x, y, mean_loss)
        reference, model = reference_of(modules)
        assert torch.equal(loss, reference.train_step(x, y, mean_loss))
        same(gradients_of(pipe, context_id), {name: p.grad for name, p in model.named_parameters()})


def test_stages_that_do_not_fit_are_named_with_their_shapes(world):
    pipe = Pipeline([torch.nn.Linear(3, 4), torch.nn.Linear(5, 6)], ["worker0", "worker1"])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        pipe(torch.ones(8, 3))
    assert any("stage 1, forward of micro-batch 0, given float32[2, 4]" in note for note in caught.value.__notes__)


def bad_loss(output, target):
    return output


def nan_loss(output, target):
    return (output * float("nan")).sum()


def test_losses_that_are_none(world):
    pipe = Pipeline(stages(2), ["worker0", "worker1"])
    x = torch.ones(8, WIDTH)
    with dist_autograd.context() as context_id:
        with pytest.raises(UsageError, match=r"a scalar, not a tensor of shape \(2, 6\)"):
            pipe.train_step(x, x, bad_loss)
        with pytest.raises(FloatingPointError, match="the loss of micro-batch 0 is nan"):
            pipe.train_step(x, x, nan_loss)
        assert not any(value is not None for value in gradients_of(pipe, context_id).values())
        assert pipe.train_step(x, x, nan_loss, finite=False).isnan()


# --- what stays -----------------------------------------------------------------------------------


def test_nothing_stays_of_a_step_nor_of_a_pipeline(world):
    pipe = Pipeline(stages(3), ["worker0", "worker1", "worker2"])
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    parts = [weakref.ref(part) for part in parts_of(pipe)]

    for _ in range(2):
        with dist_autograd.context():
            pipe.train_step(x, y, mean_loss)
            pipe(x)
    tensors = live_tensors()
    for _ in range(5):
        with dist_autograd.context() as context_id:
            pipe.train_step(x, y, mean_loss)
            dist_autograd.backward(context_id, [pipe(x).sum()])
    wait_until(lambda: live_tensors() <= tensors)
    assert all(part() for part in parts)
    assert not inboxes()
    del pipe
    wait_until(lambda: gc.collect() >= 0 and not any(part() for part in parts))


def live_tensors():
    gc.collect()
    return tensors_in_memory()


def tensors_in_memory():
    return sum(isinstance(value, torch.Tensor) for value in gc.get_objects())


def test_several_threads_may_use_a_pipeline(world):
    pipe = Pipeline(stages(2), ["worker0", "worker1"]).eval()
    x = torch.randn(8, WIDTH)
    expected = pipe(x)
    found = []

    def ask():
        with world[4].activate():
            found.extend(torch.equal(pipe(x), expected) for _ in range(5))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 15


def test_a_pipeline_of_a_world_that_has_ended_says_so():
    with World(2) as world, world[0].activate():
        pipe = Pipeline(stages(1), ["worker1"])
        state = pipe.state_dict()
    uses = [
        lambda: pipe(torch.ones(2, WIDTH)),
        pipe.parameter_rrefs,
        pipe.eval,
        pipe.state_dict,
        lambda: pipe.load_state_dict(state),
        lambda: pipe.load_model(state["model"]),
    ]
    for use in uses:
        with pytest.raises(NotInitialized):
            use()
    with World(2) as other, other[0].activate():
        for use in uses:
            with pytest.raises(NotInitialized, match="has ended"):
                use()
    assert pipe.training


def test_the_timeline_tells_what_ran(world):
    pipe = Pipeline(cut(torch.nn.Sequential(*stages(4)), 4), [f"worker{i}" for i in range(4)], micro_batches=6)
    with pytest.raises(UsageError, match="no step"):
        pipe.timeline()
    with dist_autograd.context():
        pipe.train_step(torch.randn(12, WIDTH), torch.randn(12, WIDTH), mean_loss)
    told = pipe.timeline()
    assert [len(row) for row in told.rows] == [12] * 4
    for row in told.rows:
        assert all(before.end <= after.start for before, after in itertools.pairwise(row))
    started = {span.op: span.start for row in told.rows for span in row}
    for op in started:
        if op.kind == "F" and op.stage:
            # The next stage is given it before its sender has seen to what comes after.
            assert started[op] > started[op._replace(stage=op.stage - 1)]
    assert 0 <= told.ideal_bubble < 1
    assert 0 <= told.bubble < 1
    assert told._repr_html_().count('<img src="data:image/svg+xml') == 2
    assert "ideal" in repr(told)


# --- what is not as simple as it looks ------------------------------------------------------------


class Twice(torch.nn.Module):
    """Returns one tensor twice; what comes next changes one of them in place."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        out = self.linear(x)
        return out, out


class Both(torch.nn.Module):
    def forward(self, a, b):
        return a.relu_() * 2 + b


class Reversed(torch.autograd.Function):
    """The gradient reversal of domain-adversarial training: the values stay, the gradient changes its sign."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Branches(torch.nn.Module):
    """Returns a tensor and three others that share its memory, each with a gradient of its own."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        out = self.linear(x)
        hooked = out.view_as(out)
        hooked.register_hook(lambda gradient: 3 * gradient)
        return out, Reversed.apply(out), hooked, out[:, :1]


class Joined(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, *branches):
        return sum(head(branch) for head, branch in zip(self.heads, branches, strict=False)) + branches[3]


class Columns(torch.nn.Module):
    """Returns two tensors that share memory, but no element."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        out = self.linear(x)
        return out[:, :WIDTH], out[:, WIDTH:]


class Spoils(torch.nn.Module):
    def forward(self, a, b, *_):
        return a.mul_(2) + b


class AlwaysDrops(torch.nn.Module):
    """Draws at random in evaluation mode, too."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.nn.functional.dropout(self.linear(x).square(), 0.5, training=True)


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: [Twice(), Both()],
        lambda: [Branches(), Joined()],
        lambda: [Columns(), Spoils()],
        lambda: [AlwaysDrops(), torch.nn.Linear(WIDTH, WIDTH)],
    ],
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_modules_that_make_trouble(world, make, training, checkpoint):
    modules = make()
    for module in modules:
        module.train(training)
    plain, model = reference_of(modules, seed=2)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    expected = plain.train_step(x, y, mean_loss)
    pipe = Pipeline(modules, ["worker0", "worker1"], seed=2, checkpoint=checkpoint)
    with dist_autograd.context() as context_id:
        assert torch.equal(pipe.train_step(x, y, mean_loss), expected)
        same(gradients_of(pipe, context_id), {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("workers", [["worker0", "worker1"], ["worker0"]], ids=["sent", "here"])
def test_an_input_that_shares_memory_with_another_cannot_be_changed(world, workers, checkpoint):
    pipe = Pipeline([Branches(), Spoils()], workers, checkpoint=checkpoint)
    with dist_autograd.context(), pytest.raises(UsageError, match="changes one of its inputs in place"):
        pipe.train_step(torch.randn(8, WIDTH), torch.randn(8, WIDTH), mean_loss)


class Counting(torch.nn.Module):
    """Every second micro-batch changes the buffer that all of them read."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        out = self.linear(x).square() * self.scale
        if x[0, 0] > 0:
            self.scale = self.scale + 1
        return out


def test_a_checkpoint_reads_the_buffers_of_its_time(world):
    x, y = torch.rand(8, WIDTH), torch.randn(8, WIDTH)
    x[2:4] *= -1
    found = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        pipe = Pipeline([Counting()], ["worker0"], schedule="gpipe", checkpoint=checkpoint)
        with dist_autograd.context() as context_id:
            pipe.train_step(x, y, mean_loss)
            found.append(gradients_of(pipe, context_id))
        assert pipe.state_dict()["model"]["0.scale"] == 4
    same(found[1], found[0])


def test_parameters_that_stages_share(world):
    first, last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    with pytest.raises(UsageError, match="weight of stage 1 is a parameter of stage 0, too"):
        Pipeline([first, last], ["worker0", "worker1"])
    middle = torch.nn.Linear(WIDTH, WIDTH)
    modules = [first, middle, last, torch.nn.Identity()]
    pipe = Pipeline(modules, ["worker0", "worker1"])
    assert len(pipe.parameter_rrefs()) == 5
    reference, model = reference_of(modules)
    ours = DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.1)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    with dist_autograd.context() as context_id:
        pipe.train_step(x, y, mean_loss)
        ours.step(context_id)
    reference.train_step(x, y, mean_loss)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, value in pipe.state_dict()["model"].items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-6)


class Learned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return (output - target).square().mean() * self.scale


def detached_loss(output, target):
    return (output.detach() - target).square().mean()


def test_losses_that_would_train_nothing(world):
    pipe = Pipeline(stages(2), ["worker0", "worker1"])
    x = torch.randn(8, WIDTH)
    with dist_autograd.context():
        with pytest.raises(UsageError, match="its parameters would not learn"):
            pipe.train_step(x, x, Learned())
        with pytest.raises(UsageError, match="the loss does not require grad"):
            pipe.train_step(x, x, detached_loss)
        with pytest.raises(UsageError, match="the targets of train_step have no tensor"):
            pipe.train_step(x, None, mean_loss)


Scores = collections.namedtuple("Scores", "scores rows")


class Named(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def forward(self, x):
        return Scores(x * 2, x if self.rows else x.t())


def test_outputs_are_put_together_by_rows_and_nothing_else(world):
    x = torch.randn(7, WIDTH)
    out = Pipeline([torch.nn.Identity(), Named(True)], ["worker0", "worker1"], micro_batches=3)(x)
    assert type(out) is Scores
    assert torch.equal(out.scores, x * 2)
    assert torch.equal(out.rows, x)
    with pytest.raises(UsageError, match=r"3 rows has the shape \(6, 3\)"):
        Pipeline([torch.nn.Identity(), Named(False)], ["worker0", "worker1"], micro_batches=3)(x)


# --- what does not arrive -------------------------------------------------------------------------


class Unreadable:
    """Can be sent, and not read."""

    def __reduce__(self):
        return explode, ()


def explode():
    raise LookupError("cannot be read here")


class WithThing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x), Unreadable()


class Ignore(torch.nn.Module):
    def forward(self, x, thing):
        return x


@pytest.mark.timeout(60)
def test_what_cannot_be_read_there_fails_the_step(world):
    pipe = Pipeline([WithThing(), Ignore()], ["worker0", "worker1"])
    x = torch.randn(8, WIDTH)
    with dist_autograd.context(), pytest.raises(RuntimeError, match="cannot be read here"):
        pipe.train_step(x, x, mean_loss)
    with pytest.raises(RuntimeError, match="cannot be read here"):
        pipe(x)


@pytest.mark.timeout(60)
def test_workers_that_have_lost_each_other_fail_the_step_though_the_driver_sees_both():
    with World(3) as world, world[2].activate():
        pipe = Pipeline(stages(2), ["worker0", "worker1"])
        world[0].lose(world[1].me.incarnation, "is cut off")
        for _ in range(2):
            with dist_autograd.context(), pytest.raises(WorkerLost, match="worker1"):
                pipe.train_step(torch.randn(8, WIDTH), torch.randn(8, WIDTH), mean_loss)


def test_a_step_that_is_not_begun_everywhere_leaves_nothing(world):
    pipe = Pipeline(stages(2), ["worker0", "worker1"])
    x = torch.randn(8, WIDTH)
    lock = threading.Lock()
    with dist_autograd.context():
        for _ in range(3):
            with pytest.raises(EncodeError):
                pipe.train_step(x, x, lambda output, target: lock)
    wait_until(lambda: gc.collect() >= 0 and not inboxes())


def test_what_came_for_a_step_that_is_abandoned_before_it_begins_is_dropped(world):
    pipe = Pipeline(stages(2), ["worker0", "worker1"])
    part = parts_of(pipe)[1]
    with world[1].activate():
        part.deliver(0, "F", 1, 0, 0, torch.ones(1))
        assert part.inbox(0).has(Op("F", 1, 0))
        part.abandon(0, None, "the test has had enough")
        assert part.inbox(0) is None
        part.deliver(0, "F", 1, 1, 0, torch.ones(1))
        assert part.inbox(0) is None
    with dist_autograd.context(), pytest.raises(Abandoned, match=r"had enough \(this worker had not begun the step\)"):
        pipe.train_step(torch.randn(8, WIDTH), torch.randn(8, WIDTH), mean_loss)
    with dist_autograd.context():
        pipe.train_step(torch.randn(8, WIDTH), torch.randn(8, WIDTH), mean_loss)


def test_a_step_that_failed_is_not_kept_by_its_error(world):
    pipe = Pipeline(stages(2), ["worker0", "worker1"])
    x = torch.randn(8, WIDTH)
    before = live_tensors()
    gc.disable()
    try:
        with dist_autograd.context():
            for _ in range(3):
                with pytest.raises(FloatingPointError):
                    pipe.train_step(x, x, nan_loss)
        wait_until(lambda: tensors_in_memory() <= before)
    finally:
        gc.enable()
