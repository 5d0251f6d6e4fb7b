"""Where blocks are cut, the way through them, and who takes what nobody has."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.swarm.directory.routing import NoRoute, Offer, Span, assign, cut, route, spread

sizes = st.lists(st.integers(1, 20), min_size=1, max_size=12)


@given(sizes, st.integers(1, 5))
def test_a_cut_is_whole_and_no_part_is_larger_than_need_be(row, parts):
    found = cut(row, parts)
    assert len(found) == min(parts, len(row))
    assert [number for begin, end in found for number in range(begin, end)] == list(range(len(row)))
    assert all(begin < end for begin, end in found)
    assert max(sum(row[begin:end]) for begin, end in found) == best(tuple(row), min(parts, len(row)))


def best(row, parts):
    """The least that the largest part can be, by trying all."""
    if parts == 1:
        return sum(row)
    return min(max(sum(row[:at]), best(row[at:], parts - 1)) for at in range(1, len(row) - parts + 2))


def offers(**blocks):
    return {name: Offer(numbers) for name, numbers in blocks.items()}


def test_a_route_changes_the_server_as_seldom_as_can_be():
    found = offers(a=[0, 1, 2], b=[2, 3], c=[1, 2, 3, 4], d=[5])
    assert route(found, 0, 6) == [Span("a", 0, 3), Span("c", 3, 5), Span("d", 5, 6)]
    assert route(found, 2, 4) == [Span("b", 2, 4)] or route(found, 2, 4) == [Span("c", 2, 4)]
    assert route(found, 3, 3) == []
    with pytest.raises(NoRoute, match="no server has block 3"):
        route(offers(a=[0, 1, 2]), 0, 4)
    with pytest.raises(NoRoute, match="no server has block 0"):
        route({}, 0, 1)


servers = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(
        Offer,
        st.lists(st.integers(0, 4), unique=True).map(sorted),
        st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        st.sampled_from([0.5, 1.0, 2.0]),
        st.integers(0, 2),
    ),
)


@given(servers)
def test_no_way_takes_less_time(found):
    able = [[name for name in found if block in found[name].blocks] for block in range(5)]
    if not all(able):
        with pytest.raises(NoRoute, match=f"no server has block {able.index([])}"):
            route(found, 0, 5)
        return
    chosen = route(found, 0, 5)
    assert [block for span in chosen for block in range(span.begin, span.end)] == list(range(5))
    assert all(block in found[span.server].blocks for span in chosen for block in range(span.begin, span.end))
    names = [span.server for span in chosen for _ in range(span.begin, span.end)]
    assert cost(found, names) == pytest.approx(min(cost(found, each) for each in itertools.product(*able)))


def cost(found, names):
    hops = [name for before, name in zip([None, *names], names, strict=False) if name != before]
    return sum(found[name].hop for name in hops) + sum(found[name].pace * (1 + found[name].load) for name in names)


def test_many_requests_go_to_all_by_what_they_can_bear():
    found = {"fast": Offer([0, 1, 2], pace=1.0), "slow": Offer([0, 1, 2], pace=3.0)}
    choose = random.Random(0)
    names = [spread(found, 0, 3, choose)[0].server for _ in range(1000)]
    assert 700 <= names.count("fast") <= 800
    busy = {**found, "fast": found["fast"]._replace(load=8)}
    names = [spread(busy, 0, 3, choose)[0].server for _ in range(1000)]
    assert 200 <= names.count("fast") <= 300
    assert spread(offers(a=[0, 1], b=[2]), 0, 3, choose) == [Span("a", 0, 2), Span("b", 2, 3)]
    with pytest.raises(NoRoute, match="no server has block 2"):
        spread(offers(a=[0, 1]), 0, 3, choose)


def test_what_nobody_has_goes_to_who_has_the_fewest():
    assert assign({"a": [0, 1, 2], "b": [3]}, 0, 6) == [Span("b", 4, 6)]
    assert assign({"a": [0], "b": [1, 4]}, 0, 6) == [Span("a", 2, 4), Span("b", 5, 6)]
    assert assign({"a": [0, 1]}, 0, 2) == []
    with pytest.raises(NoRoute, match="no server is left"):
        assign({}, 0, 2)


def test_who_has_room_for_it():
    sizes = [10] * 6
    has = {"a": [0, 1], "b": [2]}
    assert assign(has, 0, 6, sizes, {"a": None, "b": 20}) == [Span("a", 3, 6)]
    assert assign(has, 0, 6, sizes, {"a": 30, "b": 30}) == [Span("b", 3, 5), Span("a", 5, 6)]
    with pytest.raises(NoRoute, match="weights of block 5"):
        assign(has, 0, 6, sizes, {"a": 25, "b": 30})
