"""What values hold, and where in them an object is, in words."""

import collections
import functools
import gc
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch

from nbdist.cluster.inspection import anatomy, variables
from nbdist.cluster.inspection.census import Census, CensusWalk
from nbdist.cluster.inspection.roots import NamedValue

THIS = Path(__file__).name
Point = collections.namedtuple("Point", "x y")


class Trainer:
    def __init__(self, **fields):
        self.__dict__.update(fields)

    def step(self):
        pass


def look(name, value, held):
    """Where a walk that begins at a variable meets an object, and where it finds most of the bytes."""
    census = Census()
    census.watched[id(held)] = 1
    walk = CensusWalk(census, "variables", value, name)
    walk.go(10**6)
    return walk.met[1], walk.main_part()


class Holder(torch.nn.Module):
    pass


def module_with(held):
    holder = Holder()
    holder.weight = held
    return holder


def hooked(kept):
    def hook(*args):
        kept.append(args)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_forward_hook(hook)
    return model


def with_default(held):
    def collect(value, into=held):
        into.append(value)

    return collect


def caught(held):
    try:
        raise ValueError(held.shape)
    except ValueError as error:
        return error


def line_of(function, name):
    """The line of this file at which a function inside of another begins."""
    inner = [each for each in function.__code__.co_consts if isinstance(each, types.CodeType) and each.co_name == name]
    return f"{THIS}:{inner[0].co_firstlineno}"


HOOK = f"a closure of hook ({line_of(hooked, 'hook')}), in v"
DEFAULT = f"a default argument of collect ({line_of(with_default, 'collect')})"


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda held: [0, 1, 2, held], "element 3 of list v (4 elements)"),
        (lambda held: (held,), "element 0 of tuple v (1 element)"),
        (lambda held: collections.deque([0, held]), "element 1 of deque v (2 elements)"),
        (lambda held: {"a": 0, "b": held}, "item 'b' of dict v (2 items)"),
        (lambda held: {7: 0, 8: held}, "item 8 of dict v (2 items)"),
        (lambda held: {7: 0, (1, 2): held}, "an item of dict v (2 items)"),
        (lambda held: {7: 0, (1, held): 2}, "element 1 of tuple v[…] (2 elements)"),
        (lambda held: collections.defaultdict(list, {"a": [held]}), "element 0 of list v['a'] (1 element)"),
        (lambda held: {held}, "an element of set v (1 element)"),
        (lambda held: Point(0, held), "an element of Point v (2 elements)"),
        (lambda held: Trainer(step=0, cache=held), "attribute cache of Trainer v"),
        (lambda held: Trainer(inner=Trainer(cache={"k": [held]})), "element 0 of list v.inner.cache['k'] (1 element)"),
        (lambda held: torch.nn.Sequential(module_with(held)), "attribute weight of Holder v.0"),
        (lambda held: with_default([held]), f"element 0 of list (1 element), in {DEFAULT}, in v"),
        (lambda held: functools.partial(print, [held]), "element 0 of list (1 element), in v"),
        (lambda held: functools.partial(print, [[held]]), "element 0 of list (1 element), in v"),
        (lambda held: Trainer(x=[held]).step, "element 0 of list (1 element), in v"),
        (caught, "in v"),
        (lambda held: (held.sin(), 0), "in the graph of v[0]"),
    ],
)
def test_where_an_object_is(make, where):
    held = torch.nn.Parameter(torch.ones(30_000))
    value = make(held)
    met, main = look("v", value, held)
    assert met == where
    if "graph" not in where:  # whose result takes as much
        assert main.startswith(where)


def test_in_a_closure_of_a_hook():
    kept = []
    model = hooked(kept)
    held = torch.ones(30_000)
    kept += [held, held.clone(), held.clone()]
    met, main = look("v", model, held)
    assert met == f"element 0 of list kept (3 elements), in {HOOK}"
    assert main == f"{HOOK}: list of 3 Tensors float32"
    assert look("collect", with_default(held), held)[0] == DEFAULT, "under its own name"


def test_the_largest_part_is_told_only_if_it_is_more_than_half():
    parts = [torch.ones(10_000) for _ in range(4)]
    assert look("v", parts, parts[0])[1] == ""
    assert look("v", {"a": parts, "b": parts[0]}, parts[0])[1] == (
        "item 'a' of dict v (2 items): list of 4 Tensors float32"
    )


