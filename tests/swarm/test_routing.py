"""Where blocks are cut, the way through them, and who takes what nobody has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.swarm.routing import NoRoute, Span, assign, cut, route

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


def test_a_route_changes_the_server_as_seldom_as_can_be():
    blocks = {"a": [0, 1, 2], "b": [2, 3], "c": [1, 2, 3, 4], "d": [5]}
    assert route(blocks, 0, 6) == [Span("a", 0, 3), Span("c", 3, 5), Span("d", 5, 6)]
    assert route(blocks, 2, 4) == [Span("b", 2, 4)] or route(blocks, 2, 4) == [Span("c", 2, 4)]
    with pytest.raises(NoRoute, match="nobody has block 3"):
        route({"a": [0, 1, 2]}, 0, 4)
    with pytest.raises(NoRoute, match="nobody has block 0"):
        route({}, 0, 1)


def test_what_nobody_has_goes_to_who_has_the_fewest():
    assert assign({"a": [0, 1, 2], "b": [3]}, 0, 6) == [Span("b", 4, 6)]
    assert assign({"a": [0], "b": [1, 4]}, 0, 6) == [Span("a", 2, 4), Span("b", 5, 6)]
    assert assign({"a": [0, 1]}, 0, 2) == []
    with pytest.raises(NoRoute, match="nobody is left"):
        assign({}, 0, 2)
