import math
from collections import namedtuple

import numpy
import pytest
import torch

from nbdist import rpc
from nbdist.cluster.inspection.comparing import _fingerprint, compare, differences, flatten
from nbdist.testing import World
from nbdist.views.workers.difference import DiffTable

Pair = namedtuple("Pair", "a b")
VALUES = {}


@pytest.fixture
def world():
    with World(3) as world, world[0].activate():
        yield world


def value_of(name):
    return VALUES[name]


def compared(*values):
    VALUES.clear()
    VALUES.update({f"worker{n}": value for n, value in enumerate(values)})
    rrefs = {name: rpc.remote(name, value_of, args=(name,)) for name in VALUES}
    return DiffTable("x", list(rrefs), *differences(rrefs))


def test_the_parts_of_a_value():
    value = {"a": [torch.ones(1), 2], "b": Pair(1, 2), 3: "x", "m": torch.nn.Linear(1, 1)}
    paths = [path for path, _ in flatten(value)]
    assert paths == [".a (length)", ".a[0]", ".a[1]", ".b", "[3]", ".m.weight", ".m.bias"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3),
        torch.zeros(0, 2),
        torch.tensor(True),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, 3).t(),
        torch.eye(2).to_sparse(),
        torch.ones(2, requires_grad=True),
    ],
    ids=str,
)
def test_the_print_of_a_tensor_is_that_of_its_values(tensor):
    assert _fingerprint("", tensor) == _fingerprint("", tensor.detach().clone())
    if tensor.numel():
        other = (~tensor if tensor.dtype is torch.bool else tensor.detach().to_dense() * 2).clone()
        assert _fingerprint("", tensor).digest != _fingerprint("", other).digest


def test_a_container_that_contains_itself():
    def made():
        value = {"numbers": [1, 2]}
        value["itself"] = value["numbers"].append(value)
        value["numbers"].append(value["numbers"])
        return value

    assert dict(flatten(made()))[".numbers[2]"] == dict(flatten(made()))[".numbers[3]"]
    shared = [1]
    assert dict(flatten([shared, shared]))["[1][0]"] == 1


def test_prints_of_other_values():
    assert _fingerprint("", {"b", "a"}) == _fingerprint("", {"a", "b"})
    assert _fingerprint("", lambda: 1).kind == "function"
    assert next(flatten(numpy.ones(2)))[1].dtype is torch.float64


def test_where_two_tensors_first_differ_and_by_how_much():
    one = torch.zeros(2, 3)
    other = one.clone()
    other[1, 0], other[1, 2] = 0.5, -2.0
    assert compare(one, other) == "first at [1, 0]: 0.5 instead of 0; 2 of 6 values, at most 2 apart"
    assert compare(torch.tensor(1), torch.tensor(3)) == "3 instead of 1, at most 2 apart"


@pytest.mark.parametrize(
    ("one", "other", "dtype", "apart"),
    [
        (2**60, 2**60 + 1, torch.int64, "1"),
        (-(2**63), 2**63 - 1, torch.int64, str(2**64 - 1)),
        (2**64 - 1, 2**63, torch.uint64, str(2**63 - 1)),
        (0, 2**64 - 1, torch.uint64, str(2**64 - 1)),
        (0, 255, torch.uint8, "255"),
        (-128, 127, torch.int8, "255"),
    ],
)
def test_integers_are_as_far_apart_as_they_are(one, other, dtype, apart):
    for a, b in ((one, other), (other, one)):
        told = compare(torch.tensor([0, a], dtype=dtype), torch.tensor([0, b], dtype=dtype))
        assert told.endswith(f"at most {apart} apart")
    assert compare(torch.tensor([True]), torch.tensor([False])) == "first at [0]: False instead of True"
    nan = torch.tensor([math.nan, 1.0])
    assert compare(nan, torch.tensor([math.nan, 2.0])).startswith("first at [1]: 2 instead of 1; 1 of 2 values")
    assert compare(torch.tensor([0.0]), torch.tensor([-0.0])).startswith("only the bits differ")
    assert compare("1", "2") == "2 instead of 1"
    assert "its pickle differs" in compare("1", "1")


