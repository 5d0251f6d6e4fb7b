"""What gradients look like in numbers."""

import math

import pytest
import torch

from nbdist.autograd.graph import measuring
from nbdist.autograd.graph.measuring import Norms, are_finite, histograms, is_finite


def measure(gradients, norms=None):
    """The norm and the histogram."""
    norm, sample = measuring.measure(gradients, norms)
    return norm, histograms([sample])[0] if sample is not None else None


def test_norm_of_all_and_distribution_of_the_finite_ones():
    norm, found = measure([torch.tensor([3.0, 0.0]), None, torch.tensor([[4.0]])])
    assert norm == pytest.approx(5.0)
    assert (found.low, found.high) == (0.0, 4.0)
    assert sum(found.counts) == 3
    assert found.counts[0] == found.counts[-1] == 1


@pytest.mark.parametrize("spoilt", [0.0, math.nan, math.inf])
def test_several_gradients_on_one_gpu_are_measured_in_one_copy_with_the_same_result(monkeypatch, spoilt):
    """The way of a GPU, with tensors on the CPU."""
    gradients = [
        torch.arange(10_000.0),
        None,
        torch.tensor([[1.0, spoilt]], dtype=torch.float16),
        torch.tensor([1 + 2j]),
        torch.tensor(-3.0, dtype=torch.float64, requires_grad=True),
        torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,)),
        torch.empty(0, 3),
    ]
    expected = str(measure(gradients)), are_finite(gradients)  # as text, because a NaN does not equal itself
    joined = []
    cat = torch.cat
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch, "cat", lambda tensors: joined.append(len(tensors)) or cat(tensors))
    assert (str(measure(gradients)), are_finite(gradients)) == expected
    assert expected[1] is (spoilt == 0.0)
    assert 10 in joined, "6 norms and the 4 samples that are neither complex nor empty"


def test_what_is_not_finite():
    norm, found = measure([torch.tensor([1.0, math.nan, 2.0, math.inf])])
    assert math.isnan(norm)
    assert sum(found.counts) == 2
    assert measure([torch.tensor([math.inf])]) == (math.inf, None)
    assert not is_finite(torch.tensor([math.nan]))
    assert is_finite(None)


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(3),
        torch.zeros(0),
        torch.tensor(2.0),
        torch.ones(4, dtype=torch.bfloat16),
        torch.ones(4, dtype=torch.complex64),
        torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,)),
        torch.tensor([1e308, -1e308], dtype=torch.float64),
        torch.ones(2, 3).expand(5, 2, 3).transpose(0, 2),
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
    ],
    ids=str,
)
def test_all_kinds(gradient):
    norm, found = measure([gradient])
    assert norm >= 0
    assert found is None or sum(found.counts) >= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_narrow_values_does_not_overflow(dtype):
    norm, _ = measure([torch.full((10_000,), 60_000.0, dtype=dtype)])
    assert norm == pytest.approx(6e6, rel=0.01)


def test_finite_values_whose_sum_overflows():
    assert is_finite(torch.full((2,), 1.7e308 + 1.7e308j, dtype=torch.complex128))
    assert is_finite(torch.full((2,), 60_000.0, dtype=torch.float16))


def test_what_torch_cannot_search_counts_as_finite():
    strange = torch.ones(3, device="meta")
    with pytest.raises(RuntimeError):
        bool(strange.sum().isfinite())
    assert is_finite(strange)
    assert are_finite([strange, torch.ones(2)])
    assert not are_finite([strange, torch.tensor([math.nan])])


def test_of_many_values_a_sample():
    norm, found = measure([torch.arange(1_000_000.0)])
    assert norm == pytest.approx(float(torch.arange(1_000_000.0).norm()), rel=1e-3)
    assert sum(found.counts) <= 300
    assert max(found.counts) < 1.3 * min(found.counts)  # spread over all of them


def test_many_histograms_at_once_are_those_of_each():
    samples = [torch.randn(n) for n in (1, 3, 256)]
    samples += [torch.tensor([math.nan, 1.0, 2.0]), torch.tensor([math.inf]), torch.full((5,), 2.0)]
    samples.append(torch.tensor([1.7e308, -1.7e308], dtype=torch.float64))
    found = histograms(samples)
    assert found == [histograms([each])[0] for each in samples]
    assert [each and sum(each.counts) for each in found] == [1, 3, 256, 2, None, 5, 2]
    expected = torch.histc(samples[2].double(), 24, *map(float, samples[2].aminmax())).tolist()
    assert found[2].counts == expected


@pytest.mark.parametrize("spoilt", [0.0, math.nan, math.inf, 3e38])
def test_norms_that_are_noted_are_those_of_the_same_values(spoilt):
    norms = Norms()
    made = [torch.tensor([3.0, 4.0]), None, torch.ones(2, dtype=torch.float64), torch.full((2,), spoilt)]
    assert norms.note(made) is are_finite(made)
    assert measure([made[0]], norms) == measure([made[0]])
    norms.note(made)
    made[0].mul_(2)  # as the engine does, which adds gradients up in place
    assert measure([made[0]], norms)[0] == 10.0
    norms.note([torch.ones(5)])
    assert measure([torch.zeros(5)], norms)[0] == 0.0  # in the same place
