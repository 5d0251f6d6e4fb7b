"""What counts as rounding, and what as a difference."""

import copy

import pytest
import torch

from nbdist.cluster.inspection.rounding import difference, eps_of, nearest_slice

INF, NAN = float("inf"), float("nan")


def told(one, other, calls=1, terms=1, exact=False):
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    return difference(one, other, calls, terms, max(eps_of(one), eps_of(other)), exact=exact)


class SplitLinear(torch.nn.Linear):
    """A Linear that sums in two halves, as a tensor-parallel one on two workers does."""

    def forward(self, x):
        halves = zip(x.chunk(2, -1), self.weight.chunk(2, 1), strict=True)
        return sum(torch.nn.functional.linear(*each) for each in halves) + self.bias


def outputs(model, kind):
    """Return the outputs of all modules of a copy whose Linear modules are of another class."""
    model, found = copy.deepcopy(model), []
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = kind
        module.register_forward_hook(lambda module, args, output: found.append(output.detach()))
    model(torch.linspace(-1, 1, 512, dtype=next(model.parameters()).dtype).reshape(2, 4, 64))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_another_order_of_sums_is_rounding_and_a_wrong_scale_is_not(dtype):
    torch.manual_seed(0)
    blocks = [(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.LayerNorm(64))] * 4
    model = torch.nn.Sequential(*(module for block in blocks for module in block)).to(dtype)
    pairs = list(zip(outputs(model, torch.nn.Linear), outputs(model, SplitLinear), strict=True))
    assert not all(torch.equal(*pair) for pair in pairs)
    for calls, (one, other) in enumerate(pairs, 1):
        assert not told(one, other, calls, 256)
        assert told(one, other * 1.3, calls, 256)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_what_is_no_number(value):
    assert not told([1.0, value], [1.0, value])
    for other in {1.0, INF, -INF} - {value}:
        assert "1 of 2 values" in told([1.0, value], [1.0, other])
        assert "1 of 2 values" in told([1.0, other], [1.0, value])


def test_kinds():
    assert told([1.0], [1.0, 2.0]) == "float32(2,) instead of float32(1,)"
    assert told([1], [1.0]) == "float32(1,) instead of int64(1,)"
    assert told([1, 2], [1, 3]) == "first at [1]: 3 instead of 2; 1 of 2 values, at most 1 apart"
    assert not told([1.0, 3.0], torch.tensor([1.0, 3.003]).half())
    assert told([1.0, 3.0], torch.tensor([1.0, 3.0]).half(), exact=True) == "float16(2,) instead of float32(2,)"
    assert not told([1 + 1j], [1 + 1.0000001j])
    assert told([1 + 1j], [1 + 1.1j])
    assert not told(torch.ones(0), torch.ones(0))
    assert not told(1.0, 1.0000001)
    assert told([True, False], [True, True])


def test_parameters_are_not_computed():
    assert not told([1e-3], [1e-3 * (1 + 1e-7)], calls=0)
    assert told([1e-3], [1.001e-3], calls=0)  # less apart than values that cancel may be


def test_each_bit_counts():
    assert "1 of 2 values" in told([1.0, 1.0], [1.0, 1.0000001], exact=True)
    assert "a signed zero" in told([0.0], [-0.0], exact=True)
    assert not told([NAN, -0.0], [NAN, -0.0], exact=True)


def test_slices():
    whole = torch.arange(40.0).reshape(2, 4, 5)
    for part in (*whole.split(2, 1), *whole.split(3, 2), whole[1:], whole):
        assert torch.equal(nearest_slice(whole, part + 0.1), part)
    for part in (whole[0], whole[:, :2, :2], torch.ones(2, 4, 6), torch.ones(2, 4, 0)):
        assert nearest_slice(whole, part) is whole
