import collections
import math
import pickle

import pytest
import torch

from nbdist.rpc.references.peeking import Histogram, look


def numbers(tensor):
    return look(tensor, "worker1").numbers


def test_a_tensor():
    found = numbers(torch.tensor([[1.0, 2.0], [3.0, -6.0]]))
    assert (found.shape, found.dtype, found.device) == ([2, 2], "float32", "cpu")
    assert (found.min, found.max, found.mean) == (-6.0, 3.0, 0.0)
    assert found.norm == pytest.approx(math.sqrt(50))
    assert (found.nans, found.infs) == (0, 0)
    assert found.first == ["1", "2", "3", "-6"]
    assert sum(found.histogram.counts) == 4


def test_what_is_not_finite_is_counted_and_left_out():
    found = numbers(torch.tensor([float("nan"), 1.0, float("inf"), 3.0, float("-inf"), float("nan")]))
    assert (found.nans, found.infs) == (2, 2)
    assert (found.min, found.max, found.mean) == (1.0, 3.0, 2.0)
    assert sum(found.histogram.counts) == 2


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((5,), float("nan")),
        torch.empty(0, 3),
        torch.empty(2, device="meta"),
        torch.tensor([1 + 2j, 3 - 1j]),
        torch.tensor([], dtype=torch.int64),
    ],
    ids=["nan", "empty", "meta", "complex", "empty-int"],
)
def test_where_there_is_no_range(tensor):
    found = numbers(tensor)
    assert found.min is None
    assert found.histogram is None
    assert repr(look(tensor, "worker1")).startswith("Tensor on worker1")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_types_that_overflow_or_have_no_mean(dtype):
    found = numbers(torch.ones(70_000, dtype=dtype))
    assert (found.mean, found.max) == (1.0, 1.0)
    assert found.norm == pytest.approx(math.sqrt(70_000))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.sparse_coo_tensor([[0, 2]], [1.0, 5.0], (4,)),
        lambda: torch.tensor([[0.0, 1.0], [5.0, 0.0]]).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.tensor([0.0, 1.0, 5.0]), 0.1, 0, torch.quint8),
        lambda: torch.tensor([0.0, 1.0, 5.0]).to_mkldnn(),
    ],
    ids=["coo", "csr", "quantized", "mkldnn"],
)
def test_other_layouts(make):
    assert numbers(make()).max == pytest.approx(5.0)


def test_far_apart_lazy_and_odd():
    found = numbers(torch.tensor([-1.5e308, 0.0, 1.5e308], dtype=torch.float64))
    assert sum(found.histogram.counts) == 3
    assert str(found.histogram)
    assert numbers(torch.ones(3).to(torch.float8_e4m3fn)).max == 1.0
    assert numbers(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])).dtype == "float32"
    assert look(torch.nn.LazyLinear(2), "w").parameters[0].shape == []
    large = torch.zeros(3_000_000)
    large[2_500_000] = float("nan")
    large[2_999_999] = -7.0
    assert (numbers(large).nans, numbers(large).min, sum(numbers(large).histogram.counts)) == (1, -7.0, 2_999_999)


def test_looking_leaves_no_graph_and_no_gradient():
    tensor = torch.ones(3, requires_grad=True) * 2
    before = tensor.grad_fn
    numbers(tensor)
    assert tensor.grad_fn is before


def test_a_module():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1, bias=False))
    module[2].requires_grad_(False)
    with torch.no_grad():
        module[0].bias[0] = float("nan")
    found = look(module, "worker2").parameters
    assert [row.name for row in found] == ["0.weight", "0.bias", "2.weight"]
    assert [row.shape for row in found] == [[2, 3], [2], [1, 2]]
    assert [row.requires_grad for row in found] == [True, True, False]
    assert [row.nans for row in found] == [0, 1, 0]
    assert math.isfinite(found[1].norm)
    shown = repr(look(module, "worker2"))
    assert "0.weight" in shown
    assert "1 NaN" in shown
    assert "frozen" in shown


def test_other_values():
    assert repr(look([1, 2, 3], "worker0")) == "list on worker0, 3 items\n  [1, 2, 3]"
    assert look("x" * 1000, "worker0").length == 1000
    assert len(look("x" * 1000, "worker0").text) < 500
    assert look(collections.OrderedDict(a=1), "w").length == 1
    assert look(torch.nn.ReLU(), "w").text == "no parameters"


def test_a_value_that_cannot_be_told():
    class Odd:
        def __repr__(self):
            raise ValueError("not today")

    assert look(Odd(), "w").text == "its repr() raises ValueError: not today"


def test_a_value_that_cannot_be_counted():
    class Odd(collections.UserDict):
        def __len__(self):
            raise ValueError("not today")

    assert repr(look(Odd(a=1), "w")) == f"{Odd.__qualname__} on w\n  {{'a': 1}}"


def test_a_histogram_is_drawn():
    assert str(Histogram(0.0, 1.0, [0, 4, 8, 1])) == "0  ▄█▁ 1"


def test_it_travels():
    found = look(torch.arange(100.0), "worker1")
    assert pickle.loads(pickle.dumps(found)) == found
