"""The state of optimizers and schedulers is that of the parameters, not of the workers which have them."""

import copy
import io
import math

import pytest
import torch
from torch.optim import lr_scheduler

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.nn import Pipeline
from nbdist.optim import DistributedLRScheduler, DistributedOptimizer

SIZE = 3


_owned = {}


def own(key, value):
    _owned[key] = torch.nn.Parameter(value)
    return rpc.RRef(_owned[key])


def lossy(key, x):
    return (_owned[key] * x).square().sum()


class Weights:
    """Four parameters, each on the worker that ``where`` names."""

    def __init__(self, where, values):
        self.where = where
        self.rrefs = [
            rpc.rpc_sync(name, own, args=((id(self), index), value))
            for index, (name, value) in enumerate(zip(where, values, strict=True))
        ]

    def step(self, optimizer, number):
        with dist_autograd.context() as context_id:
            losses = [
                rpc.rpc_sync(name, lossy, args=((id(self), index), torch.tensor(float(index + number + 1))))
                for index, name in enumerate(self.where)
            ]
            dist_autograd.backward(context_id, losses)
            optimizer.step(context_id)

    def values(self):
        return torch.stack([rref.to_here().detach() for rref in self.rrefs])


VALUES = [torch.linspace(index, index + 1, SIZE) for index in range(1, 5)]
PLACES = [
    ["worker1", "worker1", "worker2", "worker2"],
    ["worker2", "worker2", "worker1", "worker1"],
    ["worker1", "worker2", "worker1", "worker2"],
    ["worker2"] * 4,
    ["worker0", "worker1", "worker2", "worker0"],
]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def groups_of(rrefs):
    return [{"params": rrefs[:1], "lr": 0.05}, {"params": rrefs[1:]}]


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key][name], other[key][name]) for key in one for name in one[key])


@pytest.mark.parametrize(
    ("cls", "options"),
    [(torch.optim.Adam, {"lr": 0.1, "amsgrad": True}), (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9})],
)
def test_state_follows_the_parameters_and_is_in_torch_s_own_form(world, cls, options):
    alone = [torch.nn.Parameter(value.clone()) for value in VALUES]
    theirs = cls(groups_of(alone), **options)

    def step_alone(number):
        theirs.zero_grad()
        sum((p * (index + number + 1)).square().sum() for index, p in enumerate(alone)).backward()
        theirs.step()

    first = Weights(PLACES[0], VALUES)
    optimizer = DistributedOptimizer(cls, groups_of(first.rrefs), **options)
    for number in range(3):
        first.step(optimizer, number)
        step_alone(number)
    saved, values = through_a_file(optimizer.state_dict()), first.values()
    same(saved["state"], theirs.state_dict()["state"])
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1, 2, 3]]
    state_alone = copy.deepcopy(theirs.state_dict())  # of one process, and loaded by a distributed one below
    for number in range(3, 6):
        step_alone(number)
    for where in PLACES:
        for state in (saved, state_alone):
            moved = Weights(where, values)
            other = DistributedOptimizer(cls, groups_of(moved.rrefs), **{**options, "lr": 1.0})
            other.load_state_dict(state)
            for number in range(3, 6):
                moved.step(other, number)
            assert torch.equal(moved.values(), torch.stack(alone).detach()), where
    theirs.load_state_dict(saved)  # and torch's loads ours