def test_a_part_is_an_object_and_not_its_instance_dict():
    parts = [torch.ones(10_000) for _ in range(2)]
    _, main = look("v", {"k": Trainer(a=parts[0], b=parts[1])}, parts[0])
    assert main == "item 'k' of dict v (1 item): Trainer"


def test_deep_and_many_paths_end():
    held, chain = torch.ones(3), []
    for _ in range(3):
        chain.append(held)
        for _ in range(1000):
            chain = [chain]
    assert look("v", chain, held) == ("", "")
    many = [[each] for each in range(3000)]
    census = Census()
    census.watched = {id(each): number for number, each in enumerate(many)}
    walk = CensusWalk(census, "variables", many, "v")
    walk.go(10**6)
    assert len(walk.met) == 3000
    assert walk.met[999] == "element 999 of list v (3,000 elements)"
    assert walk.met[1000] == ""
    inner = Trainer(held=held)
    for _ in range(9):
        inner = Trainer(**{"a_long_name": inner})
    assert look("v", inner, held)[0] == "attribute held of Trainer v.a_long_name.a_long…g_name.a_long_name.a_long_name"


def test_what_a_container_holds():
    number = torch.ones(2)
    for value, contents in (
        ([], " of 0"),
        ([1, 2], " of 2 ints"),
        ([number], " of 1 Tensor float32"),
        ([number, number.double()], " of 2: 1 Tensor float32, 1 Tensor float64"),
        ({"a": number, "b": number, "c": 1}, " of 3: 2 Tensor float32, 1 int"),
        ([1, "a", 2.0, None, ()], " of 5: 1 int, 1 str, 1 float, 1 NoneType, …"),
        ([Trainer()] * 1001, " of 1,001, the first 1,000: 1,000 Trainer"),
        (7, " 7"),
        (True, " True"),
        (0.5, " 0.5"),
        (10**5000, ""),
        ("secret", ""),
        (Trainer(), ""),
    ):
        assert anatomy.contents_of(value) == contents


def test_graphs_that_are_kept():
    leaf = torch.ones(3, requires_grad=True)
    losses = [(leaf * 2).sum() for _ in range(3)]
    rows, _ = variables.count(Census(), [NamedValue(["losses"], "variable", losses)])
    assert rows[0].contents == " of 3 Tensors float32 with their graphs (7 nodes)"
    rows, _ = variables.count(Census(), [NamedValue(["loss"], "variable", (leaf * 2).sum())])
    assert rows[0].contents == " with its graph (3 nodes)"
    rows, _ = variables.count(Census(), [NamedValue(["t"], "variable", Trainer(last=losses))])
    assert rows[0].contents == " with graphs (7 nodes)"
    rows, _ = variables.count(Census(), [NamedValue(["x"], "variable", [leaf, leaf.detach()])])
    assert rows[0].contents == " of 2 Tensors float32", "a leaf has no graph"


def test_few_bytes_with_many_nodes_are_not_small():
    leaf = torch.ones(3, requires_grad=True)
    few, many = [leaf.sum()], [(leaf * 2).sum() for _ in range(100)]
    (row,), _ = variables.count(Census(), [NamedValue(["x"], "variable", many)])
    assert (row.digest, row.nbytes < 100_000) == (None, True)
    (row,), _ = variables.count(Census(), [NamedValue(["x"], "variable", few)])
    assert row.digest is not None


def test_a_digest_tells_small_values_apart():
    def digest(value):
        walk = CensusWalk(Census(), "variables", value)
        walk.go(10**6)
        return walk.digest

    values = [0, 1, 0.5, "a", "b", [1, 2], [2, 1], {"rank": 0}, {"rank": 1}, Trainer(step=3), Trainer(step=4), None]
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"rank": 1, "x": [0.5]}) == digest({"rank": 1, "x": [0.5]})
    assert digest("x" * 10**6) == digest("x" * 10**6)


def test_nothing_is_kept_after_the_words_are_made():
    class Kept(list):
        pass

    kept = Kept([torch.ones(30_000)])
    known, count = weakref.ref(kept), sys.getrefcount(kept[0])
    rows, leading = variables.count(Census(), [NamedValue(["v"], "variable", {"k": kept})])
    now = sys.getrefcount(kept[0])
    assert now == count
    assert rows[0].main_part.startswith("an element of Kept v['k'] (1 element)")
    del kept
    gc.collect()
    assert known() is None
    assert leading == {}
