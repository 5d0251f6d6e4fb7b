"""A training that is saved and loaded goes on to the last bit, whichever workers its stages are on afterwards."""

import copy
import io

import pytest
import torch
from helpers.models.pipeline_models import draw, seed_all
from torch import nn

import nbdist
from nbdist import autograd as dist_autograd
from nbdist import rpc
from nbdist.nn import Pipeline
from nbdist.optim import DistributedLRScheduler, DistributedOptimizer
from nbdist.testing import World

WIDTH = 16


def model(seed):
    """Two stages of the same shapes, so that the state of one would fit the other."""
    torch.manual_seed(seed)
    stages = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.BatchNorm1d(WIDTH)) for _ in range(2))
    return nn.Sequential(*stages)


class Training:
    """A pipeline, its optimizer with two groups and its scheduler; data come from the test's own generator."""

    def __init__(self, workers, seed):
        self.pipe = Pipeline(model(seed), workers, stages=2, seed=seed)
        first, second = self.pipe.parameter_rrefs()[:4], self.pipe.parameter_rrefs()[4:]
        groups = [{"params": first, "lr": 0.02 + seed}, {"params": second}]
        self.optimizer = DistributedOptimizer(torch.optim.Adam, groups, lr=0.01 + seed)
        self.rates = DistributedLRScheduler(torch.optim.lr_scheduler.StepLR, self.optimizer, step_size=2, gamma=0.9)

    def steps(self, count):
        losses = []
        for _ in range(count):
            x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
            with dist_autograd.context() as context_id:
                losses.append(self.pipe.train_step(x, y, nn.functional.mse_loss))
                self.optimizer.step(context_id)
            self.rates.step()
        return torch.stack(losses)

    @property
    def parts(self):
        return {"pipe": self.pipe, "optimizer": self.optimizer, "rates": self.rates}

    def save(self):
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, file)
        return file

    def load(self, file):
        file.seek(0)
        state = torch.load(file, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


@pytest.fixture
def cluster(shared_cluster):
    return shared_cluster


@pytest.mark.timeout(120)
def test_the_next_ten_steps_are_the_same_wherever_the_stages_are(cluster):
    zero, one = cluster.names
    torch.manual_seed(0)
    training = Training([zero, one], seed=0)
    training.steps(3)
    saved = training.save()
    expected, weights = training.steps(10), training.pipe.state_dict()["model"]
    for workers in ([one, zero], [one], [zero, one]):
        other = Training(workers, seed=1)  # other weights, rates, seeds: all of them come from what is saved
        other.steps(1)
        other.load(saved)
        found = other.steps(10)
        assert torch.equal(found, expected), (workers, found - expected)
        assert all(torch.equal(other.pipe.state_dict()["model"][name], weight) for name, weight in weights.items())


@pytest.fixture
def world():
    with World(3) as world, world[2].activate():
        yield world


def train(pipe, x):
    with dist_autograd.context():
        return pipe.train_step(x, x, nn.functional.mse_loss)


def test_a_pipeline_is_set_back_to_a_step_that_it_has_done(world):
    pipe = Pipeline(model(0), ["worker0", "worker1"], seed=3)
    x = torch.randn(8, WIDTH)
    train(pipe, x)
    state = copy.deepcopy(pipe.state_dict())
    assert (state["steps"], state["seed"], state["cut"]) == (1, 3, ["0", "1"])
    expected = [train(pipe, x) for _ in range(3)]
    for _ in range(2):
        pipe.load_state_dict(state)
        assert torch.equal(torch.stack([train(pipe, x) for _ in range(3)]), torch.stack(expected))


def test_a_state_without_a_count_of_steps_or_of_another_cut_is_refused(world):
    plain = model(0)
    pipe = Pipeline(model(1), ["worker0", "worker1"])
    before = pipe.state_dict()
    for state, told in (
        (plain.state_dict(), r"lacks the count of steps, .* load_model\(state\)"),
        ([3], r"not what a pipeline's state_dict\(\) returns"),
        (
            Pipeline(model(0), ["worker0"]).state_dict(),
            r"begin at 0; those of this one begin at 0, 1, .* draw other numbers",
        ),
        ({**before, "model": {"0.0.weight": torch.ones(1)}}, r"13 names are missing \(0\.0\.bias, "),
        ({**before, "model": {**before["model"], "1.0.bias": torch.ones(1)}}, r"1\.0\.bias has the shape \(.*\), and "),
    ):
        with pytest.raises(nbdist.UsageError, match=told):
            pipe.load_state_dict(state)
    after = pipe.state_dict()
    assert all(torch.equal(value, before["model"][name]) for name, value in after["model"].items())
    train(pipe, torch.randn(8, WIDTH))
    pipe.load_model(plain.state_dict())
    assert pipe.state_dict()["steps"] == 1
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in pipe.state_dict()["model"].items())


def test_the_generators_of_the_driver_and_of_the_workers_come_back(cluster):
    zero, one = cluster.names
    pipe = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], [zero, one])
    for worker, seed in ((zero, 5), (one, 6)):
        rpc.rpc_sync(worker, seed_all, args=(seed,))
    seed_all(7)
    state = pipe.state_dict()
    expected = [draw(), rpc.rpc_sync(zero, draw), rpc.rpc_sync(one, draw)]
    Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], [one, zero]).load_state_dict(state)
    assert [draw(), rpc.rpc_sync(one, draw), rpc.rpc_sync(zero, draw)] == expected
    Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], [one]).load_state_dict(state)
    assert [draw(), rpc.rpc_sync(one, draw)] == expected[:2]
