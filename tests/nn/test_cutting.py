"""Cutting a model into stages."""

import itertools
import random
import time

import pytest
import torch

from nbdist.errors import UsageError
from nbdist.nn import cut, cutting


def model(*widths):
    return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def names(stages):
    return [[name for name, _ in stage.named_children()] for stage in stages]


def test_no_cut_is_better_than_the_balanced_one():
    generator = random.Random(0)
    for _ in range(200):
        costs = [generator.randrange(10) for _ in range(generator.randrange(1, 8))]
        parts = generator.randrange(1, len(costs) + 1)
        sizes = cutting.balanced(costs, parts)
        assert sum(sizes) == len(costs)
        assert len(sizes) == parts
        assert min(sizes) > 0
        best = min(worst(costs, cuts) for cuts in itertools.combinations(range(1, len(costs)), parts - 1))
        assert worst(costs, list(itertools.accumulate(sizes))[:-1]) == best


def worst(costs, cuts):
    return max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, len(costs)]))


def test_by_count_by_name_and_by_size():
    whole = model(2, 2, 2, 2, 2, 2)
    assert names(cut(whole, 2)) == [["0", "1", "2"], ["3", "4"]] or names(cut(whole, 2)) == [
        ["0", "1"],
        ["2", "3", "4"],
    ]
    assert names(cut(whole, at=["1", "4"])) == [["0"], ["1", "2", "3"], ["4"]]
    assert names(cut(model(100, 100, 1, 1, 1), 2, balance="size")) == [["0"], ["1", "2", "3"]]
    assert names(cut(whole)) == [["0"], ["1"], ["2"], ["3"], ["4"]]
    assert cut(whole, 2)[0][0] is whole[0]


class Slow(torch.nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        time.sleep(self.seconds)
        self.seen += 1
        return x + torch.rand(())


def test_by_measured_time_and_the_model_stays_as_it_was():
    whole = torch.nn.Sequential(Slow(0.2), Slow(0.001), Slow(0.001), Slow(0.001))
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    assert names(cut(whole, 2, balance="time", sample=torch.ones(2))) == [["0"], ["1", "2", "3"]]
    assert torch.equal(before, torch.random.get_rng_state())
    assert not any(layer.seen for layer in whole)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"stages": 9}, "2 layers cannot be cut into 9 stages"),
        ({"stages": 0}, "into 0 stages"),
        ({"at": ["x"]}, "no layer is called x; there are 0, 1"),
        ({"at": ["0"]}, "and not its first"),
        ({"at": ["1"], "stages": 3}, "makes 2 stages, not 3"),
        ({"stages": 2, "balance": "time"}, "give sample="),
        ({"stages": 2, "balance": "weight"}, "not 'weight'"),
    ],
)
def test_what_cannot_be_cut(arguments, told):
    with pytest.raises(UsageError, match=told):
        cut(model(2, 2, 2), **arguments)
    with pytest.raises(UsageError, match=r"only a torch\.nn\.Sequential"):
        cut(torch.nn.Linear(2, 2), 1)


class Residual(torch.nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def test_what_a_cut_would_lose_is_kept_or_refused():
    act = torch.nn.Tanh()
    whole = torch.nn.Sequential(torch.nn.Linear(2, 2), act, torch.nn.Linear(2, 2), act).eval()
    stages = cut(whole, 2)
    assert names(stages) == [["0", "1"], ["2", "3"]]
    assert not any(stage.training for stage in stages)
    with pytest.raises(UsageError, match="this Residual does more"):
        cut(Residual(torch.nn.Linear(2, 2)), 1)


def test_layers_that_work_in_place_are_measured():
    whole = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(inplace=True), torch.nn.Linear(2, 2))
    assert len(cut(whole, 2, balance="time", sample=torch.ones(3, 2))) == 2