def test_names_are_given_or_are_those_of_a_pipeline(world):
    weights = Weights(PLACES[0], VALUES)
    names = ["encoder.a", "encoder.b", "decoder.a", "decoder.b"]
    named = DistributedOptimizer(torch.optim.Adam, list(zip(names, weights.rrefs, strict=True)), lr=0.1)
    weights.step(named, 0)
    state = named.state_dict()
    assert list(state["state"]) == state["param_groups"][0]["params"] == names
    backwards = Weights(PLACES[0][::-1], VALUES[::-1])  # another order, and other workers
    pairs = list(zip(names[::-1], backwards.rrefs, strict=True))
    other = DistributedOptimizer(torch.optim.Adam, [{"params": pairs}], lr=0.1)
    other.load_state_dict(state)
    same(other.state_dict()["state"], state["state"])

    tied = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(tied, torch.nn.ReLU(), torch.nn.Linear(2, 2), tied)
    pipe = Pipeline(model, ["worker1"], at=["1", "2"])
    optimizer = DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.1)
    assert optimizer.state_dict()["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    both = [*pipe.parameter_rrefs(), *Pipeline([torch.nn.Linear(2, 2)], ["worker2"]).parameter_rrefs()]
    optimizer = DistributedOptimizer(torch.optim.SGD, both, lr=0.1)
    assert optimizer.state_dict()["param_groups"][0]["params"] == [0, 1, "2.weight", "2.bias", 4, 5]


def test_a_state_of_something_else_is_refused_and_changes_nothing(world):
    weights = Weights(PLACES[0], VALUES)
    optimizer = DistributedOptimizer(torch.optim.Adam, weights.rrefs, lr=0.1)
    weights.step(optimizer, 0)
    state = optimizer.state_dict()

    def refused(cls, given, told, loaded=state):
        other = DistributedOptimizer(cls, given, lr=0.5)
        with pytest.raises(nbdist.UsageError, match=told):
            other.load_state_dict(loaded)
        assert other.state_dict()["state"] == {}
        assert {group["lr"] for group in other.state_dict()["param_groups"]} == {0.5}

    old = {"worker1": {"state": {}, "param_groups": []}, "worker2": {"state": {}, "param_groups": []}}
    refused(torch.optim.Adam, weights.rrefs, r"an older form, keyed by workers \(worker1, worker2\)", old)
    refused(torch.optim.Adam, weights.rrefs, r"not what the state_dict\(\) of the optimizer returns", {"state": 3})
    refused(torch.optim.Adam, weights.rrefs[1:], r"other parameters: 1 name is unknown \(3\)")
    pairs = list(zip("abcd", weights.rrefs, strict=True))
    refused(torch.optim.Adam, pairs, r"4 names are missing \(a, b, c, …\), 4 names are unknown \(0, 1, 2, …\)")
    refused(
        torch.optim.Adam,
        [{"params": weights.rrefs[:2]}, {"params": weights.rrefs[2:]}],
        r"0, 1, 2, … in one group; this optimizer has them in the groups 0, 1",
    )
    wide = Weights(PLACES[0], [torch.ones(2), *VALUES[1:]])
    refused(torch.optim.Adam, wide.rrefs, r"a parameter 0 of shape \(3,\); here 0 has the shape \(2,\)")


class Adaptive(torch.optim.SGD):
    """Has an option that depends on its parameters, as optimizers that find their own rates have."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["seen"] = sum(p.abs().sum().item() for p in group["params"])


def test_options_in_which_workers_differ_stay_with_their_parameters(world):
    weights = Weights(PLACES[0], VALUES)
    optimizer = DistributedOptimizer(Adaptive, weights.rrefs, lr=0.01)
    weights.step(optimizer, 0)
    state = through_a_file(optimizer.state_dict())
    seen = [(group["params"], group["seen"]) for group in state["param_groups"]]
    assert [params for params, _ in seen] == [[0, 1], [2, 3]]
    turned = Weights(PLACES[1], VALUES)
    other = DistributedOptimizer(Adaptive, turned.rrefs, lr=0.01)
    other.load_state_dict(state)
    assert [(group["params"], group["seen"]) for group in other.state_dict()["param_groups"]] == seen
    together = DistributedOptimizer(Adaptive, Weights(PLACES[3], VALUES).rrefs, lr=0.01)
    with pytest.raises(nbdist.UsageError, match="in one group on worker2; when they were saved they were on several"):
        together.load_state_dict(state)


SCHEDULERS = {
    "step": lambda optimizer, make: make(optimizer, lr_scheduler.MultiStepLR, [2, 5], gamma=0.5),
    "lambdas": lambda optimizer, make: make(
        optimizer, lr_scheduler.LambdaLR, [lambda n: 1 / (n + 1), lambda n: 0.9**n]
    ),
    "one cycle": lambda optimizer, make: make(optimizer, lr_scheduler.OneCycleLR, [0.1, 0.2], total_steps=20),
    "plateau": lambda optimizer, make: make(optimizer, lr_scheduler.ReduceLROnPlateau, patience=0),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_schedule_goes_on_whichever_workers_have_which_groups(world, kind):
    alone = [torch.nn.Parameter(value.clone()) for value in VALUES]
    theirs = torch.optim.SGD(groups_of(alone), lr=0.1, momentum=0.5)
    their_rate = SCHEDULERS[kind](theirs, lambda optimizer, cls, *a, **k: cls(optimizer, *a, **k))

    def ours(where):
        optimizer = DistributedOptimizer(torch.optim.SGD, groups_of(Weights(where, VALUES).rrefs), lr=0.1, momentum=0.5)
        return optimizer, SCHEDULERS[kind](optimizer, lambda o, cls, *a, **k: DistributedLRScheduler(cls, o, *a, **k))

    def step(rate, number):
        rate.step(*([math.sin(number)] if kind == "plateau" else []))

    theirs.step()
    optimizer, rate = ours(PLACES[0])  # of which worker1 has both groups, and worker2 one of them
    for number in range(4):
        step(their_rate, number)
        step(rate, number)
    saved = through_a_file({"optimizer": optimizer.state_dict(), "rate": rate.state_dict()})
    for number in range(4, 9):
        step(their_rate, number)
    for where in PLACES:
        optimizer, rate = ours(where)
        optimizer.load_state_dict(saved["optimizer"])
        rate.load_state_dict(saved["rate"])
        for number in range(4, 9):
            step(rate, number)
        found = optimizer.state_dict()["param_groups"]
        assert [group["lr"] for group in found] == [group["lr"] for group in theirs.param_groups], where


def test_a_scheduler_s_state_of_the_older_form_is_refused(world):
    optimizer = DistributedOptimizer(torch.optim.SGD, Weights(PLACES[0], VALUES).rrefs, lr=0.1)
    rate = DistributedLRScheduler(lr_scheduler.StepLR, optimizer, step_size=1)
    one = rate.state_dict()
    with pytest.raises(
        nbdist.UsageError, match=r"of the scheduler is of an older form, keyed by workers \(worker1, worker2"
    ):
        rate.load_state_dict({"worker1": one, "worker2": one})
    assert rate.state_dict() == one
