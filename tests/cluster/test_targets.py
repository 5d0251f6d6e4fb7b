"""The table of targets, with its errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.cluster.targets import means_all, means_one, parse_targets
from nbdist.errors import NbdistError, UnknownWorker, UsageError

FOUR = ["worker0", "worker1", "worker2", "worker3"]
TUTORIAL = ["worker1", "worker2", "worker3"]  # with `--driver master` names and ranks differ by one


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", [0]),
        (" 3 ", [3]),
        ("-1", [3]),
        ("-4", [0]),
        ("0,2", [0, 2]),
        ("2, 0", [2, 0]),
        ("[0,1]", [0, 1]),
        ("[ 1 ]", [1]),
        ("[0-2]", [0, 1, 2]),
        ("0-2", [0, 1, 2]),
        ("[1-1]", [1]),
        ("0:2", [0, 1]),
        ("[0:2]", [0, 1]),
        ("2:", [2, 3]),
        (":2", [0, 1]),
        (":-1", [0, 1, 2]),
        ("::2", [0, 2]),
        ("1::2", [1, 3]),
        ("::-1", [3, 2, 1, 0]),
        ("0:4", [0, 1, 2, 3]),
        ("all", [0, 1, 2, 3]),
        ("*", [0, 1, 2, 3]),
        (":", [0, 1, 2, 3]),
        ("", [0, 1, 2, 3]),
        ("worker1", [1]),
        ("worker3,0", [3, 0]),
        ("0,[1]", [0, 1]),
        ("[0-1],worker3", [0, 1, 3]),
        ("[0,1], [3]", [0, 1, 3]),
        ("0,1-2,worker3", [0, 1, 2, 3]),
        ("0,0,-4,worker0", [0]),
        ("2,all", [2, 0, 1, 3]),
    ],
)
def test_the_table(text, ranks):
    assert parse_targets(text, FOUR) == ranks


def test_a_name_is_a_name_and_a_number_a_rank():
    assert parse_targets("worker1", TUTORIAL) == [0]
    assert parse_targets("1", TUTORIAL) == [1]


@pytest.mark.parametrize("targets", [0, -1, "0", " -1 ", "+1", "worker1"])
def test_a_rank_or_a_name_means_one_worker(targets):
    assert means_one(targets)


@pytest.mark.parametrize("targets", [None, [0], ["worker1"], "", "all", " all ", ":", "*", "[0]", "0,1", "0-0", "0:1"])
def test_other_targets_mean_several_workers(targets):
    assert not means_one(targets)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("4", UnknownWorker, "there is no worker with rank 4; there are worker0, worker1, worker2, worker3"),
        ("-5", UnknownWorker, "rank -5"),
        ("[0-4]", UnknownWorker, "rank 4"),
        ("0:5", UnknownWorker, "'0:5' goes beyond the last worker"),
        ("worker7", UnknownWorker, "there is no worker 'worker7'"),
        ("notebook", UnknownWorker, "'notebook'"),
        ("2-1", UsageError, "1-2"),
        ("3:3", UsageError, "names no worker"),
        ("::0", UsageError, "step"),
        ("[]", UsageError, "no worker"),
        ("[0", UsageError, "bracket"),
        ("0]", UsageError, "bracket"),
        ("[[0]]", UsageError, "bracket"),
        ("[0]1", UsageError, "bracket"),
        ("0,[]", UsageError, "not a target"),
        ("0,,1", UsageError, "not a target"),
        ("0,", UsageError, "not a target"),
        ("1.5", UsageError, "not a target"),
        ("range(3)", UsageError, "not a target"),
        ("[i for i in range(2)]", UsageError, "not a target"),
        ("__import__('os')", UsageError, "not a target"),
        ("-1-2", UsageError, "not a target"),
        ("1 2", UsageError, "not a target"),
        ("²", UsageError, "not a target"),
    ],
)
def test_errors_say_what_there_is(text, error, says):
    with pytest.raises(error) as raised:
        parse_targets(text, FOUR)
    assert type(raised.value) is error
    assert says in str(raised.value)


def test_the_error_is_short_in_a_large_cluster():
    with pytest.raises(UnknownWorker, match="there are worker0 … worker99, with ranks 0 to 99"):
        parse_targets("100", [f"worker{rank}" for rank in range(100)])
    with pytest.raises(UnknownWorker, match="there is worker0 alone, with rank 0"):
        parse_targets("1", ["worker0"])


bound = st.none() | st.integers(-6, 6)


@given(start=bound, stop=bound, step=st.none() | st.integers(-3, 3), size=st.integers(1, 6))
def test_slices_are_pythons_or_errors(start, stop, step, size):
    names = [f"worker{rank}" for rank in range(size)]
    text = ":".join("" if part is None else str(part) for part in (start, stop, step))
    try:
        found = parse_targets(text, names)
    except NbdistError:
        beyond = any(part is not None and abs(part) > size for part in (start, stop))
        assert beyond or step == 0 or not range(size)[start:stop:step]
    else:
        assert found == list(range(size)[start:stop:step])


@given(st.text(max_size=12))
def test_any_text_is_ranks_or_a_named_error(text):
    try:
        ranks = parse_targets(text, FOUR)
    except UsageError:
        return
    assert ranks
    assert len(set(ranks)) == len(ranks)
    assert set(ranks) <= {0, 1, 2, 3}


@pytest.mark.parametrize("targets", [None, "all", " : ", "*", "", "[all]"])
def test_what_means_all_workers_means_later_ones_too(targets):
    assert means_all(targets)


@pytest.mark.parametrize("targets", [0, [0, 1], "0", "0-1", "[]", "[", "]", "[all", "[[]]", "*]"])
def test_what_names_workers_or_is_wrong_does_not_mean_all(targets):
    assert not means_all(targets)