@pytest.mark.parametrize("exponent", [60, 100, 2000, 50_000])
def test_large_integers_are_compared_exactly(exponent):
    one, other = 1 << exponent, (1 << exponent) + 3
    told = compare(one, other)
    assert told.endswith(", 3 apart")
    shown, _, of = told.partition(" instead of ")
    assert shown != of.partition(",")[0]
    if exponent <= 100:
        assert told == f"{other} instead of {one}, 3 apart"


def test_floats_that_round_to_the_same_text_are_shown_in_full():
    told = compare(torch.tensor(2.0**53, dtype=torch.float64), torch.tensor(2.0**53 + 2, dtype=torch.float64))
    assert told == "9007199254740994.0 instead of 9007199254740992.0, at most 2 apart"


def test_equal_on_all_workers(world):
    found = compared(*[[1, torch.ones(2)]] * 3)
    assert found
    assert repr(found) == "x is equal on 3 workers (3 parts)"


def test_one_that_differs_is_named(world):
    models = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    with torch.no_grad():
        models[2][1].weight[0, 1] += 0.25
    found = compared(*models)
    assert not found
    (line,) = found.differences
    assert (line.path, line.workers, line.is_odd) == (".1.weight", ("worker2",), True)
    assert "first at [0, 1]" in line.told
    assert "at most 0.25 apart" in line.told
    assert "x differs: 1 of 4 parts; worker2 differs from the others" in repr(found)
    assert "worker2" in found._repr_html_()


def test_the_first_worker_may_be_the_odd_one_out(world):
    found = compared({"a": 2**70 + 1, "b": [1]}, {"a": 2**70, "b": [1]}, {"a": 2**70, "b": [1]})
    assert repr(found) == (
        "x differs: 1 of 3 parts; worker0 differs from the others\n"
        f"  x.a on worker0: {2**70 + 1} instead of {2**70}, 1 apart"
    )


def test_without_a_majority_the_groups_that_agree_are_told():
    with World(4) as world, world[0].activate():
        found = compared(1, 2, 1, 2)
        assert repr(found) == "x differs: 1 of 1 parts\n  x on worker1,3: 2 instead of 1, from worker0,2's"
        found = compared(1, 2, 3, 2)
        assert "x on worker0: 1 instead of 2, from worker1,3's\n  x on worker2: 3 instead of 2" in repr(found)


def test_two_workers_have_no_odd_one():
    with World(2) as world, world[0].activate():
        found = compared(1, 2)
        assert repr(found) == "x differs: 1 of 1 parts, from worker0's\n  x on worker1: 2 instead of 1"


def test_other_shapes_types_and_keys(world):
    found = compared({"a": torch.ones(2), "b": 1}, {"a": torch.ones(3), "b": "1"}, {"a": torch.ones(2), "c": 1})
    told = {(each.path, *each.workers): each.told for each in found.differences}
    assert told[".a", "worker1"] == "Tensor float32(3,) instead of Tensor float32(2,)"
    assert told[".b", "worker1"] == "str instead of int, from worker0's"
    assert told[".b", "worker2"] == "it is missing"
    assert told[".c", "worker2"] == "it is missing on worker0,1"
    assert found.differing == 3


def test_numbers_are_compared_among_the_workers_whose_parts_are_of_one_kind():
    with World(4) as world, world[0].activate():
        found = compared(torch.ones(2), torch.ones(2), torch.zeros(2), torch.ones(3))
    told = {each.workers[0]: each.told for each in found.differences}
    assert told["worker3"] == "Tensor float32(3,) instead of Tensor float32(2,)"
    assert told["worker2"].startswith("first at [0]: 0 instead of 1")
    assert repr(found).startswith("x differs: 1 of 1 parts\n")


def test_so_much_is_told(world):
    found = compared(*[{n: n + shift for n in range(50)} for shift in range(3)])
    assert len([each for each in found.differences if each.told]) == 20
    assert len(repr(found).splitlines()) == 21
    assert found.differing == 50


def test_the_odd_one_out_is_named_after_all_parts_and_not_only_those_shown(world):
    values = [dict.fromkeys(range(50), 0) for _ in range(3)]
    values[2] = dict.fromkeys(range(50), 1)
    assert "50 of 50 parts; worker2 differs from the others" in repr(compared(*values))
    values[1][49] = 2
    assert repr(compared(*values)).startswith("x differs: 50 of 50 parts\n")
